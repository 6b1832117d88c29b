"""Links and membership: who is known, who is dropped, what Redis away changes (nothing)."""

import asyncio

from fakes.cluster import FakeCluster, FakeRegistry, cluster, store, until
from fakes.worker import TOKEN, FakeWorker
from hypothesis import given
from hypothesis import strategies as st

from router.config import RouterConfig
from router.membership import Membership
from router.prefix_index import PrefixIndex
from router.timeline import Timeline, TimelineStore


async def refresh(made: FakeCluster, times: int = 1) -> None:
    for _ in range(times):
        await made.membership.refresh()


async def test_redis_away_changes_nothing_and_is_counted() -> None:
    async with cluster([FakeWorker("w0"), FakeWorker("w1", node="n1")]) as made:
        before = made.membership.view()
        made.registry.lost = True
        await until(lambda: made.membership.registry_failures >= 3)
        view = made.membership.view()
        assert [worker.key for worker in view.workers if worker.healthy] == [worker.key for worker in before.workers]
        assert view.stores == before.stores
        assert made.membership.registry_lost
        made.registry.lost = False
        await until(lambda: not made.membership.registry_lost)


async def test_an_emptied_registry_keeps_workers_whose_stream_lives() -> None:
    async with cluster([FakeWorker("w0")]) as made:
        made.registry.listed = []
        await refresh(made, 3)
        assert [worker.healthy for worker in made.membership.view().workers] == [True]


async def test_a_broken_stream_of_a_listed_worker_is_kept_and_mended() -> None:
    worker = FakeWorker("w0")
    async with cluster([worker]) as made:
        await worker.stop()
        await made.until_healthy(0)
        await refresh(made)
        assert [known.trouble for known in made.membership.view().workers] != []
        await worker.start(int(worker.address.rpartition(":")[2]))
        await made.until_healthy(1)
        link = made.membership.link(("w0", 1))
        assert link is not None and link.sessions == 2


async def test_broken_and_gone_is_dropped() -> None:
    worker = FakeWorker("w0")
    async with cluster([worker]) as made:
        await worker.stop()
        made.registry.listed = []
        await made.until_healthy(0)
        await until(lambda: not made.membership.view().workers)


async def test_a_new_generation_takes_over() -> None:
    worker = FakeWorker("w0")
    async with cluster([worker]) as made:
        await worker.stop()
        worker.generation = 2
        await worker.start()
        made.registry.listed = [worker.member]
        await made.until_healthy(1)
        await until(lambda: [known.generation for known in made.membership.view().workers] == [2])


async def until_trouble(worker: FakeWorker, token: str, words: str) -> None:
    """A router meets `worker` and says why it does not take it."""
    await worker.start()
    membership = Membership(FakeRegistry([worker.member]), "r", token, RouterConfig(poll_s=0.05))
    if words.startswith("127"):
        worker.generation += 1  # another process took the address
    await membership.start()
    try:
        await until(lambda: any(words in known.trouble for known in membership.view().workers))
    finally:
        await membership.close()
        await worker.stop()


async def test_strangers_are_not_taken_for_workers() -> None:
    await until_trouble(FakeWorker("w0"), "wrong", "UNAUTHENTICATED")
    await until_trouble(FakeWorker("w0", version=99), TOKEN, "protocol version 99")
    await until_trouble(FakeWorker("w0"), TOKEN, "127.0.0.1")


async def test_a_stalled_worker_recovers() -> None:
    worker = FakeWorker("w0")
    async with cluster([worker]) as made:
        worker.frozen = True
        await made.until_healthy(0)
        assert "stalled" in made.membership.view().workers[0].trouble
        worker.frozen = False
        await made.until_healthy(1)


async def test_stores_are_forgotten_after_a_grace() -> None:
    async with cluster([FakeWorker("w0")]) as made:
        assert made.membership.view().store_of("n0") is not None
        made.registry.listed = [made.workers["w0"].member, store("n0", generation=7)]
        await refresh(made)
        found = made.membership.view().store_of("n0")
        assert found is not None and found.generation == 7
        made.registry.listed = [made.workers["w0"].member]
        await refresh(made)
        assert made.membership.view().store_of("n0") is not None  # Redis may have been emptied
        made.registry.ttl_s = -1.0
        await refresh(made)
        assert made.membership.view().store_of("n0") is None


# ---- bounded memories -------------------------------------------------------------------------------------------------------------

BLOCKS = [bytes([n]) for n in range(30)]


async def test_stores_outlive_a_long_outage_and_an_empty_registry_after_it() -> None:
    async with cluster([FakeWorker("w0")]) as made:
        assert made.membership.view().stores
        made.registry.lost = True
        await until(lambda: made.membership.registry_lost)
        made.registry.ttl_s = 0.2
        await asyncio.sleep(0.3)
        made.registry.lost, made.registry.listed = False, []
        await refresh(made)
        assert made.membership.view().stores, "they had no chance yet to say that they live"


def test_prefix_index_counts_leading_blocks_only() -> None:
    index = PrefixIndex()
    index.record(("a", 1), BLOCKS[:5])
    index.record(("b", 1), BLOCKS[:3])
    index.record(("c", 1), BLOCKS[2:5])
    assert index.match(BLOCKS[:10]) == {("a", 1): 5, ("b", 1): 3}
    assert index.match(BLOCKS[2:5]) == {("a", 1): 3, ("b", 1): 1, ("c", 1): 3}


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20), st.integers(1, 9))), st.integers(1, 12))
def test_prefix_index_is_bounded_and_never_overstates(records: list[tuple[int, int, int]], capacity: int) -> None:
    index = PrefixIndex(capacity)
    for worker, start, length in records:
        index.record((str(worker), 1), BLOCKS[start : start + length])
        assert len(index) <= capacity
    for (name, _), count in index.match(BLOCKS).items():
        told = {n for worker, start, length in records if str(worker) == name for n in range(start, start + length)}
        assert set(range(count)) <= told


def test_the_heads_of_prefixes_stay_longest() -> None:
    index = PrefixIndex(4)
    index.record(("a", 1), BLOCKS[:6])
    assert index.match(BLOCKS) == {("a", 1): 4}


def test_timelines_are_bounded() -> None:
    kept = TimelineStore(2)
    for n in range(5):
        kept.add(f"r{n}", Timeline(f"r{n}"))
    assert len(kept) == 2 and kept.get("r2") is None and kept.get("cmpl-r4") is not None
