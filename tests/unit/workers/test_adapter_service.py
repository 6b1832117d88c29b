"""Adapters over a real data plane: a router's link on one side, an engine over the tiny model on the other."""

import asyncio
import queue
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from fakes.lora import write_adapter
from fakes.model import write_tiny_model

from engine.config import EngineConfig, LoraConfig
from engine.engine import Engine
from engine.events import Chunk, Event
from engine.model_config import ModelConfig
from engine.runner import open_runner
from engine.sequence import Submission
from engine.tokenizer import Tokenizer
from protocol import headrace_pb2 as pb
from protocol import headrace_pb2_grpc as rpc
from protocol.channel import VERSION, new_server
from protocol.errors import ConfigError, DeadlineExceeded, InvalidRequest, Overloaded, UnknownModel, WorkerLost
from protocol.membership import Member
from protocol.request import GenerationRequest, Sampling
from router.link import WorkerLink
from worker.adapters import AdapterReader, AdapterService
from worker.data_plane import DataPlane

BLOCKS = 80


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_model(tmp_path_factory.mktemp("adapters") / "model")
    for seed, name in enumerate(("red", "green", "blue")):
        write_adapter(folder.parent / name, folder, seed)
    return folder


class Worker:
    """Engine, adapter service and a link to them."""

    def __init__(self, model_path: Path, config: EngineConfig) -> None:
        self.folder = model_path.parent
        model = ModelConfig.load(model_path)
        pool = np.zeros(BLOCKS * model.layout(config.block_tokens, config.dtype).block_bytes, np.uint8)
        self.events: queue.Queue[Event] = queue.Queue()
        reader = AdapterReader(model, config)
        runner = open_runner(config, model_path, model, pool)
        self.engine = Engine(config, BLOCKS, runner, Tokenizer(model_path), "salt", self._deliver, reader.configured())
        self.service = AdapterService(self.engine, reader)

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            self.events.put(event)

    def status(self) -> pb.WorkerStatus:
        adapters = self.engine.status.adapters
        return pb.WorkerStatus(adapters=[pb.Adapter(name=one.name, revision=one.revision, path=one.path) for one in adapters])

    def load(self, name: str, folder: str, timeout_s: float = 10) -> pb.LoadAdapter:
        return pb.LoadAdapter(name=name, path=str(self.folder / folder), deadline=time.time() + timeout_s)

    def listed(self, link: WorkerLink) -> list[str]:
        return [one.name for one in link.view(time.monotonic()).adapters]


def unload(name: str, timeout_s: float = 10) -> pb.UnloadAdapter:
    return pb.UnloadAdapter(name=name, deadline=time.time() + timeout_s)


@asynccontextmanager
async def connected(model_path: Path, **lora: object) -> AsyncIterator[tuple[Worker, WorkerLink]]:
    worker = Worker(model_path, EngineConfig(dtype="float32", check_integrity=True, lora=LoraConfig(**lora)))  # type: ignore[arg-type]
    worker.engine.start()
    plane = DataPlane({}, pb.WorkerHello(version=VERSION, name="w", generation=1), worker.status, "token", worker.service, heartbeat_s=0.05)
    server = new_server()
    rpc.add_DataPlaneServicer_to_server(plane, server)  # type: ignore[arg-type]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    link = WorkerLink(Member("worker", "w", 1, f"127.0.0.1:{port}"), "r", "token", 5.0, lambda: None)
    link.start()
    try:
        async with asyncio.timeout(10):
            while link.status is None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        yield worker, link
    finally:
        await link.close()
        await server.stop(0)
        worker.engine.close()


async def test_loads_and_unloads_show_in_the_status_at_once(model_path: Path) -> None:
    async with connected(model_path, adapters={"red": str(model_path.parent / "red")}, max_loaded=2) as (worker, link):
        assert worker.listed(link) == ["red"]
        await link.call(worker.load("green", "green"))
        assert worker.listed(link) == ["red", "green"]
        with pytest.raises(Overloaded):
            await link.call(worker.load("blue", "blue"))
        with pytest.raises(InvalidRequest, match=r"adapter_config\.json"):
            await link.call(worker.load("none", "none"))
        await link.call(unload("red"))
        assert worker.listed(link) == ["green"]
        with pytest.raises(UnknownModel):
            await link.call(unload("red"))
        answers = await asyncio.gather(link.call(worker.load("blue", "blue")), link.call(unload("green")), return_exceptions=True)
        assert answers == [None, None] and worker.listed(link) == ["blue"]


async def test_an_unload_is_bounded_by_its_deadline_and_the_sequence_goes_on(model_path: Path) -> None:
    async with connected(model_path, adapters={"red": str(model_path.parent / "red")}) as (worker, link):
        request = GenerationRequest("r", (1, 2, 3), Sampling(max_tokens=2000, temperature=0, ignore_eos=True), time.time() + 60, adapter="red")
        worker.engine.submit(Submission(request))
        with pytest.raises(DeadlineExceeded, match="sequences still use it"):
            await link.call(unload("red", 0.05))
        assert worker.listed(link) == []
        worker.engine.abort(request.key)
        assert await worker.service.answer(worker.load("red", "red")) == pb.AdapterReply()
        tokens = sum(len(event.tokens) for event in list(worker.events.queue) if isinstance(event, Chunk))
        assert 0 < tokens < 2000


async def test_a_broken_stream_ends_the_calls(model_path: Path) -> None:
    async with connected(model_path, adapters={"red": str(model_path.parent / "red")}) as (worker, link):
        request = GenerationRequest("r", (1, 2, 3), Sampling(max_tokens=2000, temperature=0, ignore_eos=True), time.time() + 60, adapter="red")
        worker.engine.submit(Submission(request))
        waiting = asyncio.create_task(link.call(unload("red", 30)))
        await asyncio.sleep(0.05)
        await link.close()
        with pytest.raises(WorkerLost):
            await waiting
        with pytest.raises(WorkerLost):
            await link.call(unload("red", 30))


def test_a_configured_adapter_that_cannot_be_read_is_a_config_error(model_path: Path) -> None:
    config = EngineConfig(lora=LoraConfig(adapters={"red": str(model_path.parent / "red")}, max_rank=2))
    with pytest.raises(ConfigError, match=r"lora\.max_rank"):
        AdapterReader(ModelConfig.load(model_path), config).configured()
