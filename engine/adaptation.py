"""What the adapters of a batch add to the model's products, in one step. Owns the buffers; knows nothing of requests.

Invariants: rows without an adapter are not touched; what is added to a row depends on that row and its adapter alone. A product has the same input and
output tensors in all layers.
"""

from collections.abc import Sequence

import headrace_native
import torch
from headrace_native import Array
from torch import Tensor

from engine.batch import AdapterRows
from engine.lora import Adapter


class Adaptation:
    """Of the rows that `groups` name, in tensors that hold one row for each of the batch."""

    def __init__(self, groups: Sequence[AdapterRows], threads: int) -> None:
        self._groups = [group for group in groups if len(group.rows)]
        self._threads = threads
        self._products: dict[str, Product] = {}

    def among(self, wanted: Tensor) -> "Adaptation":
        """The same where only the rows `wanted` are left, in that order."""
        return Adaptation([group.among(wanted) for group in self._groups], self._threads)

    def add(self, layer: int, name: str, out: Tensor, x: Tensor) -> None:
        """out [T, N] += what the adapters make of x [T, K] in this layer's product `name`."""
        if not self._groups:
            return
        product = self._products.get(name)
        if product is None:
            product = self._products[name] = Product(name, self._groups, out, x)
        product.add(layer, self._threads)


class Product:
    """The adapters' rows of one product side by side, group after group; without copies where they are neighbours in the batch too."""

    def __init__(self, name: str, groups: Sequence[AdapterRows], out: Tensor, x: Tensor) -> None:
        self._name = name
        self._x, self._out = x, out
        self._rows = torch.cat([group.rows for group in groups])
        first, count = int(self._rows[0]), len(self._rows)
        self._neighbours = bool(torch.equal(self._rows, torch.arange(first, first + count)))
        self._inputs = x[first : first + count] if self._neighbours else x.new_empty(count, x.shape[1])
        self._target = out[first : first + count] if self._neighbours else None
        self._delta = torch.empty(count, out.shape[1])
        self._spans: list[tuple[Adapter, Array, Array, Tensor]] = []
        self._inner: dict[tuple[int, int], Array] = {}
        start = 0
        for group in groups:
            end = start + len(group.rows)
            self._spans.append((group.adapter, Array(self._inputs[start:end]), Array(self._delta[start:end]), self._delta[start:end]))
            start = end

    def add(self, layer: int, threads: int) -> None:
        if not self._neighbours:
            torch.index_select(self._x, 0, self._rows, out=self._inputs)
        for number, (adapter, inputs, result, values) in enumerate(self._spans):
            delta = adapter.layers[layer].get(self._name)
            if delta is None:
                values.zero_()
                continue
            inner = self._inner.get((number, delta.rank))
            if inner is None:
                inner = self._inner[number, delta.rank] = Array(self._inputs.new_empty(len(values), delta.rank))
            headrace_native.linear(inner, inputs, delta.down.packed, None, threads)
            headrace_native.linear(result, inner, delta.up.packed, None, threads)
        if self._target is not None:
            self._target.copy_(self._delta.add_(self._target))
        else:
            self._out.index_copy_(0, self._rows, self._delta.add_(self._out.index_select(0, self._rows)).to(self._out.dtype))
