"""Put and get against a store node in another process, beside memcpy here: GB/s of blocks as large as SmolLM2's (720 KiB), checksums included.

Usage: python -m bench.store [--transport nixl|shm|tcp] [--blocks 64] [--rounds 5]. The last line is JSON.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np

from kvstore.config import StoreConfig, StoreNodeConfig
from kvstore.hashing import BlockHash
from kvstore.layout import BlockLayout
from kvstore.mover import BlockMover, PoolBlock
from kvstore.session import StoreAddress, StoreSessions
from protocol.membership import new_generation
from transport.config import TransportConfig
from transport.endpoint import open_endpoint

LAYOUT = BlockLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_tokens=32, dtype="bfloat16")


@contextmanager
def store(transport: TransportConfig, num_blocks: int) -> Iterator[StoreAddress]:
    config = StoreNodeConfig(
        cluster="bench",
        name="store",
        node="bench",
        redis_url="unix:///nonexistent.sock",
        token="bench",
        layout=LAYOUT,
        store=StoreConfig(capacity_bytes=2 * num_blocks * LAYOUT.block_bytes),
        transport=transport,
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store.json"
        path.write_bytes(msgspec.json.encode(config))
        process = subprocess.Popen([sys.executable, "-m", "kvstore.process", str(path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            assert process.stdout is not None
            yield StoreAddress("store", 0, process.stdout.readline().strip().removeprefix("ready "))
        finally:
            process.terminate()
            process.wait()


def memcpy_gb_s(num_blocks: int, rounds: int) -> float:
    source = np.ones(num_blocks * LAYOUT.block_bytes, dtype=np.uint8)
    target = np.zeros_like(source)
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - started)
    return source.nbytes / sorted(seconds)[rounds // 2] / 1e9


async def measure(address: StoreAddress, transport: TransportConfig, num_blocks: int, rounds: int) -> dict[str, float]:
    generation = new_generation()
    endpoint = open_endpoint(transport, f"bench#{generation}", BlockMover.arena_bytes(LAYOUT, 2 * num_blocks))
    mover = BlockMover(endpoint, LAYOUT, 2 * num_blocks)
    sessions = StoreSessions(endpoint, generation, LAYOUT, "bench")
    mover.pool[: num_blocks * LAYOUT.block_bytes] = np.random.default_rng(0).integers(0, 256, num_blocks * LAYOUT.block_bytes, dtype=np.uint8)
    session = await sessions.get(address)
    puts, gets = [], []
    for i in range(rounds):
        hashes = [BlockHash(os.urandom(16)) for _ in range(num_blocks)]
        started = time.perf_counter()
        put = await mover.put(session, "", [PoolBlock(name, at, LAYOUT.block_tokens) for at, name in enumerate(hashes)], time.time() + 30)
        puts.append(time.perf_counter() - started)
        wanted = [PoolBlock(name, num_blocks + at, LAYOUT.block_tokens) for at, name in enumerate(hashes)]
        started = time.perf_counter()
        got = await mover.fetch(session, "", wanted, wait_until=0, deadline=time.time() + 30)
        gets.append(time.perf_counter() - started)
        assert put.num_blocks == got.num_blocks == num_blocks, (i, put.reason, got.reason)
    half = num_blocks * LAYOUT.block_bytes
    assert np.array_equal(mover.pool[:half], mover.pool[half:])
    await sessions.close()
    return {"put_gb_s": half / sorted(puts)[rounds // 2] / 1e9, "get_gb_s": half / sorted(gets)[rounds // 2] / 1e9}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--transport", default="nixl")
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    transport = TransportConfig(backend=options.transport, secret="bench")
    with store(transport, options.blocks) as address:
        figures = asyncio.run(measure(address, transport, options.blocks, options.rounds))
    figures["memcpy_gb_s"] = memcpy_gb_s(options.blocks, options.rounds)
    for name, figure in figures.items():
        print(f"{name:12} {figure:7.2f}")
    row = {name: round(figure, 2) for name, figure in figures.items()}
    print(json.dumps({"bench": "store", "transport": options.transport, "blocks": options.blocks, "block_bytes": LAYOUT.block_bytes, **row}), flush=True)
    os._exit(0)  # see transport.nixl


if __name__ == "__main__":
    main()
