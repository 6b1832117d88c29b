"""What a routing decision may look at: frozen pictures of the workers and stores. Knows nothing of streams, Redis or HTTP.

Invariant: a view never changes; the same view and request give the same choice.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Phase = Literal["prefill", "decode"]
WorkerKey = tuple[str, int]  # name, generation


@dataclass(frozen=True, slots=True)
class AdapterView:
    """A LoRA adapter that a worker has. `revision`: a fingerprint of its weights."""

    name: str
    revision: str
    path: str


@dataclass(frozen=True, slots=True)
class WorkerView:
    """`trouble`: why no new work may go there, empty when healthy. `waiting_tokens` and `sequences`: what the worker last said and what was sent since."""

    name: str
    generation: int
    role: str
    node: str
    trouble: str = ""
    sequences: int = 0
    waiting_tokens: int = 0
    steps: int = 0
    blocks_total: int = 0
    blocks_free: int = 0
    blocks_cached: int = 0
    draining: bool = False
    counters: Mapping[str, float] = field(default_factory=dict)
    attributes: Mapping[str, str] = field(default_factory=dict)
    adapters: tuple[AdapterView, ...] = ()

    @property
    def key(self) -> WorkerKey:
        return self.name, self.generation

    @property
    def healthy(self) -> bool:
        return not self.trouble

    def prefers(self, phase: Phase) -> bool:
        return self.role in (phase, "both")


@dataclass(frozen=True, slots=True)
class StoreView:
    name: str
    generation: int
    address: str
    node: str
    attributes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ClusterView:
    workers: tuple[WorkerView, ...] = ()
    stores: tuple[StoreView, ...] = ()

    def candidates(self, phase: Phase, excluded: frozenset[WorkerKey] = frozenset()) -> tuple[list[WorkerView], bool]:
        """Healthy workers for `phase`: those of its role, else any, which is a last resort (True)."""
        healthy = [worker for worker in self.workers if worker.healthy and worker.key not in excluded]
        preferred = [worker for worker in healthy if worker.prefers(phase)]
        return (preferred, False) if preferred else (healthy, bool(healthy))

    @property
    def adapters(self) -> dict[str, AdapterView]:
        """By name, of the healthy workers; where they disagree about the weights, as most of them have it."""
        counts = Counter(adapter for worker in self.workers if worker.healthy for adapter in worker.adapters)
        return {adapter.name: adapter for adapter, _ in sorted(counts.items(), key=lambda item: (item[1], item[0].revision))}

    def serving(self, adapter: str, revision: str) -> "ClusterView":
        """The workers that have the adapter in this revision; all of them where none is asked for."""
        if not adapter:
            return self
        able = (worker for worker in self.workers if any((one.name, one.revision) == (adapter, revision) for one in worker.adapters))
        return ClusterView(tuple(able), self.stores)

    @property
    def block_tokens(self) -> int:
        """Of every worker: those that differ could not exchange blocks."""
        return int(self._attribute("block_tokens", "32"))

    @property
    def salt(self) -> str:
        """What the workers' block names are made with, beside the tenant."""
        return self._attribute("salt", "")

    def _attribute(self, name: str, default: str) -> str:
        return next((worker.attributes[name] for worker in self.workers if name in worker.attributes), default)

    def store_of(self, node: str) -> StoreView | None:
        """The node's store; the newest one where a predecessor has not expired yet."""
        return max((store for store in self.stores if store.node == node), key=lambda store: store.generation, default=None)
