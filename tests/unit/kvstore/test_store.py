import pytest

from kvstore.eviction import LeastRecentlyUsed
from kvstore.hashing import BlockHash
from kvstore.slots import TRANSITIONS, SlotState, SlotTable
from kvstore.store import Change, Committed, Grant, Key, Mover, NodeStore
from protocol.errors import DeadlineExceeded, IllegalTransition, InvalidRequest

SLOT = 100
NAMES = [BlockHash(bytes([i]) * 16) for i in range(20)]


def new_store(slots=8, max_reserved=8, **options) -> NodeStore:
    return NodeStore(slots, SLOT, eviction=LeastRecentlyUsed(), max_reserved=max_reserved, max_hold_s=100.0, **options)


def put(store, *indexes, client="p", request="", now=0.0, private=False) -> None:
    for i in indexes:
        (grant,) = store.attach(client, request, 1, [Key(NAMES[i], SLOT, private)], now + 50, now)
        assert store.commit(client, grant.reservation, SLOT, i, "raw", 32, now).accepted


def reserve(store, index, client="p", request="r", attempt=1, deadline=10.0, now=0.0) -> Grant:
    (grant,) = store.attach(client, request, attempt, [Key(NAMES[index], SLOT)], deadline, now)
    return grant


def present(store) -> set[int]:
    return {i for i, name in enumerate(NAMES) if store.has(name)}


@pytest.mark.parametrize("state", SlotState)
@pytest.mark.parametrize("to", SlotState)
def test_every_move_is_in_the_table_or_refused(state, to):
    ways = {SlotState.FREE: [], SlotState.RESERVED: [SlotState.RESERVED], SlotState.COMMITTED: [SlotState.RESERVED, SlotState.COMMITTED]}
    ways[SlotState.QUARANTINED] = [SlotState.RESERVED, SlotState.QUARANTINED]
    table = SlotTable(2)
    for step in ways[state]:
        table.move(0, step)
    if to in TRANSITIONS[state]:
        table.move(0, to)
        assert table.state(0) is to
    else:
        with pytest.raises(IllegalTransition):
            table.move(0, to)
        assert table.state(0) is state
    assert table.recount() == {s: table.count(s) for s in SlotState}


def test_attach_gives_every_block_one_answer():
    store = new_store(slots=4, max_reserved=2)
    put(store, 0)
    grants = store.attach("p", "r", 1, [Key(NAMES[i], SLOT) for i in range(4)], 10, 0)
    assert [grant.mover for grant in grants] == [Mover.HAVE, Mover.PUSH, Mover.PUSH, Mover.NO_CREDIT]
    assert len({grant.offset for grant in grants[1:3]}) == 2
    assert store.status(0)["slots_reserved"] == 2


def test_attach_does_not_evict_what_it_calls_present():
    store = new_store(slots=2)
    put(store, 0, 1)
    grants = store.attach("p", "r", 1, [Key(NAMES[i], SLOT) for i in (5, 0, 1)], 10, 0)
    assert [grant.mover for grant in grants] == [Mover.NO_CREDIT, Mover.HAVE, Mover.HAVE]


def test_first_commit_wins_and_the_loser_keeps_the_block_held():
    store = new_store()
    first, second = reserve(store, 0, "p1", "r1"), reserve(store, 0, "p2", "r2")
    assert first.offset != second.offset
    assert store.commit("p2", second.reservation, SLOT, 2, "raw", 32, 1) == Committed(True, True)
    assert store.commit("p1", first.reservation, SLOT, 1, "raw", 32, 1) == Committed(False, True)
    assert store.status(1)["slots_reserved"] == 0 and store.status(1)["holds"] == 2
    assert store.counters["lost"] == 1 and store.counters["fenced"] == 0
    assert store.acquire("d", "r1", [NAMES[0]], 9, "raw", 1).blocks[0].checksum == 2


def test_expired_reservation_is_quarantined_until_its_writer_speaks():
    store = new_store(slots=1)
    grant = reserve(store, 0, deadline=10)
    store.sweep(10)
    assert store.status(10)["slots_quarantined"] == 1 and not store.pending(NAMES[0])
    store.sweep(1e9)
    assert reserve(store, 1, deadline=2e9, now=1e9).mover is Mover.NO_CREDIT
    assert store.commit("p", grant.reservation, SLOT, 0, "raw", 32, 1e9) == Committed(False, False)
    assert store.counters["fenced"] == 1 and present(store) == set()
    assert reserve(store, 1, deadline=2e9, now=1e9).mover is Mover.PUSH


def test_late_commit_is_fenced_before_any_sweep():
    store = new_store()
    grant = reserve(store, 0, deadline=10)
    assert not store.commit("p", grant.reservation, SLOT, 0, "raw", 32, 10).accepted
    assert store.status(10)["slots_free"] == 8


@pytest.mark.parametrize("end", ["abandon", "client_gone"])
def test_quarantine_ends_with_its_writer(end):
    store = new_store()
    grant = reserve(store, 0)
    store.sweep(50)
    store.abandon("p", [grant.reservation]) if end == "abandon" else store.client_gone("p")
    assert store.status(50)["slots_free"] == 8


def test_nobody_commits_or_abandons_for_another_client():
    store = new_store()
    grant = reserve(store, 0, "p1")
    store.abandon("p2", [grant.reservation])
    assert not store.commit("p2", grant.reservation, SLOT, 0, "raw", 32, 1).accepted
    assert store.commit("p1", grant.reservation, SLOT, 0, "raw", 32, 1).accepted


def test_a_longer_block_than_announced_is_refused():
    store = new_store()
    (grant,) = store.attach("p", "r", 1, [Key(NAMES[0], 10)], 10, 0)
    assert not store.commit("p", grant.reservation, 11, 0, "raw", 3, 1).accepted
    with pytest.raises(InvalidRequest, match="do not fit"):
        store.attach("p", "r", 1, [Key(NAMES[0], SLOT + 1)], 10, 0)


def test_max_hold_bounds_every_deadline():
    store = new_store()
    reserve(store, 0, deadline=1e9)
    assert store.next_deadline() == 100.0
    put(store, 1, request="r2")
    store.acquire("d", "", [NAMES[1]], 1e9, "raw", 20.0)
    store.sweep(120.0)
    status = store.status(120.0)
    assert (status["leases"], status["holds"], status["slots_quarantined"]) == (0, 0, 1)
    assert store.next_deadline() is None
    with pytest.raises(DeadlineExceeded):
        reserve(store, 2, deadline=5, now=5)


def test_eviction_takes_the_least_recent_and_the_deepest_of_a_prefix_first():
    store = new_store(slots=4)
    put(store, 0, 1, 2, 3)
    store.release("d", store.acquire("d", "", [NAMES[0], NAMES[1]], 50, "raw", 0).lease)
    put(store, 4, 5, 6)
    assert present(store) == {0, 4, 5, 6}
    assert store.counters["evictions"] == 3


def test_leased_and_held_blocks_stay():
    store = new_store(slots=3)
    put(store, 0)
    put(store, 1, request="r")
    lease = store.acquire("d", "", [NAMES[0]], 50, "raw", 0).lease
    put(store, 2)
    put(store, 3)
    assert present(store) == {0, 1, 3}
    store.release("d", lease)
    store.forget("r")
    put(store, 4, 5)
    assert present(store) == {1, 4, 5} or present(store) == {0, 4, 5}


def test_reading_ends_the_hold_of_the_request_that_read():
    store = new_store()
    put(store, 0, 1, request="r")
    lease = store.acquire("d", "r", [NAMES[0]], 50, "raw", 0).lease
    store.release("d", lease)
    assert store.status(0)["holds"] == 1
    lease = store.acquire("d", "r", [NAMES[1]], 50, "raw", 0).lease
    store.release("d", lease, read=False)
    assert store.status(0)["holds"] == 1
    store.sweep(50)
    assert store.status(0)["holds"] == 0 and present(store) == {0, 1}


@pytest.mark.parametrize("end", ["release", "forget", "deadline"])
def test_private_block_goes_with_its_request(end):
    changes = []
    store = new_store(listener=lambda name, change, private: changes.append((change, private)))
    put(store, 0, request="r", private=True)
    assert store.hashes() == []
    lease = store.acquire("d", "r", [NAMES[0]], 20, "raw", 0).lease
    {"release": lambda: store.release("d", lease), "forget": lambda: store.forget("r"), "deadline": lambda: store.sweep(60)}[end]()
    store.release("d", lease)
    assert present(store) == set() and store.status(60)["slots_free"] == 8
    assert changes == [(Change.COMMITTED, True), (Change.GONE, True)]


def test_private_block_under_lease_keeps_its_slot_until_release():
    store = new_store(slots=1)
    put(store, 0, request="r", private=True)
    lease = store.acquire("d", "r", [NAMES[0]], 20, "raw", 0).lease
    store.forget("r")
    assert reserve(store, 1).mover is Mover.NO_CREDIT
    store.release("d", lease)
    assert reserve(store, 1).mover is Mover.PUSH


def test_forget_quarantines_reservations_and_spares_other_requests():
    store = new_store()
    mine, other = reserve(store, 0, request="r1"), reserve(store, 1, request="r2")
    store.forget("r1")
    assert store.status(1)["slots_quarantined"] == 1
    assert not store.commit("p", mine.reservation, SLOT, 0, "raw", 32, 1).accepted
    assert store.commit("p", other.reservation, SLOT, 0, "raw", 32, 1).accepted


def test_lost_client_keeps_its_slots_out_of_use_but_not_its_leases():
    store = new_store(slots=2)
    put(store, 0)
    store.acquire("p", "r", [NAMES[0]], 50, "raw", 0)
    reserve(store, 1, "p")
    store.client_lost("p")
    status = store.status(1)
    assert (status["leases"], status["slots_quarantined"]) == (0, 1) and store.reservations("p")
    store.client_gone("p")
    assert store.status(1)["slots_free"] == 1 and not store.reservations("p")


def test_acquire_leases_the_leading_run_of_good_enough_copies():
    store = new_store()
    put(store, 0, 1, 3)
    assert [b.hash for b in store.acquire("d", "r", NAMES[:4], 50, "raw", 0).blocks] == NAMES[:2]
    assert store.acquire("d", "r", NAMES[2:4], 50, "raw", 0).lease == 0
    assert store.acquire("d", "r", NAMES[:1], 50, "finer", 0).blocks == ()


def test_dropped_block_is_not_found_and_another_copy_may_come():
    store = new_store()
    put(store, 0)
    lease = store.acquire("d", "r", NAMES[:1], 50, "raw", 0).lease
    store.drop(NAMES[0])
    put(store, 0)
    assert store.status(0)["slots_cached"] == 2 and store.check_integrity(0) == []
    store.release("d", lease)
    assert store.status(0)["slots_cached"] == 1 and present(store) == {0}


def test_listener_hears_when_the_last_writer_failed():
    changes = []
    store = new_store(listener=lambda name, change, private: changes.append((name, change)))
    first, second = reserve(store, 0, "p1"), reserve(store, 0, "p2")
    store.abandon("p1", [first.reservation])
    assert changes == [] and store.pending(NAMES[0])
    store.abandon("p2", [second.reservation])
    assert changes == [(NAMES[0], Change.FAILED)]


def test_integrity_check_can_fail():
    store = new_store()
    put(store, 0)
    reserve(store, 1)
    assert store.check_integrity(0) == []
    assert store.check_integrity(1000) == ["nothing is past its deadline"]
    store._slots.move(next(iter(store._index.values())).slot, SlotState.FREE)
    assert "every slot has exactly one owner" in store.check_integrity(0)
