"""The attention seam: what a model needs of the paged pool, natively or in plain torch. Owns no memory; knows nothing of requests.

Invariant: a layer's K/V of every token of the batch is in the pool before its queries read it, so all K/V is read from the pool alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

import headrace_native
from headrace_native import Array
from torch import Tensor

from engine import reference
from engine.batch import Batch
from engine.rotary import Rotary
from protocol.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Step:
    """One step's tensors, the same for every layer; activations and pool of one dtype (bf16 or fp32)."""

    batch: Batch
    pool: Tensor  # [num_blocks, KH, L, 2, B, D]
    rotary: Rotary
    qkv: Tensor  # [T, (H + 2 KH) D]: a layer's projections
    out: Tensor  # [T, H, D]
    scale: float
    window: int = 0  # a query sees the last `window` tokens up to itself, all of them if 0,
    sinks: int = 0  # and the first `sinks` ones

    @property
    def q(self) -> Tensor:
        """[T, H, D], part of qkv."""
        return self.qkv.view(len(self.qkv), -1, self.out.shape[2])[:, : self.out.shape[1]]


class Attention(Protocol):
    def begin(self, step: Step) -> Callable[[int], None]:
        """The step's `attend(layer)`: rotates q within step.qkv in place, writes the rotated k, and v, to the batch's slots of the layer, then
        step.out = softmax(q k^T * scale) v over what a query sees. The caller fills step.qkv before each call."""
        ...


ATTENTION = {
    "native": "engine.attention:NativeAttention",
    "reference": "engine.attention:ReferenceAttention",
}


def load_attention(name: str, threads: int) -> Attention:
    """A row of ATTENTION; `threads` per call. Raises ConfigError for an unknown name."""
    if name not in ATTENTION:
        raise ConfigError(f"engine.attention: {name!r} is none of {', '.join(ATTENTION)}", field="engine.attention")
    module, _, attribute = ATTENTION[name].partition(":")
    attention: Attention = getattr(import_module(module), attribute)(threads)
    return attention


class NativeAttention:
    """headrace_native: bitwise the same result for a query whatever batch or chunk it comes in, and on any number of threads."""

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def begin(self, step: Step) -> Callable[[int], None]:
        batch, threads = step.batch, self._threads
        qkv, q, out, pool, cos, sin = map(Array, (step.qkv, step.q, step.out, step.pool, step.rotary.cos, step.rotary.sin))
        positions, slots, tables, starts, lens = map(Array, (batch.positions, batch.slots, batch.block_tables, batch.query_starts, batch.context_lens))

        def attend(layer: int) -> None:
            headrace_native.rope_write_kv(qkv, positions, cos, sin, pool, layer, slots, threads)
            headrace_native.paged_attention(out, q, pool, layer, tables, starts, lens, step.scale, threads, step.window, step.sinks)

        return attend


class ReferenceAttention:
    """Plain torch, torch's own threads: the oracle."""

    def __init__(self, threads: int) -> None:
        pass

    def begin(self, step: Step) -> Callable[[int], None]:
        batch, rotary = step.batch, step.rotary

        def attend(layer: int) -> None:
            reference.rope_write_kv(step.qkv, batch.positions, rotary.cos, rotary.sin, step.pool, layer, batch.slots)
            reference.paged_attention(
                step.out, step.q, step.pool, layer, batch.block_tables, batch.query_starts, batch.context_lens, step.scale, step.window, step.sinks
            )

        return attend
