"""The attention seam: what a model needs of the paged pool, natively or in plain torch. Owns no memory; knows nothing of requests.

Invariant: after `store`, the pool holds the K/V of every token of the batch, so `attend` reads all K/V from the pool alone.
"""

from importlib import import_module
from typing import Protocol

import headrace_native
from torch import Tensor

from engine import reference
from engine.batch import Batch
from engine.rotary import Rotary
from protocol.errors import ConfigError


class Attention(Protocol):
    """`pool`: [num_blocks, KH, L, 2, B, D], of the activations' dtype (bf16 or fp32)."""

    def store(self, qkv: Tensor, rotary: Rotary, pool: Tensor, layer: int, batch: Batch) -> None:
        """Rotates q within qkv [T, (H + 2 KH) D] in place; writes the rotated k, and v, to the batch's slots."""
        ...

    def attend(self, out: Tensor, q: Tensor, pool: Tensor, layer: int, batch: Batch, scale: float) -> None:
        """out [T, H, D] = softmax(q k^T * scale) v, causal; q [T, H, D] rotated, its rows may be part of wider ones."""
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
    """headrace_native: bitwise the same result for a query whatever batch or chunk it comes in."""

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def store(self, qkv: Tensor, rotary: Rotary, pool: Tensor, layer: int, batch: Batch) -> None:
        headrace_native.rope_write_kv(qkv, batch.positions, rotary.cos, rotary.sin, pool, layer, batch.slots, self._threads)

    def attend(self, out: Tensor, q: Tensor, pool: Tensor, layer: int, batch: Batch, scale: float) -> None:
        headrace_native.paged_attention(out, q, pool, layer, batch.block_tables, batch.query_starts, batch.context_lens, scale, self._threads)


class ReferenceAttention:
    """Plain torch, torch's own threads: the oracle."""

    def __init__(self, threads: int) -> None:
        pass

    def store(self, qkv: Tensor, rotary: Rotary, pool: Tensor, layer: int, batch: Batch) -> None:
        reference.rope_write_kv(qkv, batch.positions, rotary.cos, rotary.sin, pool, layer, batch.slots)

    def attend(self, out: Tensor, q: Tensor, pool: Tensor, layer: int, batch: Batch, scale: float) -> None:
        reference.paged_attention(out, q, pool, layer, batch.block_tables, batch.query_starts, batch.context_lens, scale)
