"""One node's T1 as a pure state machine: who may write which slot, which block is where, who reads it. Knows nothing of memory, I/O, clocks or asyncio.

Invariants:
- free + cached + reserved + quarantined slots = all slots; every slot that is not free has exactly one owner record.
- A slot is written by at most one writer: from its reservation until that writer commits, abandons or is gone. Time alone never frees it.
- A block that is leased or held is never evicted; every reservation, lease and hold has a deadline at most `max_hold_s` away.
- Several reservations of one hash may be in flight; the first commit wins, the others are fenced.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from enum import IntEnum, StrEnum
from typing import NamedTuple

from kvstore.codec import acceptable
from kvstore.eviction import Eviction
from kvstore.hashing import BlockHash
from kvstore.slots import Block, Deadlines, Due, Hold, Lease, Owner, Reservation, SlotState, SlotTable
from protocol.errors import DeadlineExceeded, InvalidRequest


class Key(NamedTuple):
    """`length`: the most encoded bytes that the writer will send."""

    hash: BlockHash
    length: int
    private: bool = False


class Mover(IntEnum):
    """Who brings a block here; the numbers are the wire's."""

    HAVE = 0
    PULL = 1
    PUSH = 2
    NO_CREDIT = 3


class Grant(NamedTuple):
    """`reservation` and `offset` (bytes into the arena) of a PUSH."""

    mover: Mover
    reservation: int = 0
    offset: int = 0


class Committed(NamedTuple):
    """`present`: the node has a committed copy, whoever wrote it."""

    accepted: bool
    present: bool


class Acquired(NamedTuple):
    """The leading run of committed blocks; `lease` 0 when it is empty."""

    lease: int
    blocks: tuple[Block, ...]


class Change(StrEnum):
    """What became of a hash."""

    COMMITTED = "committed"
    GONE = "gone"  # the committed copy was evicted or dropped
    FAILED = "failed"  # nobody writes it any more and there is no copy


Listener = Callable[[BlockHash, Change, bool], None]  # hash, change, private


class NodeStore:
    """`max_reserved`: slots that reserved and quarantined ones may take together. All times in one clock, the caller's."""

    def __init__(
        self, num_slots: int, slot_bytes: int, *, eviction: Eviction, max_reserved: int, max_hold_s: float, listener: Listener = lambda *_: None
    ) -> None:
        self.slot_bytes = slot_bytes
        self.counters: Counter[str] = Counter()
        self._slots = SlotTable(num_slots)
        self._eviction = eviction
        self._max_reserved = max(1, max_reserved)
        self._max_hold_s = max_hold_s
        self._listener = listener
        self._index: dict[BlockHash, Block] = {}
        self._reservations: dict[int, Reservation] = {}
        self._leases: dict[int, Lease] = {}
        self._holds: dict[str, Hold] = {}
        self._writers: Counter[BlockHash] = Counter()  # live reservations of a hash
        self._deadlines = Deadlines()
        self._doomed: set[Block] = set()  # dropped while pinned
        self._last_id = 0

    # ---- questions ----------------------------------------------------------------------------------------------------------------

    def has(self, block_hash: BlockHash, fidelity: str = "") -> bool:
        block = self._index.get(block_hash)
        return block is not None and acceptable(block.fidelity, fidelity)

    def block(self, block_hash: BlockHash) -> Block | None:
        return self._index.get(block_hash)

    def pending(self, block_hash: BlockHash) -> bool:
        """Whether a writer may still commit it."""
        return self._writers[block_hash] > 0

    def offset(self, slot: int) -> int:
        return slot * self.slot_bytes

    def hashes(self) -> list[BlockHash]:
        """Committed blocks that others may ask for."""
        return [block.hash for block in self._index.values() if not block.private]

    @property
    def peers_active(self) -> bool:
        """Whether anybody may read or write the arena now."""
        return bool(self._leases or self._reservations)

    def next_deadline(self) -> float | None:
        return self._deadlines.next()

    # ---- writers ------------------------------------------------------------------------------------------------------------------

    def attach(self, client: str, request_id: str, attempt: int, keys: Sequence[Key], deadline: float, now: float) -> list[Grant]:
        """One grant for each key. What is here already is held for the request (an empty request_id holds nothing). Raises DeadlineExceeded, InvalidRequest."""
        until = self._bounded(deadline, now, "attach")
        for key in keys:
            if not 0 < key.length <= self.slot_bytes:
                raise InvalidRequest(f"{key.length} bytes do not fit a slot of {self.slot_bytes}", field="length")
            if key.private and not request_id:
                raise InvalidRequest("a private block needs a request", field="request_id")
        self.hold(request_id, [key.hash for key in keys], until, now)  # before any grant evicts
        return [self._grant(client, request_id, attempt, key, until) for key in keys]

    def hold(self, request_id: str, hashes: Sequence[BlockHash], deadline: float, now: float) -> None:
        """Keep the blocks that are here until the request has read them, is forgotten, or its deadline."""
        until = self._bounded(deadline, now, "hold")
        for block in (self._index[name] for name in hashes if name in self._index):
            self._hold(request_id, block, until)

    def commit(self, client: str, reservation_id: int, length: int, checksum: int, fidelity: str, num_tokens: int, now: float) -> Committed:
        """The writer has written and will write no more: its slot holds the block, or is free again."""
        reservation = self._reservations.get(reservation_id)
        if reservation is None or reservation.client != client:
            self.counters["fenced"] += 1
            return Committed(False, False)
        self._close(reservation)
        name, late = reservation.hash, self._slots.state(reservation.slot) is SlotState.QUARANTINED or reservation.deadline <= now
        if late or name in self._index or not 0 < length <= reservation.length:
            self._slots.move(reservation.slot, SlotState.FREE)
            self.counters["lost" if name in self._index and not late else "fenced"] += 1
            if name in self._index and not late:
                self._hold(reservation.request_id, self._index[name], reservation.deadline)
            self._settle(name)
            return Committed(False, name in self._index)
        self._slots.move(reservation.slot, SlotState.COMMITTED)
        block = Block(name, reservation.slot, length, checksum, fidelity, num_tokens, reservation.private)
        self._index[name] = block
        self._eviction.add(name)
        self._hold(reservation.request_id, block, reservation.deadline)
        self.counters["commits"] += 1
        self.counters["committed_bytes"] += length
        self._settle(name)
        self._listener(name, Change.COMMITTED, block.private)
        return Committed(True, True)

    def abandon(self, client: str, reservation_ids: Sequence[int]) -> None:
        """The writer will not touch these slots again."""
        for reservation in [r for i in reservation_ids if (r := self._reservations.get(i)) and r.client == client]:
            self._close(reservation)
            self._slots.move(reservation.slot, SlotState.FREE)
            self.counters["abandoned"] += 1
            self._settle(reservation.hash)

    # ---- readers ------------------------------------------------------------------------------------------------------------------

    def acquire(self, client: str, request_id: str, hashes: Sequence[BlockHash], lease_until: float, fidelity: str, now: float) -> Acquired:
        """Lease the leading run of `hashes` that is here and good enough."""
        until = self._bounded(lease_until, now, "acquire")
        blocks: list[Block] = []
        for name in hashes:
            if not self.has(name, fidelity):
                break
            blocks.append(self._index[name])
        if not blocks:
            return Acquired(0, ())
        lease = Lease(self._next_id(), client, request_id, tuple(blocks), until)
        for block in blocks:
            self._pin(block)
        self._leases[lease.id] = lease
        self._deadlines.set(Due(Owner.LEASE, lease.id), until)
        return Acquired(lease.id, lease.blocks)

    def release(self, client: str, lease_id: int, read: bool = True) -> None:
        """End a lease; nothing for one that is over. `read`: the reader has its copy, so its request's holds on the blocks and private blocks go too."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.client != client:
            return
        for block in reversed(lease.blocks if read else ()):
            self._unhold(lease.request_id, block)
            if block.private:
                self._unindex(block)
        self._end_lease(lease)

    def drop(self, block_hash: BlockHash) -> None:
        """Nobody finds the block from now on; its slot goes with the last pin."""
        if block := self._index.get(block_hash):
            self._unindex(block)

    # ---- ends ---------------------------------------------------------------------------------------------------------------------

    def forget(self, request_id: str) -> None:
        """The request is over: its holds and private blocks go, its reservations are quarantined until their writers say that they stopped."""
        if not request_id:
            return
        for reservation in [r for r in self._reservations.values() if r.request_id == request_id]:
            self._quarantine(reservation)
        self._end_hold(request_id)

    def client_lost(self, client: str) -> None:
        """The client's stream broke, but it may still be writing: its reservations are quarantined, its leases end."""
        for reservation in [r for r in self._reservations.values() if r.client == client]:
            self._quarantine(reservation)
        for lease in [lease for lease in self._leases.values() if lease.client == client]:
            self._end_lease(lease)

    def client_gone(self, client: str) -> None:
        """It is certain that the client writes no more."""
        self.client_lost(client)
        self.abandon(client, self.reservations(client))

    def reservations(self, client: str) -> list[int]:
        """Those whose slots the client may still write."""
        return [r.id for r in self._reservations.values() if r.client == client]

    def sweep(self, now: float) -> None:
        """End what is past its deadline."""
        for owner, key in self._deadlines.pop_due(now):
            self.counters[f"expired_{owner}s"] += 1
            if owner is Owner.RESERVATION:
                self._quarantine(self._reservations[int(key)])
            elif owner is Owner.LEASE:
                self._end_lease(self._leases[int(key)])
            else:
                self._end_hold(str(key))

    # ---- what it all rests on -----------------------------------------------------------------------------------------------------

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def _bounded(self, deadline: float, now: float, stage: str) -> float:
        if deadline <= now:
            raise DeadlineExceeded(f"the deadline passed {now - deadline:.3f} s before {stage}", stage=stage)
        return min(deadline, now + self._max_hold_s)

    def _grant(self, client: str, request_id: str, attempt: int, key: Key, until: float) -> Grant:
        if key.hash in self._index:
            self._eviction.touch(key.hash)
            self.counters["have"] += 1
            return Grant(Mover.HAVE)
        slot = self._allocate()
        if slot is None:
            self.counters["no_credit"] += 1
            return Grant(Mover.NO_CREDIT)
        reservation = Reservation(self._next_id(), key.hash, slot, key.length, key.private, client, request_id, attempt, until)
        self._reservations[reservation.id] = reservation
        self._writers[key.hash] += 1
        self._deadlines.set(Due(Owner.RESERVATION, reservation.id), until)
        self.counters["reserved"] += 1
        return Grant(Mover.PUSH, reservation.id, self.offset(slot))

    def _allocate(self) -> int | None:
        if len(self._reservations) >= self._max_reserved:
            return None
        if not self._slots.count(SlotState.FREE):
            victim = self._eviction.victim()
            if victim is None:
                return None
            self.counters["evictions"] += 1
            self._unindex(self._index[BlockHash(victim)])
        return self._slots.reserve()

    def _close(self, reservation: Reservation) -> None:
        """The record ends; the caller moves the slot."""
        del self._reservations[reservation.id]
        self._deadlines.discard(Due(Owner.RESERVATION, reservation.id))
        if self._slots.state(reservation.slot) is SlotState.RESERVED:
            self._writers[reservation.hash] -= 1

    def _quarantine(self, reservation: Reservation) -> None:
        if self._slots.state(reservation.slot) is SlotState.RESERVED:
            self._slots.move(reservation.slot, SlotState.QUARANTINED)
            self._deadlines.discard(Due(Owner.RESERVATION, reservation.id))
            self._writers[reservation.hash] -= 1
            self.counters["quarantined"] += 1
            self._settle(reservation.hash)

    def _settle(self, name: BlockHash) -> None:
        """A writer of `name` is out; were all of them, those who wait should know."""
        if self._writers[name] == 0:
            del self._writers[name]
            if name not in self._index:
                self._listener(name, Change.FAILED, False)

    def _hold(self, request_id: str, block: Block, until: float) -> None:
        if not request_id:
            return
        hold = self._holds.setdefault(request_id, Hold(until))
        if not hold.blocks or until > hold.deadline:
            hold.deadline = until
            self._deadlines.set(Due(Owner.HOLD, request_id), until)
        if block not in hold.blocks:
            hold.blocks[block] = None
            self._pin(block)

    def _unhold(self, request_id: str, block: Block) -> None:
        hold = self._holds.get(request_id)
        if hold is None or block not in hold.blocks:
            return
        del hold.blocks[block]
        self._unpin(block)
        if not hold.blocks:
            self._end_hold(request_id)

    def _end_hold(self, request_id: str) -> None:
        hold = self._holds.pop(request_id, None)
        self._deadlines.discard(Due(Owner.HOLD, request_id))
        for block in reversed(hold.blocks if hold else {}):  # the deepest becomes evictable first, so it is evicted first
            if block.private:
                self._unindex(block)
            self._unpin(block)

    def _end_lease(self, lease: Lease) -> None:
        del self._leases[lease.id]
        self._deadlines.discard(Due(Owner.LEASE, lease.id))
        for block in reversed(lease.blocks):
            self._unpin(block)

    def _pin(self, block: Block) -> None:
        if block.pins == 0:
            self._eviction.remove(block.hash)
        block.pins += 1

    def _unpin(self, block: Block) -> None:
        block.pins -= 1
        if block.pins == 0 and block.indexed:
            self._eviction.add(block.hash)
        elif block.pins == 0:
            self._doomed.remove(block)
            self._slots.move(block.slot, SlotState.FREE)

    def _unindex(self, block: Block) -> None:
        if not block.indexed:
            return
        block.indexed = False
        del self._index[block.hash]
        if block.pins:
            self._doomed.add(block)
        else:
            self._eviction.remove(block.hash)
            self._slots.move(block.slot, SlotState.FREE)
        self._listener(block.hash, Change.GONE, block.private)

    # ---- what a tool may see ------------------------------------------------------------------------------------------------------

    def status(self, now: float) -> dict[str, int]:
        """slots_total, slots_free, slots_cached, slots_reserved, slots_quarantined, leases, holds, overdue."""
        count = self._slots.count
        return {
            "slots_total": len(self._slots),
            "slots_free": count(SlotState.FREE),
            "slots_cached": count(SlotState.COMMITTED),
            "slots_reserved": count(SlotState.RESERVED),
            "slots_quarantined": count(SlotState.QUARANTINED),
            "leases": len(self._leases),
            "holds": len(self._holds),
            "overdue": self._deadlines.overdue(now),
        }

    def check_integrity(self, now: float) -> list[str]:
        """What is broken, in words; empty when all is well. `now`: nothing may be past its deadline."""
        reservations, blocks = list(self._reservations.values()), [*self._index.values(), *self._doomed]
        owners = Counter([r.slot for r in reservations] + [b.slot for b in blocks] + list(self._slots.free))
        pins = Counter([b for lease in self._leases.values() for b in lease.blocks] + [b for hold in self._holds.values() for b in hold.blocks])
        state = self._slots.state
        live = Counter(r.hash for r in reservations if state(r.slot) is SlotState.RESERVED)
        dues = {Due(Owner.RESERVATION, r.id) for r in reservations if state(r.slot) is SlotState.RESERVED}
        dues |= {Due(Owner.LEASE, i) for i in self._leases} | {Due(Owner.HOLD, i) for i in self._holds}
        laws = {
            "every slot has exactly one owner": owners == Counter(range(len(self._slots))),
            "the counts are those of the states": all(self._slots.count(s) == n for s, n in self._slots.recount().items()),
            "a block's slot is committed": all(state(b.slot) is SlotState.COMMITTED for b in blocks),
            "a writer's slot is reserved or quarantined": all(state(r.slot) in (SlotState.RESERVED, SlotState.QUARANTINED) for r in reservations),
            "writers are counted by hash": self._writers == live and all(self._writers.values()),
            "pins are leases and holds": all(b.pins == pins[b] for b in {*blocks, *pins}),
            "a doomed block is pinned and not indexed": all(b.pins and not b.indexed for b in self._doomed),
            "evictable is indexed and unpinned": all((b.hash in self._eviction) == (b.pins == 0) for b in self._index.values())
            and len(self._eviction) == sum(b.pins == 0 for b in self._index.values()),
            "a private block is pinned": all(b.pins for b in self._index.values() if b.private),
            "credit is kept": len(reservations) <= self._max_reserved,
            "every deadline has its owner": self._deadlines.owners() == dues,
            "no hold is empty": all(hold.blocks for hold in self._holds.values()),
            "nothing is past its deadline": self._deadlines.overdue(now) == 0,
        }
        return [law for law, kept in laws.items() if not kept]
