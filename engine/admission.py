"""Who of a tenant's waiting sequences goes first. Owns the ranking alone: classes, tenants and ages are the waiting queue's, memory the scheduler's.

Contract, checked for every row of ADMISSION by tests/contract/test_admission.py: a rank is a pure function of the sequence, the pool's prefix index and
the lengths learnt; it moves nothing.
"""

from importlib import import_module
from typing import Protocol

from engine.block_pool import BlockPool
from engine.predictor import LengthPredictor
from engine.sequence import Sequence
from protocol.errors import ConfigError


class Admission(Protocol):
    def rank(self, sequence: Sequence) -> float:
        """The lowest goes first; equal ranks in order of arrival."""
        ...


ADMISSION = {
    "fcfs": "engine.admission:FirstCome",
    "lpm": "engine.admission:LongestPrefix",
    "shortest_predicted": "engine.admission:ShortestPredicted",
}


def open_admission(name: str, pool: BlockPool, predictor: LengthPredictor) -> Admission:
    """A row of ADMISSION. Raises ConfigError for an unknown name."""
    if name not in ADMISSION:
        raise ConfigError(f"engine.admission: {name!r} is none of {', '.join(ADMISSION)}", field="engine.admission")
    module, _, attribute = ADMISSION[name].partition(":")
    admission: Admission = getattr(import_module(module), attribute)(pool, predictor)
    return admission


class FirstCome:
    def __init__(self, pool: BlockPool, predictor: LengthPredictor) -> None:
        pass

    def rank(self, sequence: Sequence) -> float:
        return 0.0


class LongestPrefix:
    """Whoever finds most of its blocks in the pool, before others evict them."""

    def __init__(self, pool: BlockPool, predictor: LengthPredictor) -> None:
        self._pool = pool

    def rank(self, sequence: Sequence) -> float:
        return -float(len(self._pool.match(sequence.hashes)))


class ShortestPredicted:
    """Least expected work first: tokens to compute and tokens to generate. An answer of unknown length counts as short, so that it becomes known."""

    def __init__(self, pool: BlockPool, predictor: LengthPredictor) -> None:
        self._predictor = predictor

    def rank(self, sequence: Sequence) -> float:
        return float(sequence.num_tokens + self._predictor.remaining(sequence))
