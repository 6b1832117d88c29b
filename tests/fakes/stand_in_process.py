"""Stand-ins for the programs of a cluster: they do nothing, but announce themselves in Redis and answer like the real ones."""

import asyncio
import os
import time
from typing import Any

import msgspec
from redis.asyncio import Redis

from kvstore.config import StoreNodeConfig
from protocol.membership import Kind, Member, Registry, new_generation
from worker.config import WorkerConfig


class _StandIn:
    def __init__(self, kind: Kind, config: StoreNodeConfig | WorkerConfig) -> None:
        self._config = config
        self._kind: Kind = kind
        self.generation = new_generation()
        self._drained_s = 0.0

    def start(self) -> None:
        if self._config.name.startswith("broken"):
            raise RuntimeError("this stand-in does not start")
        asyncio.run(self._announce())

    async def _announce(self) -> None:
        redis = Redis.from_url(self._config.redis_url)
        member = Member(self._kind, self._config.name, self.generation, "127.0.0.1:1", self._config.node, {"pid": str(os.getpid())})
        await Registry(redis, self._config.cluster, ttl_s=600).announce(member)
        await redis.aclose()

    def status(self) -> dict[str, Any]:
        return {
            "generation": self.generation,
            "cores": sorted(os.sched_getaffinity(0)),
            "threads": os.environ["OMP_NUM_THREADS"],
            "drained_s": self._drained_s,
        }

    def drain(self, deadline_s: float) -> None:
        self._drained_s = deadline_s

    def stop(self) -> None:
        time.sleep(0.05)


class StandInStore:
    def __init__(self, config_json: bytes) -> None:
        self._inner = _StandIn("store", msgspec.json.decode(config_json, type=StoreNodeConfig))
        self.start, self.status, self.drain, self.stop = self._inner.start, self._inner.status, self._inner.drain, self._inner.stop


class StandInWorker:
    def __init__(self, config_json: bytes) -> None:
        self._inner = _StandIn("worker", msgspec.json.decode(config_json, type=WorkerConfig))
        self.start, self.status, self.drain, self.stop = self._inner.start, self._inner.status, self._inner.drain, self._inner.stop
