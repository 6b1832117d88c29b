"""Who is in the cluster: one Redis key a member, with a TTL. Owns the key format and its version; knows nothing of what members do.

Invariant: identity is (name, generation). A record is a hint about where to connect: the stream that follows proves that the member lives.
"""

import time
from dataclasses import asdict, dataclass, field
from typing import Literal

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from protocol.errors import RegistryLost

VERSION = 1
Kind = Literal["worker", "store", "router"]


def new_generation() -> int:
    """A number that grows with every start of a process on one machine."""
    return time.time_ns()


@dataclass(frozen=True)
class Member:
    """`address` is where the member's gRPC service listens (host:port). `attributes`: role, layout, salt, block_tokens, model, revision, pid, ..."""

    kind: Kind
    name: str
    generation: int
    address: str
    node: str = ""
    attributes: dict[str, str] = field(default_factory=dict)


class Registry:
    """Membership of one cluster. Every method raises RegistryLost when Redis does not answer."""

    def __init__(self, redis: Redis, cluster: str, ttl_s: float = 6.0) -> None:
        self._redis = redis
        self._prefix = f"headrace:v{VERSION}:{cluster}:member:"
        self.ttl_s = ttl_s

    async def announce(self, member: Member) -> None:
        """Write or renew the record; call it every `ttl_s / 3`."""
        try:
            await self._redis.set(self._key(member), msgspec.json.encode(asdict(member)), px=int(self.ttl_s * 1000))
        except (RedisError, OSError) as error:
            raise RegistryLost(f"cannot announce {member.name}: {error}") from error

    async def withdraw(self, member: Member) -> None:
        try:
            await self._redis.delete(self._key(member))
        except (RedisError, OSError) as error:
            raise RegistryLost(f"cannot withdraw {member.name}: {error}") from error

    async def members(self, kind: Kind | None = None) -> list[Member]:
        pattern = f"{self._prefix}{kind or '*'}:*"
        try:
            keys = sorted([key async for key in self._redis.scan_iter(match=pattern, count=1000)])
            values = await self._redis.mget(keys) if keys else []
        except (RedisError, OSError) as error:
            raise RegistryLost(f"cannot list members: {error}") from error
        return [msgspec.json.decode(value, type=Member) for value in values if value is not None]

    def _key(self, member: Member) -> str:
        return f"{self._prefix}{member.kind}:{member.name}"
