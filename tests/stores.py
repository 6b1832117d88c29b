"""What the stores of a running cluster hold, asked as a tool that moves no bytes; and what Redis says of them."""

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from serving import look

from cluster.local import Cluster
from cluster.model import locate_model
from kvstore.hashing import BlockHash
from kvstore.session import StoreAddress, StoreSession
from protocol import headrace_pb2 as pb
from protocol.membership import VERSION, new_generation


class NoTransport:
    """An endpoint for a client that only asks."""

    name = "tool"
    arena = None

    def connect(self, metadata: bytes) -> str:
        return ""

    def disconnect(self, peer: str) -> None:
        pass


@dataclass(frozen=True)
class StoreState:
    name: str
    generation: int
    status: pb.StoreStatus

    @property
    def hashes(self) -> set[BlockHash]:
        return {BlockHash(name) for name in self.status.hashes}


async def store_states(cluster: Cluster) -> list[StoreState]:
    """Of every store in the router's list, with its integrity checked and its blocks named."""
    layout = locate_model(cluster.config).layout
    states = []
    for store in look(cluster)["stores"]:
        address = StoreAddress(store["name"], store["generation"], store["address"])
        endpoint: Any = NoTransport()
        session = await StoreSession.connect(
            address, token=cluster.token, endpoint=endpoint, generation=new_generation(), layout=layout, deadline=time.time() + 5
        )
        try:
            states.append(StoreState(store["name"], store["generation"], await session.status(check_integrity=True, list_hashes=True)))
        finally:
            await session.close()
    return states


async def hints(cluster: Cluster) -> dict[tuple[str, int], set[BlockHash]]:
    """(node, generation) -> the blocks that Redis says it has."""
    prefix = f"headrace:v{VERSION}:{cluster.config.cluster}:hint:"
    found: dict[tuple[str, int], set[BlockHash]] = {}
    async with Redis.from_url(cluster.redis_url) as redis:
        async for key in redis.scan_iter(match=f"{prefix}*", count=1000):
            block_hash = BlockHash(bytes.fromhex(key.decode().removeprefix(prefix)))
            for node, generation in (await redis.hgetall(key)).items():
                found.setdefault((node.decode(), int(generation)), set()).add(block_hash)
    return found


def unsettled(cluster: Cluster, states: list[StoreState], hinted: dict[tuple[str, int], set[Any]], holds_may_wait: bool) -> list[str]:
    """What is not as it must be while nobody asks anything. `holds_may_wait`: for the deadline of a request whose worker died before it could release them."""
    found = []
    body = look(cluster)
    for worker in body["workers"]:
        if worker["blocks_free"] + worker["blocks_cached"] != worker["blocks_total"] or worker["counters"]["jobs"] or worker["sequences"]:
            blocks = {name: worker[name] for name in ("blocks_free", "blocks_cached", "blocks_total", "sequences")}
            found.append(f"{worker['name']}: {blocks}, jobs {worker['counters']['jobs']}")
        if worker["counters"].get("integrity_violations"):
            found.append(f"{worker['name']}: {worker['counters']['integrity_violations']} violations")
    if body["running_requests"]:
        found.append(f"router: {body['running_requests']} requests")
    for state in states:
        status = state.status
        held = status.overdue or status.leases or (status.holds and not holds_may_wait)
        if status.slots_free + status.slots_cached != status.slots_total or held or status.violations:
            counts = {name: getattr(status, name) for name in ("slots_free", "slots_cached", "slots_total", "slots_quarantined", "overdue", "leases", "holds")}
            found.append(f"store {state.name}: {counts}, {list(status.violations)}, {dict(status.counters)}")
        told = hinted.get((state.name, state.generation), set())
        if told != set(status.hashes):
            found.append(f"store {state.name}: {len(set(status.hashes) - told)} blocks without a hint, {len(told - set(status.hashes))} hints without a block")
    return found


async def wait_settled(cluster: Cluster, timeout_s: float, holds_may_wait: bool = False) -> float:
    started = time.monotonic()
    while found := unsettled(cluster, await store_states(cluster), await hints(cluster), holds_may_wait):
        assert time.monotonic() - started < timeout_s, found
        await asyncio.sleep(0.25)
    return time.monotonic() - started
