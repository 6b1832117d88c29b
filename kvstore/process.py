"""One store node as a process: endpoint, service, registry record, in an event loop of its own thread. Knows how they start and end, nothing else.

Invariants: Redis being away stops neither start nor service. `stop` leaves no thread, socket, memory or hint behind; the process is ended right after it.
"""

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from redis.asyncio import Redis

from kvstore.config import StoreNodeConfig
from kvstore.hints import Hints
from kvstore.node import StoreNode, num_slots
from kvstore.pull import Puller
from kvstore.service import StoreService
from kvstore.session import StoreSessions
from protocol import headrace_pb2 as pb
from protocol import headrace_pb2_grpc as rpc
from protocol.channel import VERSION, new_server
from protocol.errors import ConfigError, RegistryLost
from protocol.membership import Member, Registry, new_generation
from transport.endpoint import Endpoint, open_endpoint

log = logging.getLogger(__name__)

START_S = 60.0
STOP_S = 15.0
REDIS_TIMEOUT_S = 1.0


class StoreProcess:
    """See cluster.programs for the contract of its methods."""

    def __init__(self, config_json: bytes) -> None:
        self._config = msgspec.json.decode(config_json, type=StoreNodeConfig)
        self._generation = new_generation()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="store", daemon=True)
        self._endpoint: Endpoint | None = None
        self._running: _Running | None = None
        self._status: dict[str, Any] = {}

    def start(self) -> None:
        """Raises ConfigError or OSError."""
        config = self._config
        if config.log_path:  # without effect where whoever started the process has set logging up, with the configured level
            logging.basicConfig(filename=config.log_path, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        slots = num_slots(config.store, config.layout)
        if slots < 1:
            message = f"store.capacity_bytes: {config.store.capacity_bytes} holds no block of {config.layout.block_bytes}"
            raise ConfigError(message, field="store.capacity_bytes")
        self._endpoint = open_endpoint(config.transport, f"{config.name}#{self._generation}", slots * config.layout.block_bytes)
        self._loop.set_default_executor(ThreadPoolExecutor(2, thread_name_prefix="store"))
        self._thread.start()
        self._running = self._call(_Running.open(config, self._generation, self._endpoint), START_S)
        log.info("%s serves at %s: %d slots", config.name, self._running.member.address, slots)

    @property
    def address(self) -> str:
        return self._running.member.address if self._running else ""

    def status(self) -> dict[str, Any]:
        """The last counts where the loop does not give new ones within a second."""
        if self._running is not None:
            with suppress(TimeoutError):
                counts = self._call(self._running.counts(), 1.0)
                self._status = {"name": self._config.name, "generation": self._generation, "pid": os.getpid(), **counts}
        return self._status

    def drain(self, deadline_s: float) -> None:
        if self._running is not None:
            self._call(self._running.drain(deadline_s), deadline_s + STOP_S)

    def stop(self) -> None:
        if self._running is not None:
            self._call(self._running.close(), STOP_S)
            self._running = None
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(STOP_S)
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None

    def _call(self, work: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)


class _Running:
    """What lives in the event loop."""

    def __init__(self, config: StoreNodeConfig, generation: int, endpoint: Endpoint) -> None:
        self._redis = Redis.from_url(config.redis_url, socket_timeout=REDIS_TIMEOUT_S, socket_connect_timeout=REDIS_TIMEOUT_S)
        self._registry = Registry(self._redis, config.cluster)
        self._hints = Hints(self._redis, config.cluster, config.name, generation, config.store.hint_ttl_s)
        self._node = StoreNode(config.store, config.layout, endpoint, self._hints)
        self._sessions = StoreSessions(endpoint, generation, config.layout, config.token)
        self._puller = Puller(self._node, self._sessions, self._registry)
        welcome = pb.StoreWelcome(
            version=VERSION,
            name=config.name,
            generation=generation,
            transport=config.transport.backend,
            transport_metadata=endpoint.metadata,
            slot_bytes=config.layout.block_bytes,
            layout=config.layout.fingerprint,
        )
        self._service = StoreService(self._node, self._puller, welcome, config.token)
        self._server = new_server()
        rpc.add_StoreControlServicer_to_server(self._service, self._server)  # type: ignore[arg-type]  # a service is one by its methods
        port = self._server.add_insecure_port(f"{config.host}:{config.port}")
        attributes = {
            "layout": config.layout.fingerprint,
            "pid": str(os.getpid()),
            "transport": config.transport.backend,
            "slot_bytes": str(config.layout.block_bytes),
        }
        self.member = Member("store", config.name, generation, f"{config.host}:{port}", config.node, attributes)
        self._registered = True

    @classmethod
    async def open(cls, config: StoreNodeConfig, generation: int, endpoint: Endpoint) -> "_Running":
        running = cls(config, generation, endpoint)
        await running._server.start()
        running._hints.start()
        await running._announce()
        running._announcing = asyncio.create_task(running._keep_announced())
        return running

    async def counts(self) -> dict[str, Any]:
        return {**self._node.store.status(self._node.now()), "draining": self._service.draining, **self._service.counters()}

    async def drain(self, deadline_s: float) -> None:
        """Grants nothing any more; waits until nobody reads or writes."""
        self._service.draining = True
        try:
            async with asyncio.timeout(deadline_s):
                await self._node.idle.wait()
        except TimeoutError:
            log.warning("drained for %.1f s; some still read or write", deadline_s)

    async def close(self) -> None:
        self._announcing.cancel()
        await asyncio.wait([self._announcing])
        try:
            await self._registry.withdraw(self.member)
        except RegistryLost:
            log.info("the registry will forget %s by itself", self.member.name)
        await self._server.stop(0.5)
        await self._puller.close()
        await self._service.close()
        await self._sessions.close()
        await self._hints.close()
        self._node.close()
        await self._redis.aclose()

    async def _keep_announced(self) -> None:
        while True:
            await asyncio.sleep(self._registry.ttl_s / 3)
            await self._announce()

    async def _announce(self) -> None:
        counts = {name: str(count) for name, count in self._node.store.status(self._node.now()).items()}
        self.member.attributes.update(counts)
        try:
            await self._registry.announce(self.member)
        except RegistryLost as error:
            if self._registered:
                log.warning("registry: %s; serving goes on", error)
            self._registered = False
            return
        await self._hints.check_restart()
        if not self._registered:
            log.info("registry: %s is announced again", self.member.name)
        self._registered = True

    _announcing: "asyncio.Task[None]"


def main(path: str) -> None:
    """Serve until SIGTERM or SIGINT; one line says where."""
    process = StoreProcess(Path(path).read_bytes())
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})  # before any thread starts: all inherit it
    process.start()
    print(f"ready {process.address}", flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    process.stop()
    os._exit(0)  # transports may have left threads that do not survive an interpreter's shutdown


if __name__ == "__main__":
    main(sys.argv[1])
