"""Any order of events on a NodeStore, against a model of what lies in each slot. Writers write whenever they think they may: also late."""

from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from kvstore.eviction import LeastRecentlyUsed
from kvstore.hashing import BlockHash
from kvstore.slots import Reservation, SlotState
from kvstore.store import Change, Key, Mover, NodeStore

SLOTS, SLOT_BYTES, MAX_HOLD_S = 6, 64, 50.0
CLIENTS = ("p1", "p2", "d")
REQUESTS = ("", "r1", "r2")
HASHES = tuple(BlockHash(bytes([i]) * 16) for i in range(8))

clients, requests, hashes = st.sampled_from(CLIENTS), st.sampled_from(REQUESTS), st.sampled_from(HASHES)


@dataclass(eq=False)
class Writer:
    """A grant as its writer sees it: it may write until it has said itself that it stopped."""

    client: str
    request: str
    hash: BlockHash
    private: bool
    reservation: int
    slot: int
    deadline: float
    done: bool = False


class UnfencedStore(NodeStore):
    """The mistake that quarantine prevents: time frees a slot."""

    def _quarantine(self, reservation: Reservation) -> None:
        if self._slots.state(reservation.slot) is SlotState.RESERVED:
            self._close(reservation)
            self._slots.move(reservation.slot, SlotState.FREE)
            self._settle(reservation.hash)


class StoreMachine(RuleBasedStateMachine):
    store_class = NodeStore
    watch_grants = True
    writers = Bundle("writers")
    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.visible: set[BlockHash] = set()
        self.store = self.store_class(SLOTS, SLOT_BYTES, eviction=LeastRecentlyUsed(), max_reserved=4, max_hold_s=MAX_HOLD_S, listener=self.on_change)
        self.content: list[int] = [0] * SLOTS  # the reservation whose writer wrote last
        self.open: list[Writer] = []
        self.leased: dict[int, tuple[str, float, list[tuple[int, int]]]] = {}

    def on_change(self, name: BlockHash, change: Change, private: bool) -> None:
        if change is Change.COMMITTED:
            assert name not in self.visible
            self.visible.add(name)
        elif change is Change.GONE:
            self.visible.remove(name)
        else:
            assert not self.store.has(name) and not self.store.pending(name)

    @rule(target=writers, client=clients, request=requests, name=hashes, private=st.booleans(), attempt=st.integers(0, 1), hold=st.floats(1, 100))
    def attach(self, client, request, name, private, attempt, hold):
        private = private and bool(request)
        (grant,) = self.store.attach(client, request, attempt, [Key(name, SLOT_BYTES, private)], self.now + hold, self.now)
        writer = Writer(client, request, name, private, grant.reservation, grant.offset // SLOT_BYTES, self.now + min(hold, MAX_HOLD_S))
        if grant.mover is Mover.HAVE:
            assert self.store.has(name)
        if grant.mover is not Mover.PUSH:
            writer.done = True
            return writer
        if self.watch_grants:
            assert all(other.slot != writer.slot for other in self.open), "two writers for one slot"
        self.open.append(writer)
        return writer

    @rule(writer=writers)
    def write(self, writer):
        if not writer.done:
            self.content[writer.slot] = writer.reservation

    @rule(writer=writers)
    def commit(self, writer):
        if writer.done:
            return
        self.write(writer)
        self.finish(writer)
        held = self.store.has(writer.hash)
        accepted, present = self.store.commit(writer.client, writer.reservation, SLOT_BYTES, writer.reservation, "raw", 32, self.now)
        assert not (accepted and held), "the first commit wins"
        assert not (accepted and writer.deadline <= self.now), "an expired writer is fenced"
        assert present == self.store.has(writer.hash)
        assert self.store.commit(writer.client, writer.reservation, SLOT_BYTES, 0, "raw", 32, self.now).accepted is False

    @rule(writer=writers)
    def abandon(self, writer):
        if not writer.done:
            self.finish(writer)
            self.store.abandon(writer.client, [writer.reservation])

    @rule(client=clients)
    def client_gone(self, client):
        for writer in [w for w in self.open if w.client == client]:
            self.finish(writer)
        self.store.client_gone(client)
        self.leased = {i: lease for i, lease in self.leased.items() if lease[0] != client}
        assert not self.store.reservations(client)

    @rule(client=clients)
    def client_lost(self, client):
        self.store.client_lost(client)
        self.leased = {i: lease for i, lease in self.leased.items() if lease[0] != client}

    @rule(target=leases, client=clients, request=requests, names=st.lists(hashes, min_size=1, max_size=4), hold=st.floats(1, 100))
    def acquire(self, client, request, names, hold):
        acquired = self.store.acquire(client, request, names, self.now + hold, "raw", self.now)
        run = next((i for i, name in enumerate(names) if not self.store.has(name)), len(names))
        assert [block.hash for block in acquired.blocks] == names[:run]
        for block in acquired.blocks:
            assert self.content[block.slot] == block.checksum, "a late write reached a committed block"
        if acquired.lease:
            blocks = [(block.slot, block.checksum) for block in acquired.blocks]
            self.leased[acquired.lease] = (client, self.now + min(hold, MAX_HOLD_S), blocks)
        return client, acquired.lease

    @rule(lease=leases, read=st.booleans())
    def release(self, lease, read):
        self.store.release(*lease, read)
        self.leased.pop(lease[1], None)

    @rule(request=requests)
    def forget(self, request):
        self.store.forget(request)
        assert not request or all(not w.private or w.request != request or not self.store.has(w.hash) or self.shared(w.hash) for w in self.open)

    @rule(name=hashes)
    def drop(self, name):
        self.store.drop(name)
        assert not self.store.has(name)

    @rule(seconds=st.floats(0.1, 60))
    def expire(self, seconds):
        self.now += seconds
        self.store.sweep(self.now)
        self.leased = {i: lease for i, lease in self.leased.items() if lease[1] > self.now}
        assert (self.store.next_deadline() or self.now + 1) > self.now

    def shared(self, name: BlockHash) -> bool:
        return name in self.visible

    def finish(self, writer: Writer) -> None:
        writer.done = True
        self.open.remove(writer)

    @invariant()
    def keeps_its_laws(self):
        assert self.store.check_integrity(self.now) == []
        status = self.store.status(self.now)
        assert status["slots_free"] + status["slots_cached"] + status["slots_reserved"] + status["slots_quarantined"] == SLOTS
        assert status["slots_reserved"] + status["slots_quarantined"] == len(self.open)

    @invariant()
    def readers_see_what_was_committed(self):
        for _, _, blocks in self.leased.values():
            for slot, reservation in blocks:
                assert self.content[slot] == reservation, "a late write reached a leased block"

    @invariant()
    def everything_visible_is_found(self):
        assert all(self.store.has(name) for name in self.visible)


FEW = settings(max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))


def test_any_order_of_events_keeps_the_laws():
    run_state_machine_as_test(StoreMachine, settings=FEW)


class UnfencedMachine(StoreMachine):
    store_class = UnfencedStore
    keeps_its_laws = None  # it counts open writers, which is too easy here


def test_random_orders_catch_a_store_that_lets_time_free_slots():
    options = settings(FEW, max_examples=1000, database=None, derandomize=True, phases=[Phase.generate])
    with pytest.raises(AssertionError, match="two writers for one slot"):
        run_state_machine_as_test(UnfencedMachine, settings=options)


@pytest.mark.parametrize("machine_class", [StoreMachine, UnfencedMachine])
def test_a_late_write_is_seen_in_the_contents(machine_class):
    machine = machine_class()
    machine.watch_grants = False
    late = machine.attach("p1", "r1", HASHES[0], False, 0, 10.0)
    machine.expire(20.0)
    machine.commit(machine.attach("p2", "", HASHES[1], False, 0, 10.0))
    machine.acquire("d", "", [HASHES[1]], 10.0)
    machine.write(late)
    if machine_class is StoreMachine:
        machine.readers_see_what_was_committed()
    else:
        with pytest.raises(AssertionError, match="a late write"):
            machine.readers_see_what_was_committed()
