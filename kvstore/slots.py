"""The life of a slot as one enum and one table, and what hangs on slots: blocks, reservations, leases, holds, their deadlines. Knows no policy.

Invariant: a slot's state changes only through SlotTable.move, which refuses what TRANSITIONS lacks.
"""

import heapq
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from kvstore.hashing import BlockHash
from protocol.errors import IllegalTransition


class SlotState(StrEnum):
    FREE = "free"
    RESERVED = "reserved"  # a writer may fill it until its deadline
    COMMITTED = "committed"  # holds a block
    QUARANTINED = "quarantined"  # the reservation is over, but its writer may still write


TRANSITIONS: dict[SlotState, frozenset[SlotState]] = {
    SlotState.FREE: frozenset({SlotState.RESERVED}),
    SlotState.RESERVED: frozenset({SlotState.COMMITTED, SlotState.QUARANTINED, SlotState.FREE}),
    SlotState.COMMITTED: frozenset({SlotState.FREE}),
    SlotState.QUARANTINED: frozenset({SlotState.FREE}),
}


class SlotTable:
    """The state of each slot and the list of free ones. O(1)."""

    def __init__(self, num_slots: int) -> None:
        self._states = [SlotState.FREE] * num_slots
        self._free: dict[int, None] = dict.fromkeys(range(num_slots - 1, -1, -1))
        self._counts = {state: 0 for state in SlotState} | {SlotState.FREE: num_slots}

    def __len__(self) -> int:
        return len(self._states)

    def state(self, slot: int) -> SlotState:
        return self._states[slot]

    def count(self, state: SlotState) -> int:
        return self._counts[state]

    def recount(self) -> dict[SlotState, int]:
        """The counts, taken anew from the states."""
        return {state: self._states.count(state) for state in SlotState}

    @property
    def free(self) -> tuple[int, ...]:
        return tuple(self._free)

    def reserve(self) -> int:
        """Takes a free slot; StopIteration when there is none."""
        slot = next(reversed(self._free))
        self.move(slot, SlotState.RESERVED)
        return slot

    def move(self, slot: int, to: SlotState) -> None:
        state = self._states[slot]
        if to not in TRANSITIONS[state]:
            raise IllegalTransition(f"slot {slot}: {state} -> {to}")
        if state is SlotState.FREE:
            del self._free[slot]
        if to is SlotState.FREE:
            self._free[slot] = None
        self._states[slot] = to
        self._counts[state] -= 1
        self._counts[to] += 1


@dataclass(eq=False, slots=True)
class Block:
    """A committed copy. `pins`: leases and holds on it; 0 pins and `indexed` means evictable. Not `indexed`: goes with its last pin."""

    hash: BlockHash
    slot: int
    length: int
    checksum: int
    fidelity: str
    num_tokens: int
    private: bool
    pins: int = 0
    indexed: bool = True


@dataclass(slots=True)
class Reservation:
    id: int
    hash: BlockHash
    slot: int
    length: int
    private: bool
    client: str
    request_id: str
    attempt: int
    deadline: float


@dataclass(slots=True)
class Lease:
    id: int
    client: str
    request_id: str
    blocks: tuple[Block, ...]
    deadline: float


@dataclass(slots=True)
class Hold:
    """Blocks that a request will acquire; in the order of its prefix."""

    deadline: float
    blocks: dict[Block, None] = field(default_factory=dict)


class Owner(StrEnum):
    RESERVATION = "reservation"
    LEASE = "lease"
    HOLD = "hold"


class Due(NamedTuple):
    owner: Owner
    key: int | str


class Deadlines:
    """Earliest first; a heap whose stale entries are skipped."""

    def __init__(self) -> None:
        self._at: dict[Due, float] = {}
        self._heap: list[tuple[float, Due]] = []

    def __len__(self) -> int:
        return len(self._at)

    def set(self, due: Due, at: float) -> None:
        self._at[due] = at
        heapq.heappush(self._heap, (at, due))
        if len(self._heap) > 64 + 4 * len(self._at):
            self._heap = [(at, due) for due, at in self._at.items()]
            heapq.heapify(self._heap)

    def discard(self, due: Due) -> None:
        self._at.pop(due, None)

    def next(self) -> float | None:
        while self._heap and self._at.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now: float) -> list[Due]:
        due: list[Due] = []
        while (at := self.next()) is not None and at <= now:
            due.append(heapq.heappop(self._heap)[1])
            del self._at[due[-1]]
        return due

    def owners(self) -> AbstractSet[Due]:
        return self._at.keys()

    def overdue(self, now: float) -> int:
        return sum(at <= now for at in self._at.values())
