"""The seam of matrix products: a weight format packs a matrix once and multiplies by it. Owns packed weights; knows nothing of layers.

Invariant: an output depends on its own row of x alone, bitwise: not on the rows beside it, the chunk or the number of threads.
"""

from importlib import import_module
from typing import Protocol

import headrace_native
import torch
from headrace_native import PANEL, ROTATED, Array
from torch import Tensor

from engine.arena import Arena
from protocol.errors import ConfigError


class Linear(Protocol):
    """One packed matrix [N, K], with its bias."""

    def __call__(self, out: Array, x: Array, threads: int) -> None:
        """out [T, N] = x [T, K] weight^T + bias. x: the activations' dtype; out: that or fp32."""
        ...

    @property
    def packed(self) -> Array:
        """The weight as a step reads it, once."""
        ...


class LinearFormat(Protocol):
    dtype: torch.dtype  # of activations, norms and embedding beside it

    def pack(self, weight: Tensor, bias: Tensor | None, arena: Arena) -> Linear:
        """Of weight [N, K] and bias [N] in `dtype`; the packed bytes live in the arena."""
        ...


LINEARS = {
    "fp32": "engine.linear:Fp32",
    "bf16": "engine.linear:Bf16",
    "w8a8": "engine.linear:W8A8",
}


def load_format(name: str) -> LinearFormat:
    """A row of LINEARS. Raises ConfigError for an unknown name."""
    if name not in LINEARS:
        raise ConfigError(f"engine.weights: {name!r} is none of {', '.join(LINEARS)}", field="engine.weights")
    module, _, attribute = LINEARS[name].partition(":")
    row: LinearFormat = getattr(import_module(module), attribute)()
    return row


class Fp32:
    dtype = torch.float32

    def pack(self, weight: Tensor, bias: Tensor | None, arena: Arena) -> Linear:
        return PlainLinear(weight, bias, arena)


class Bf16:
    dtype = torch.bfloat16

    def pack(self, weight: Tensor, bias: Tensor | None, arena: Arena) -> Linear:
        return PlainLinear(weight, bias, arena)


class W8A8:
    """int8 weights, one scale for each output; activations rounded to int8 row by row as they come; both rotated first, sums exact."""

    dtype = torch.bfloat16

    def pack(self, weight: Tensor, bias: Tensor | None, arena: Arena) -> Linear:
        return Int8Linear(weight, bias, arena)


def _packed(weight: Tensor, arena: Arena) -> Tensor:
    """[N / PANEL, steps, PANEL * items]: a step is 32 bits of each output, an item one of its values."""
    outputs, width = weight.shape
    items = 4 // weight.element_size()
    packed = arena.take((-(-outputs // PANEL), width // items, PANEL * items), weight.dtype)
    headrace_native.pack_linear(packed, weight)
    return packed


class PlainLinear:
    """Weights and activations of one floating dtype, sums in fp32."""

    def __init__(self, weight: Tensor, bias: Tensor | None, arena: Arena) -> None:
        self.packed = Array(_packed(weight, arena))
        self._bias = None if bias is None else Array(bias.float())

    def __call__(self, out: Array, x: Array, threads: int) -> None:
        headrace_native.linear(out, x, self.packed, self._bias, threads)


class Int8Linear:
    def __init__(self, weight: Tensor, bias: Tensor | None, arena: Arena) -> None:
        outputs, width = weight.shape
        rounded = torch.empty(outputs, -(-width // ROTATED) * ROTATED, dtype=torch.int8)
        scales = torch.zeros(-(-outputs // PANEL) * PANEL)
        headrace_native.quantize_rows(rounded, scales[:outputs], weight)
        self.packed = Array(_packed(rounded, arena))
        self._columns = width
        self._scales = Array(scales)
        self._bias = None if bias is None else Array(bias.float())

    def __call__(self, out: Array, x: Array, threads: int) -> None:
        headrace_native.linear_int8(out, x, self.packed, self._columns, self._scales, self._bias, threads)
