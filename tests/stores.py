"""What the stores of a running cluster hold, asked as a tool that moves no bytes; and what Redis says of them."""

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
