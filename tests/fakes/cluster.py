"""A router's surroundings in one event loop: a registry in memory, fake workers, the app on a loopback port."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable

import uvicorn
from fakes.tokenizer import ByteTokenizer
from fakes.worker import TOKEN, FakeWorker

from protocol.errors import RegistryLost
from protocol.membership import Kind, Member
from router.app import Service, build_app
from router.config import RouterConfig, RouterProcessConfig
from router.membership import Membership
from router.process import new_service

MODEL = "fake-model"


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  what tests wait for has no event
            await asyncio.sleep(0.01)


class FakeRegistry:
    def __init__(self, members: list[Member], ttl_s: float = 6.0) -> None:
        self.listed = members
        self.ttl_s = ttl_s
        self.lost = False

    async def members(self, kind: Kind | None = None) -> list[Member]:
        if self.lost:
            raise RegistryLost("switched off")
        return [member for member in self.listed if kind in (None, member.kind)]


def store(node: str, generation: int = 1) -> Member:
    return Member("store", f"store-{node}", generation, f"127.0.0.1:{1000 + generation}", node, {"codec": "raw"})


class FakeCluster:
    def __init__(self, workers: list[FakeWorker], registry: FakeRegistry, membership: Membership, service: Service) -> None:
        self.workers = {worker.name: worker for worker in workers}
        self.registry = registry
        self.membership = membership
        self.service = service
        self.url = ""

    def metric(self, name: str) -> float:
        """The sum over the labels of one sample name."""
        lines = self.service.spine.metrics.text().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.partition("{")[0].partition(" ")[0] == name)

    async def until_healthy(self, num_workers: int) -> None:
        await until(lambda: sum(worker.healthy for worker in self.membership.view().workers) == num_workers)

    async def until_quiet(self) -> None:
        """No job anywhere, no dispatch open."""
        links, workers = self.membership.links(), self.workers.values()
        await until(lambda: not any(worker.running for worker in workers) and not any(link.num_dispatches for link in links))


@contextlib.asynccontextmanager
async def cluster(
    workers: list[FakeWorker], policy: str = "always_disaggregate", max_context_tokens: int = 4096, stores: bool = True, **settings: float
) -> AsyncIterator[FakeCluster]:
    """The workers, their nodes' stores and a router that is connected to them all. `settings`: of RouterConfig."""
    for worker in workers:
        await worker.start()
    members = [worker.member for worker in workers] + [store(node) for node in sorted({worker.node for worker in workers}) if stores]
    registry = FakeRegistry(members)
    defaults = {"stall_s": 0.4, "poll_s": 0.05, "wait_for_worker_s": 3.0}
    router = RouterConfig(policy=policy, **(defaults | settings))  # type: ignore[arg-type]
    config = RouterProcessConfig(
        cluster="c", name="router-0", redis_url="", token=TOKEN, model_path="", model_name=MODEL, max_context_tokens=max_context_tokens, router=router
    )
    membership = Membership(registry, "router-0", TOKEN, router)
    made = FakeCluster(workers, registry, membership, new_service(config, membership, ByteTokenizer()))
    await membership.start()
    try:
        await made.until_healthy(len(workers))
        yield made
    finally:
        await membership.close()
        await asyncio.gather(*(worker.stop() for worker in workers))


@contextlib.asynccontextmanager
async def served(made: FakeCluster) -> AsyncIterator[str]:
    """The app on a loopback port; yields its URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(build_app(made.service), http="httptools", lifespan="off", access_log=False, log_config=None))
    serving = asyncio.create_task(server._serve([listener]))
    made.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        yield made.url
    finally:
        server.should_exit = server.force_exit = True
        await serving
        listener.close()
