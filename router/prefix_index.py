"""Which blocks each worker should have, from where this router sent them. Bounded; an expectation, never a promise. Knows nothing of tokens or streams.

Invariant: at most `capacity` hashes; the least recently used goes first. A worker that is gone needs no word: its key never comes back.
"""

from collections import OrderedDict
from collections.abc import Sequence

from router.view import WorkerKey


class PrefixIndex:
    def __init__(self, capacity: int = 100_000) -> None:
        self._capacity = capacity
        self._workers: OrderedDict[bytes, dict[WorkerKey, None]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._workers)

    def record(self, worker: WorkerKey, hashes: Sequence[bytes]) -> None:
        """`worker` computed or received these blocks. Tails go before heads when space runs out."""
        for block in reversed(hashes):
            self._workers.setdefault(block, {})[worker] = None
            self._workers.move_to_end(block)
        while len(self._workers) > self._capacity:
            self._workers.popitem(last=False)

    def match(self, hashes: Sequence[bytes]) -> dict[WorkerKey, int]:
        """For each worker the number of leading blocks it should have."""
        found: dict[WorkerKey, int] = {}
        for index, block in enumerate(hashes):
            holders = [worker for worker in self._workers.get(block, ()) if found.get(worker, 0) == index]
            if not holders:
                break
            found.update(dict.fromkeys(holders, index + 1))
        return found
