"""Embeddings: the last hidden states of a prompt, pooled. Owns the sums of one sequence over its chunks; knows nothing of models or scheduling.

Invariant: the result depends on the prompt alone. Mean pooling needs every position computed here, so its sequence reuses no KV.
"""

from collections.abc import Sequence as Many
from typing import Protocol

import torch
from torch import Tensor

from engine.batch import Batch, HiddenRows

KINDS = ("mean", "last")


class Pooling:
    def __init__(self, kind: str, num_tokens: int) -> None:
        """Of `num_tokens` positions; `kind`: one of KINDS."""
        self._kind = kind
        self._num_tokens = num_tokens
        self._sum: Tensor | None = None  # fp64 [hidden]

    @property
    def needs_all(self) -> bool:
        return self._kind == "mean"

    def wanted(self, start: int, end: int) -> range:
        """Those of positions [start, end) whose hidden state is pooled."""
        return range(start if self.needs_all else max(start, self._num_tokens - 1), end)

    def take(self, hidden: Tensor) -> None:
        """fp32 [n, hidden] of the next wanted positions. Sums in fp64: the chunks leave no trace in the fp32 result."""
        if len(hidden):
            some = hidden.double().sum(dim=0)
            self._sum = some if self._sum is None else self._sum + some

    def reset(self) -> None:
        """The sequence starts again."""
        self._sum = None

    def result(self) -> tuple[float, ...]:
        """fp32 values of length 1 in L2 (zeros stay zeros). The mean needs no division: only its direction is left."""
        assert self._sum is not None
        values: list[float] = (self._sum / self._sum.norm().clamp_min(1e-30)).float().tolist()
        return tuple(values)


class Pooled(Protocol):
    """What is asked of a sequence here."""

    pooling: Pooling | None
    num_computed: int


Scheduled = Many[tuple[Pooled, int]]


def hidden_rows(scheduled: Scheduled) -> HiddenRows | None:
    """The rows of a batch of these sequences, so many tokens of each, that are pooled."""
    rows: list[int] = []
    first = 0
    for sequence, num_tokens in scheduled:
        start = sequence.num_computed
        if sequence.pooling is not None:
            rows += (first + position - start for position in sequence.pooling.wanted(start, start + num_tokens))
        first += num_tokens
    return HiddenRows(torch.tensor(rows)) if rows else None


def pool_hidden(scheduled: Scheduled, batch: Batch) -> None:
    """Give each sequence the hidden states that the batch computed for it. Called before the sequences advance."""
    if batch.hidden is None:
        return
    assert batch.hidden.values is not None
    first = 0
    for sequence, num_tokens in scheduled:
        if sequence.pooling is not None:
            count = len(sequence.pooling.wanted(sequence.num_computed, sequence.num_computed + num_tokens))
            sequence.pooling.take(batch.hidden.values[first : first + count])
            first += count
