"""Service, session and mover together: real gRPC and real shared memory, in one process, with Redis away."""

import asyncio
import threading
import time

import numpy as np
import pytest

from kvstore.codec import block_checksum
from kvstore.layout import BlockLayout
from kvstore.mover import PoolBlock
from kvstore.session import StoreAddress, StoreSessions
from kvstore.store import Key, Mover
from protocol import headrace_pb2 as pb
from protocol.errors import DeadlineExceeded, LayoutMismatch, StoreLost
from tests.fakes.store_node import LAYOUT, TOKEN, blocks_of, client, names, node_config, soon, status_of, store_thread, until

FULL = LAYOUT.block_bytes


@pytest.fixture(scope="module")
def shared_store():
    with store_thread(node_config("s", slots=64)) as store:
        yield store


@pytest.fixture
def store():
    with store_thread(node_config("s")) as store:
        yield store


async def test_pushed_blocks_come_back_bit_for_bit(store):
    async with client("p") as p, client("d") as d:
        p.fill(*range(4))
        at_p, at_d = await p.session(store), await d.session(store)
        keys = [Key(name, FULL) for name in names(1, 2, 3)] + [Key(names(9)[0], FULL, True)]
        plan = await p.mover.attach(at_p, "r#1", 1, keys, soon())
        assert all(plan.wanted(key.hash) for key in keys)
        pushed = await plan.push([*blocks_of([1, 2, 3]), PoolBlock(names(9)[0], 3, 7)], soon())
        await plan.close()
        assert (pushed.num_blocks, pushed.bytes, pushed.failed, pushed.reason) == (4, 3 * FULL + 7 * LAYOUT.token_bytes, set(), "")
        d.view(11)[:] = 255
        wanted = [*blocks_of([1, 2, 3], at=8), PoolBlock(names(9)[0], 11, 7)]
        report = await d.mover.fetch(at_d, "r#1", wanted, wait_until=0, deadline=soon())
        assert (report.num_blocks, report.num_tokens, report.bytes, report.reason) == (4, 103, pushed.bytes, "")
        for i in range(3):
            assert np.array_equal(d.view(8 + i), p.view(i))
        shape = (LAYOUT.num_kv_heads, LAYOUT.num_layers, 2, 32, LAYOUT.head_dim * 4)
        assert np.array_equal(d.view(11).reshape(shape)[:, :, :, :7], p.view(3).reshape(shape)[:, :, :, :7])
        assert (d.view(11).reshape(shape)[:, :, :, 7:] == 255).all()
        status = await status_of(at_d)
        assert (status.slots_cached, status.slots_reserved, status.leases, status.holds, list(status.violations)) == (3, 0, 0, 0, [])
        assert status.counters["commits"] == 4


async def test_put_holds_nothing_and_is_idempotent(store):
    async with client() as c:
        c.fill(0, 1)
        session = await c.session(store)
        first = await c.mover.put(session, "r", blocks_of([1, 2]), soon())
        again = await c.mover.put(session, "r", blocks_of([1, 2]), soon())
        assert first.accepted == again.present == set(names(1, 2)) and again.accepted == set() and again.bytes == 0
        status = await status_of(session)
        assert (status.holds, status.slots_cached, status.slots_reserved) == (0, 2, 0)


async def test_fetch_waits_for_blocks_on_their_way_and_reports_those_that_fail(store):
    async with client("p") as p, client("d") as d:
        p.fill(0, 1, 2)
        at_p, at_d = await p.session(store), await d.session(store)
        plan = await p.mover.attach(at_p, "r", 1, [Key(name, FULL) for name in names(1, 2, 3)], soon())
        fetch = asyncio.create_task(d.mover.fetch(at_d, "r", blocks_of([1, 2, 3], at=8), wait_until=soon(), deadline=soon()))
        await plan.push(blocks_of([1]), soon())
        await plan.push([PoolBlock(names(2)[0], 1, 32)], soon())
        assert not fetch.done()
        await plan.close()
        report = await fetch
        assert (report.num_blocks, report.reason) == (2, "missing")


async def test_fetch_that_expects_waits_for_what_nobody_announced(store):
    async with client("p") as p, client("d") as d:
        p.fill(0)
        at_p, at_d = await p.session(store), await d.session(store)
        fetch = asyncio.create_task(d.mover.fetch(at_d, "r", blocks_of([1], at=8), wait_until=soon(), expect=True, deadline=soon()))
        missing = await d.mover.fetch(at_d, "r", blocks_of([1], at=9), wait_until=soon(), deadline=soon())
        assert missing.num_blocks == 0 and not fetch.done()
        await p.mover.put(at_p, "", blocks_of([1]), soon())
        assert (await fetch).num_blocks == 1
        late = await d.mover.fetch(at_d, "r", blocks_of([7], at=9), wait_until=time.time() + 0.05, expect=True, deadline=soon())
        assert late.reason == "missing"


async def test_a_waiting_fetch_keeps_what_is_here_from_eviction():
    with store_thread(node_config("s", slots=4, max_reserved_fraction=1.0)) as store:
        async with client("p") as p, client("d") as d:
            p.fill(*range(8))
            at_p, at_d = await p.session(store), await d.session(store)
            await p.mover.put(at_p, "", blocks_of([1]), soon())
            fetch = asyncio.create_task(d.mover.fetch(at_d, "r", blocks_of([1, 2], at=8), wait_until=soon(), expect=True, deadline=soon()))

            async def leased() -> bool:
                return (await status_of(at_p)).leases == 1

            await until(leased)
            for i in range(10, 16):
                await p.mover.put(at_p, "", blocks_of([i]), soon())
            await p.mover.put(at_p, "", blocks_of([2]), soon())
            assert (await fetch).num_blocks == 2


async def test_a_corrupt_copy_is_a_miss_and_goes(store):
    async with client("p") as p, client("d") as d:
        p.fill(0, 1)
        at_p, at_d = await p.session(store), await d.session(store)
        await p.mover.put(at_p, "", blocks_of([1, 2]), soon())
        lease = await at_p.acquire("", names(2), wait_until=0, lease_until=soon(), fidelity="raw", deadline=soon())
        p.endpoint.arena[:4] ^= 1
        await asyncio.to_thread(p.endpoint.write, at_p.peer, [(0, lease.blocks[0].offset, 4)], time.monotonic() + 5)
        await at_p.release(lease.lease)
        report = await d.mover.fetch(at_d, "r", blocks_of([1, 2], at=8), wait_until=0, deadline=soon())
        assert (report.num_blocks, report.corrupt, report.reason) == (1, 1, "corrupt_block")
        assert d.mover.counters()["fetch_failed_corrupt_block"] == 1
        status = await status_of(at_d)
        assert list(status.hashes) == names(1) and status.counters["corrupt"] == 1 and list(status.violations) == []
        assert (await d.mover.put(at_d, "", blocks_of([2], at=8), soon())).num_blocks == 1


@pytest.mark.parametrize("direction", ["read", "write"])
async def test_a_cancelled_call_returns_only_when_no_thread_touches_the_pool(store, monkeypatch, direction):
    async with client() as c:
        session = await c.session(store)
        await c.mover.put(session, "", blocks_of([1]), soon())
        began, may_end, move = threading.Event(), threading.Event(), getattr(c.endpoint, direction)

        def slow(*arguments) -> None:
            began.set()
            may_end.wait(10)
            move(*arguments)

        monkeypatch.setattr(c.endpoint, direction, slow)
        if direction == "read":
            task = asyncio.create_task(c.mover.fetch(session, "", blocks_of([1]), wait_until=0, deadline=soon()))
        else:
            task = asyncio.create_task(c.mover.put(session, "", blocks_of([2]), soon()))
        await asyncio.to_thread(began.wait, 10)
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0.02)
            assert not task.done()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        status = await status_of(session)
        assert (status.leases, status.slots_reserved, status.slots_quarantined) == (0, 0, 0)


async def test_checksums_tell_blocks_layouts_and_fidelities_apart():
    data = np.arange(64, dtype=np.uint8)
    one, two = names(1, 2)
    sums = {block_checksum(data, *rest) for rest in ((one, "raw", "a"), (two, "raw", "a"), (one, "int8", "a"), (one, "raw", "b"))}
    assert len(sums) == 4


async def test_no_credit_is_told_and_pushes_what_it_may(store):
    async with client() as c:
        session = await c.session(store)
        plan = await c.mover.attach(session, "r", 1, [Key(name, FULL) for name in names(*range(10))], soon())
        assert plan.movers == {Mover.PUSH: 8, Mover.NO_CREDIT: 2}
        report = await plan.push(blocks_of(list(range(10))), soon())
        await plan.close()
        assert report.num_blocks == 8 and not plan.wanted(names(9)[0])


async def test_a_late_push_is_fenced_and_its_slot_comes_back():
    with store_thread(node_config("s", max_hold_s=0.1)) as store:
        async with client() as c:
            session = await c.session(store)
            plan = await c.mover.attach(session, "r", 1, [Key(names(1)[0], FULL)], soon())

            async def quarantined() -> bool:
                return (await status_of(session)).slots_quarantined == 1

            await until(quarantined)
            report = await plan.push(blocks_of([1]), soon())
            assert (report.num_blocks, report.failed, report.reason) == (0, set(names(1)), "fenced")
            status = await status_of(session)
            assert (status.slots_free, status.counters["fenced"], status.overdue) == (16, 1, 0)


async def test_the_end_of_a_session_gives_everything_back(shared_store):
    async with client("d") as d:
        at_d = await d.session(shared_store)
        async with client("p") as p:
            at_p = await p.session(shared_store)
            await p.mover.attach(at_p, "r", 1, [Key(name, FULL) for name in names(50, 51)], soon())
            waiting = asyncio.create_task(d.mover.fetch(at_d, "r", blocks_of([50], at=8), wait_until=soon(60), deadline=soon(60)))
            await asyncio.sleep(0)
            assert (await status_of(at_d)).slots_reserved == 2
        report = await waiting
        assert report.reason == "missing"

        async def given_back() -> bool:
            status = await status_of(at_d)
            return status.slots_reserved + status.slots_quarantined == 0

        await until(given_back)


async def test_a_broken_stream_quarantines_until_the_client_comes_again(store):
    """The process lives, so it may still be writing: only its new session proves that it is not."""
    async with client("p") as p, client("d") as d:
        at_d, at_p = await d.session(store), await p.session(store)
        await p.mover.attach(at_p, "r", 1, [Key(names(1)[0], FULL)], soon())
        with at_p.writing():
            at_p._stream.cancel()

            async def quarantined() -> bool:
                return (await status_of(at_d)).slots_quarantined == 1

            await until(quarantined)
            again = asyncio.create_task(p.session(store))
            await asyncio.sleep(0.1)
            assert not again.done() and await quarantined()
        assert not (await again).lost

        async def free() -> bool:
            return (await status_of(at_d)).slots_free == 16

        await until(free)


async def test_what_comes_after_its_caller_gave_up_is_given_back(shared_store):
    async with client() as c:
        session = await c.session(shared_store)
        with pytest.raises(DeadlineExceeded):
            await session._call(pb.StoreRequest(attach=pb.Attach(blocks=[pb.BlockKey(hash=b"x" * 16, length=8)], deadline=soon())), time.time())

        async def free() -> bool:
            return (await status_of(session)).slots_reserved == 0

        await until(free)
        assert (await status_of(session)).counters["abandoned"] >= 1


async def test_another_layout_token_or_generation_is_refused(shared_store):
    other = BlockLayout(num_layers=3, num_kv_heads=2, head_dim=8, block_tokens=32, dtype="float32")
    async with client() as c:
        address = StoreAddress("s", 0, shared_store.address)
        with pytest.raises(LayoutMismatch) as caught:
            await StoreSessions(c.endpoint, 1, other, TOKEN).get(address)
        assert LAYOUT.fingerprint in caught.value.message and other.fingerprint in caught.value.message
        with pytest.raises(StoreLost, match="UNAUTHENTICATED"):
            await StoreSessions(c.endpoint, 1, LAYOUT, "wrong").get(address)
        with pytest.raises(StoreLost, match="generation"):
            await c.sessions.get(address._replace(generation=5))
        with pytest.raises(StoreLost, match="UNAVAILABLE"):
            await c.sessions.get(StoreAddress("s", 0, "127.0.0.1:1"))


async def test_concurrent_callers_share_one_session(shared_store):
    async with client() as c:
        sessions = await asyncio.gather(*(c.session(shared_store) for _ in range(5)))
        assert len({id(session) for session in sessions}) == 1


async def test_a_draining_store_grants_nothing(store):
    async with client() as c:
        c.fill(0)
        session = await c.session(store)
        await c.mover.put(session, "", blocks_of([1]), soon())
        await asyncio.to_thread(store.drain, 1.0)
        plan = await c.mover.attach(session, "r", 1, [Key(name, FULL) for name in names(1, 2)], soon())
        assert plan.movers == {Mover.HAVE: 1, Mover.NO_CREDIT: 1}
        assert store.status()["draining"] is True
