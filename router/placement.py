"""The question that a routing policy answers and its answer. Data alone."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from router.view import WorkerKey, WorkerView


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """`num_tokens`: prompt and answer so far. `block_hashes`: of the full blocks of both. `cached_blocks`: how many leading blocks each worker is
    expected to have. `excluded`: workers that failed this request."""

    num_tokens: int
    block_tokens: int
    block_hashes: tuple[bytes, ...] = ()
    cached_blocks: Mapping[WorkerKey, int] = field(default_factory=dict)
    excluded: frozenset[WorkerKey] = frozenset()
    priority: int = 0

    def cached_tokens(self, worker: WorkerView) -> int:
        return min(self.cached_blocks.get(worker.key, 0) * self.block_tokens, max(self.num_tokens - 1, 0))

    def uncached_tokens(self, worker: WorkerView) -> int:
        return self.num_tokens - self.cached_tokens(worker)


@dataclass(frozen=True, slots=True)
class Placement:
    """`prefill` None: the decode worker computes the prompt too. `last_resort`: the rule that had to give way, empty mostly."""

    prefill: WorkerView | None
    decode: WorkerView
    reason: str
    last_resort: str = ""
