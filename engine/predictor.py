"""How long answers become, learnt from those that ended, and how much memory that means. Owns running means; moves nothing.

Invariant: a prediction bounds admission only. When it is wrong a sequence is preempted or waits; no token changes.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from engine.sequence import Sequence

HORIZON = 64  # answers: a mean follows a change of traffic within so many
MOST_BUCKETS = 4096


class LengthPredictor:
    """One mean for each tenant and power of two of the prompt's length, one for each tenant."""

    def __init__(self) -> None:
        self._means: OrderedDict[tuple[str, int], tuple[float, int]] = OrderedDict()

    def learn(self, sequence: Sequence) -> None:
        """The sequence came to its natural end."""
        for bucket in _buckets(sequence):
            mean, count = self._means.pop(bucket, (0.0, 0))
            count = min(count + 1, HORIZON)
            self._means[bucket] = (mean + (sequence.num_output - mean) / count, count)
        while len(self._means) > MOST_BUCKETS:
            self._means.popitem(last=False)

    def remaining(self, sequence: Sequence) -> int:
        """Tokens that the sequence is expected to get still. Past its expectation, or without one, a block's worth at a time; never past its limit."""
        if sequence.submission.one_token:
            return 1
        mean = next((self._means[bucket][0] for bucket in _buckets(sequence) if bucket in self._means), 0.0)
        expected = max(round(mean) - sequence.num_output, sequence.block_tokens)
        return max(1, min(expected, sequence.request.sampling.max_tokens - sequence.num_output))


def _buckets(sequence: Sequence) -> tuple[tuple[str, int], tuple[str, int]]:
    return (sequence.request.tenant, sequence.num_prompt.bit_length()), (sequence.request.tenant, -1)


class Outlook(NamedTuple):
    """A sequence's memory: tokens now, blocks held now, those of them that its end sets free, tokens still to come."""

    num_tokens: int
    num_held: int
    num_own: int
    remaining: int


def peak_growth(outlooks: Iterable[Outlook], block_tokens: int) -> int:
    """Blocks beyond those held now that the sequences need at the worst moment, each getting a token a step and leaving at its expected end.

    The worst moment is just before one of them ends: row i of `needs` is what each needs when the i-th ends, less what those before it set free.
    """
    tokens, held, own, remaining = np.array(list(outlooks)).T
    ends = remaining[:, None]
    needs = np.where(remaining >= ends, -(-(tokens + ends) // block_tokens) - held, -own)
    return int(needs.sum(axis=1).max())
