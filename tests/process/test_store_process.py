"""Store nodes as processes of their own, clients that die, a Redis that goes away."""

import asyncio
import os
import signal
import time

import numpy as np
import pytest
from redis.asyncio import Redis

from kvstore.store import Key
from protocol.errors import StoreLost
from protocol.membership import Registry
from tests.fakes.store_node import (
    LAYOUT,
    blocks_of,
    client,
    names,
    node_config,
    redis_server,
    soon,
    status_of,
    store_subprocess,
    subprocess_of,
    until,
)

WRITER = """
import asyncio, sys
from kvstore.store import Key
from tests.fakes.store_node import LAYOUT, client, names, soon
from kvstore.session import StoreAddress

async def main():
    async with client("victim") as c:
        session = await c.sessions.get(StoreAddress("", 0, sys.argv[1]))
        await c.mover.attach(session, "r", 1, [Key(name, LAYOUT.block_bytes) for name in names(1, 2, 3)], soon(60))
        with session.writing():
            if sys.argv[2] == "broken":
                session._stream.cancel()
            print("attached", flush=True)
            await asyncio.sleep(60)

asyncio.run(main())
"""


async def hints_of(redis: Redis, index: int) -> dict[bytes, bytes]:
    return await redis.hgetall(f"headrace:v1:test:hint:{names(index)[0].hex()}")


@pytest.mark.parametrize("stream", ["whole", "broken"])
async def test_only_the_end_of_a_writer_gives_its_slots_back(tmp_path, stream):
    """Neither its stop nor a broken stream does: it may still be writing."""
    with store_subprocess(node_config("s"), tmp_path) as (_, address):
        async with client() as c:
            session = await c.session(address)

            async def slots(state: str) -> int:
                return getattr(await status_of(session), f"slots_{state}")

            with subprocess_of("-c", WRITER, address.address, stream) as (writer, line):
                assert line == "attached"
                writer.send_signal(signal.SIGSTOP)
                await asyncio.sleep(0.6)
                assert await slots("reserved" if stream == "whole" else "quarantined") == 3
                writer.kill()

                async def free() -> bool:
                    return await slots("free") == 16

                await until(free)
            assert list((await status_of(session)).violations) == []


async def test_a_killed_store_fails_every_call_at_once(tmp_path):
    with store_subprocess(node_config("s"), tmp_path) as (store, address):
        async with client() as c:
            c.fill(0)
            session = await c.session(address)
            plan = await c.mover.attach(session, "r", 1, [Key(names(1)[0], LAYOUT.block_bytes)], soon())
            waiting = asyncio.create_task(c.mover.fetch(session, "r", blocks_of([1], at=8), wait_until=soon(60), deadline=soon(60)))
            pending = asyncio.create_task(session.acquire("r", names(1), wait_until=soon(60), lease_until=soon(60), fidelity="raw", deadline=soon(60)))
            await status_of(session)
            store.kill()
            assert (await waiting).reason == "store_lost"
            with pytest.raises(StoreLost):
                await pending
            report = await plan.push(blocks_of([1]), soon())
            assert (report.num_blocks, report.reason) == (0, "store_lost")
            await plan.close()
            with pytest.raises(StoreLost):
                await session.status()
            with pytest.raises(StoreLost):
                await c.session(address)


async def test_a_block_is_pulled_from_a_replica_once(tmp_path):
    with (
        redis_server(tmp_path) as url,
        store_subprocess(node_config("a", url), tmp_path) as (_, at_a),
        store_subprocess(node_config("b", url), tmp_path) as (_, at_b),
    ):
        async with client("w") as w, Redis.from_url(url) as redis:
            w.fill(0, 1, 2)
            a, b = await w.session(at_a), await w.session(at_b)
            assert {m.name for m in await Registry(redis, "test").members("store")} == {"a", "b"}
            await w.mover.put(a, "", blocks_of([1, 2, 3]), soon())

            async def hinted() -> bool:
                return all([b"a" in await hints_of(redis, i) for i in (1, 2, 3)])

            await until(hinted)
            plan = await w.mover.attach(b, "r", 1, [Key(name, LAYOUT.block_bytes) for name in names(1, 2, 3, 4)], soon(), allow_pull=True)
            assert [plan.wanted(name) for name in names(1, 2, 3, 4)] == [False, False, False, True]
            fetches = [w.mover.fetch(b, "r", blocks_of([1, 2, 3], at=at), wait_until=soon(), deadline=soon()) for at in (4, 8)]
            reports = await asyncio.gather(*fetches)
            assert [report.num_blocks for report in reports] == [3, 3]
            assert all(np.array_equal(w.view(at + i), w.view(i)) for at in (4, 8) for i in range(3))
            await plan.close()
            status = await status_of(b)
            assert (status.counters["pulled_blocks"], status.counters["pulled_bytes"]) == (3, 3 * LAYOUT.block_bytes)
            assert (status.slots_cached, status.slots_reserved, list(status.violations)) == (3, 0, [])
            assert (await status_of(a)).leases == 0
            missing = await w.mover.fetch(b, "r", blocks_of([9], at=12), wait_until=soon(1), deadline=soon())
            assert missing.reason == "missing"


async def test_redis_away_costs_hints_only_and_all_is_said_again(tmp_path):
    with store_subprocess(node_config("s", f"unix://{tmp_path}/redis.sock"), tmp_path) as (_, address):
        async with client() as c:
            c.fill(0, 1)
            session = await c.session(address)
            await c.mover.put(session, "", blocks_of([1, 2]), soon())
            report = await c.mover.fetch(session, "", blocks_of([1, 2], at=4), wait_until=soon(), deadline=soon())
            assert report.num_blocks == 2 and (await status_of(session)).counters["hint_outages"] == 1
            for _ in range(2):
                with redis_server(tmp_path) as url:
                    async with Redis.from_url(url) as redis:

                        async def back(redis: Redis = redis) -> bool:
                            return all([list(await hints_of(redis, i)) == [b"s"] for i in (1, 2)]) and bool(await Registry(redis, "test").members("store"))

                        await until(back)
                        assert 0 < await redis.pttl(f"headrace:v1:test:hint:{names(1)[0].hex()}") <= 600_000
                (tmp_path / "redis.sock").unlink(missing_ok=True)  # and at once another one, which knows nothing


async def test_hints_follow_eviction_and_the_end(tmp_path):
    with redis_server(tmp_path) as url, store_subprocess(node_config("s", url, slots=2), tmp_path) as (store, address):
        async with client() as c, Redis.from_url(url) as redis:
            c.fill(0)
            session = await c.session(address)
            for i in (1, 2, 3):
                await c.mover.put(session, "", blocks_of([i]), soon())

            async def agrees() -> bool:
                return [bool(await hints_of(redis, i)) for i in (1, 2, 3)] == [False, True, True]

            await until(agrees)
            assert set((await status_of(session)).hashes) == set(names(2, 3))
            store.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(store.wait, 10) == 0
            assert await redis.keys("*") == []


async def test_an_idle_store_uses_no_processor(tmp_path):
    with redis_server(tmp_path) as url, store_subprocess(node_config("s", url), tmp_path) as (store, address):
        async with client() as c:
            c.fill(0)
            await c.mover.put(await c.session(address), "", blocks_of([1]), soon())

            def cpu_ticks() -> int:
                with open(f"/proc/{store.pid}/stat") as stat:
                    return sum(int(field) for field in stat.read().rpartition(")")[2].split()[11:13])

            before, started = cpu_ticks(), time.monotonic()
            await asyncio.sleep(2.0)
            used = (cpu_ticks() - before) / os.sysconf("SC_CLK_TCK") / (time.monotonic() - started)
            assert used <= 0.05
