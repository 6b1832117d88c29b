"""One worker process: an engine, its arena and transport, both phase services and the data plane. Owns their start and end; knows nothing of Ray.

Invariants: start() returns when the worker serves and is announced; Redis or the node's store being away stops nothing that can go on without them;
nothing here holds state that a new generation could not rebuild.
"""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import torch
from redis.asyncio import Redis

from decode_worker.service import DecodeService
from engine.batch import Batch
from engine.engine import Engine
from engine.events import Event
from engine.model_config import ModelConfig
from engine.runner import Runner, open_runner
from engine.tokenizer import Tokenizer
from kvstore.loader import NodeLoader
from kvstore.mover import BlockMover
from kvstore.session import StoreAddress, StoreSession, StoreSessions
from prefill_worker.service import PrefillService
from protocol import headrace_pb2 as pb
from protocol import headrace_pb2_grpc as rpc
from protocol.channel import VERSION, new_server
from protocol.errors import HeadraceError, RegistryLost
from protocol.membership import Member, Registry, new_generation
from transport.endpoint import open_endpoint
from worker.adapters import AdapterReader, AdapterService
from worker.config import WorkerConfig
from worker.data_plane import DataPlane, PhaseService

log = logging.getLogger(__name__)
HANDOFF_WAIT_S = 2.0
STAGING_SLOTS = 16
CONNECT_S = 2.0
LOOK_AGAIN_S = 0.5  # while the node's store is away


class WorkerProcess:
    """`start`, `status`, `drain` and `stop` may be called from any thread."""

    def __init__(self, config_json: bytes) -> None:
        self._config = msgspec.json.decode(config_json, type=WorkerConfig)
        self._generation = new_generation()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="services", daemon=True)
        self._draining = False
        self._announced = True
        self._tending: asyncio.Task[None] | None = None

    def start(self, timeout_s: float = 120.0) -> None:
        config = self._config
        if config.log_path:  # without effect where whoever started the process has set logging up, with the configured level
            logging.basicConfig(filename=config.log_path, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        model = ModelConfig.load(Path(config.model_path))
        layout = model.layout(config.engine.block_tokens, config.engine.dtype)
        num_blocks = config.engine.kv_cache_bytes // layout.block_bytes
        self._salt = f"{config.revision}/{layout.fingerprint}/{config.engine.weight_format}"
        self._endpoint = open_endpoint(config.transport, f"{config.name}#{self._generation}", BlockMover.arena_bytes(layout, num_blocks, STAGING_SLOTS))
        self._mover = BlockMover(self._endpoint, layout, num_blocks, config.store.codec, STAGING_SLOTS, config.transport.backend)
        runner = open_runner(config.engine, Path(config.model_path), model, self._mover.pool)
        warm_up(runner)
        self._model = model
        self._adapters = AdapterReader(model, config.engine)
        tokenizer = Tokenizer(Path(config.model_path))
        self._engine = Engine(config.engine, num_blocks, runner, tokenizer, self._salt, self._deliver, self._adapters.configured())
        self._engine.start()
        self._layout = layout
        self._thread.start()
        self._call(self._serve(), timeout_s)
        log.info("%s serves at %s", config.name, self._member.address)

    def status(self) -> dict[str, Any]:
        status = self._engine.status
        return {"name": self._config.name, "generation": self._generation, "pid": os.getpid(), "steps": status.steps, "running": status.num_running}

    def drain(self, deadline_s: float) -> None:
        """Take no new work (the routers see it in the status) and wait until the running requests are done, at most `deadline_s`."""
        self._draining = True
        until = time.monotonic() + deadline_s
        while self._plane.num_jobs and time.monotonic() < until:
            time.sleep(0.05)

    def stop(self) -> None:
        """End everything; the caller ends the process (see transport.nixl)."""
        self._call(self._close(), 15.0)
        self._engine.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)
        self._endpoint.close()

    def _call(self, work: Coroutine[Any, Any, None], timeout_s: float) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def _deliver(self, events: list[Event]) -> None:
        self._loop.call_soon_threadsafe(self._plane.handle_events, events)

    # ---- event loop

    async def _serve(self) -> None:
        config = self._config
        self._redis = Redis.from_url(config.redis_url, socket_timeout=2.0, socket_connect_timeout=2.0)
        self._registry = Registry(self._redis, config.cluster)
        self._sessions = StoreSessions(token=config.token, endpoint=self._endpoint, generation=self._generation, layout=self._layout)
        self._local = LocalStore(self._registry, self._sessions, config.node)
        loader = NodeLoader(self._mover, self._local.session)
        block_tokens = config.engine.block_tokens
        services: dict[str, PhaseService] = {
            "prefill": PrefillService(self._engine, loader, self._sessions, block_tokens),
            "decode": DecodeService(self._engine, loader, block_tokens, HANDOFF_WAIT_S),
        }
        hello = pb.WorkerHello(version=VERSION, name=config.name, generation=self._generation, role=config.role, node=config.node, revision=config.revision)
        self._plane = DataPlane(services, hello, self._worker_status, config.token, AdapterService(self._engine, self._adapters))
        self._server = new_server()
        rpc.add_DataPlaneServicer_to_server(self._plane, self._server)  # type: ignore[arg-type]
        port = self._server.add_insecure_port(f"{config.host}:{config.port}")
        await self._server.start()
        attributes = {
            "role": config.role,
            "model": config.model_name,
            "revision": config.revision,
            "salt": self._salt,
            "block_tokens": str(block_tokens),
            "block_bytes": str(self._layout.block_bytes),
            "hidden_size": str(self._model.hidden_size),
            "pid": str(os.getpid()),
        }
        self._member = Member("worker", config.name, self._generation, f"{config.host}:{port}", config.node, attributes)
        await self._tend_once()
        self._tending = asyncio.create_task(self._tend())

    async def _tend(self) -> None:
        """Stay announced, and connected to the stores that requests will need; end with the engine."""
        while self._engine.is_alive:
            await self._local.away(self._registry.ttl_s / 3)
            try:
                await self._tend_once()
            except Exception:  # a worker that stops tending itself would be forgotten while it serves
                log.exception("tending failed")
        log.critical("the engine thread has ended by a fault: so does the process, to be started again")
        os._exit(1)

    async def _tend_once(self) -> None:
        try:
            await self._registry.announce(self._member)
            self._announced = True
        except RegistryLost as error:
            if self._announced:
                log.warning("registry: %s; serving goes on", error)
            self._announced = False
        await self._local.connect_all()

    def _worker_status(self) -> pb.WorkerStatus:
        status = self._engine.status
        return pb.WorkerStatus(
            steps=status.steps,
            running=status.num_running,
            waiting=status.num_waiting,
            waiting_tokens=status.waiting_tokens,
            blocks_total=status.blocks_total,
            blocks_free=status.blocks_free,
            blocks_cached=status.blocks_cached,
            draining=self._draining,
            adapters=[pb.Adapter(name=adapter.name, revision=adapter.revision, path=adapter.path) for adapter in status.adapters],
            counters=status.counters | self._mover.counters() | {"jobs": self._plane.num_jobs, "store_connected": float(self._local.connected)},
        )

    async def _close(self) -> None:
        if self._tending is not None:
            self._tending.cancel()
        try:
            await self._registry.withdraw(self._member)
        except RegistryLost:
            log.info("the registry will forget %s by itself", self._member.name)
        self._plane.close()
        await self._server.stop(2.0)
        await self._sessions.close()
        await self._redis.aclose()


class LocalStore:
    """The session with the store of this worker's node, whichever generation of it lives now. Requests take what is there; connecting is done beside them."""

    def __init__(self, registry: Registry, sessions: StoreSessions, node: str) -> None:
        self._registry = registry
        self._sessions = sessions
        self._node = node
        self._stores: list[Member] = []
        self._session: StoreSession | None = None

    @property
    def connected(self) -> bool:
        return self._session is not None and not self._session.lost

    async def session(self) -> StoreSession | None:
        """None while the node's store is away; whoever asks goes on without it."""
        return self._session if self.connected else None

    async def away(self, timeout_s: float) -> None:
        """Returns at once when the node's store is lost, soon when it is away already, else after `timeout_s`."""
        if self._session is None or self._session.lost:
            await asyncio.sleep(min(LOOK_AGAIN_S, timeout_s))
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._session.ended()
            log.warning("the node's store is away")

    async def connect_all(self) -> None:
        """Follow the registry (while it is away, its last word): be connected to every store before a request needs it."""
        with suppress(RegistryLost):  # who announces has said so
            self._stores = await self._registry.members("store")
        await asyncio.gather(*(self._connect(member) for member in self._stores))

    async def _connect(self, member: Member) -> None:
        try:
            session = await self._sessions.get(StoreAddress(member.name, member.generation, member.address), time.time() + CONNECT_S)
        except HeadraceError as error:
            log.info("store %s cannot be reached: %s", member.name, error.code)
            return
        if member.node == self._node:
            self._session = session


def warm_up(runner: Runner) -> None:
    """One step that writes nothing, so that the first request does not pay for the kernels' first use."""
    one, zero = torch.ones(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    runner.run(
        Batch(
            tokens=zero,
            positions=zero,
            slots=zero - 1,
            block_tables=one.view(1, 1) - 1,
            query_starts=torch.tensor([0, 1], dtype=torch.int32),
            context_lens=one,
            logit_rows=zero,
        )
    )
