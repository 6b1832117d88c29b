"""What one step computes, as tensors. Knows nothing of requests; the scheduler fills it, model and attention read it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.lora import Adapter


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The rows of a batch that one adapter changes: int64, ascending."""

    adapter: Adapter
    rows: Tensor

    def among(self, wanted: Tensor) -> "AdapterRows":
        """The same where only the rows `wanted` are left, in that order."""
        return AdapterRows(self.adapter, torch.isin(wanted, self.rows).nonzero()[:, 0])


@dataclass(slots=True)
class HiddenRows:
    """Rows whose last hidden state is wanted itself, int64 [P]; the runner leaves it in `values`, fp32 [P, hidden]."""

    rows: Tensor
    values: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """T tokens of S sequences, the tokens of a sequence side by side; CPU tensors, contiguous.

    A sequence's tokens are the last of its context: query i of n sits at position context_len - n + i and sees all up to itself.
    """

    tokens: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    slots: Tensor  # int64 [T]: block * block_tokens + offset, where the token's K/V goes; -1: it is stored already
    block_tables: Tensor  # int32 [S, M]: the sequence's blocks in order; past its context anything
    query_starts: Tensor  # int32 [S + 1]: rows query_starts[s] .. query_starts[s + 1] belong to sequence s
    context_lens: Tensor  # int32 [S]: tokens with K/V once this step is done
    logit_rows: Tensor  # int64 [R]: the rows whose logits are wanted
    adapters: tuple[AdapterRows, ...] = ()  # an adapter at most once, a row at most in one
    hidden: HiddenRows | None = None
