"""How fast does each transport move blocks between two processes of this machine, beside memcpy in the same run?

64 blocks of 720 KiB (32 tokens of a 135M model in bf16) per transfer, scattered, best and median of --repeats. The passive process sits in a blocking read.
The last line is one JSON object. Run: python -m bench.transport [--repeats N]
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable

import numpy as np

from transport.config import TransportConfig
from transport.endpoint import TRANSPORTS, Endpoint, Span, open_endpoint
from transport.probe import PassiveProcess

BLOCK_BYTES, NUM_BLOCKS, GAP_BYTES = 720 << 10, 64, 4096
ARENA_BYTES = NUM_BLOCKS * (BLOCK_BYTES + GAP_BYTES)
SPANS = [Span(index * (BLOCK_BYTES + GAP_BYTES), (NUM_BLOCKS - 1 - index) * (BLOCK_BYTES + GAP_BYTES), BLOCK_BYTES) for index in range(NUM_BLOCKS)]

CONFIGS = {name: TransportConfig(backend=name, secret="bench") for name in TRANSPORTS}
CONFIGS["nixl over tcp"] = TransportConfig(backend="nixl", ucx_tls="tcp,self", ucx_error_mode="peer")


def gigabytes_per_second(move: Callable[[], None], repeats: int) -> dict[str, float]:
    speeds = []
    for _ in range(repeats):
        started = time.perf_counter()
        move()
        speeds.append(NUM_BLOCKS * BLOCK_BYTES / (time.perf_counter() - started) / 1e9)
    return {"best": round(max(speeds), 2), "median": round(statistics.median(speeds), 2)}


def measure_memcpy(repeats: int) -> dict[str, float]:
    source, target = (np.ones(ARENA_BYTES, dtype=np.uint8) for _ in range(2))

    def copy() -> None:
        for local, remote, length in SPANS:
            target[remote : remote + length] = source[local : local + length]

    return gigabytes_per_second(copy, repeats)


def measure(name: str, config: TransportConfig, repeats: int) -> dict[str, dict[str, float]]:
    with PassiveProcess(config, f"{name} passive", ARENA_BYTES) as passive:
        endpoint = open_endpoint(config, f"{name} initiator", ARENA_BYTES)
        peer = endpoint.connect(passive.metadata)
        results = {direction: gigabytes_per_second(_transfer(endpoint, direction, peer), repeats) for direction in ("write", "read")}
        endpoint.close()
    return results


def _transfer(endpoint: Endpoint, direction: str, peer: str) -> Callable[[], None]:
    move = {"write": endpoint.write, "read": endpoint.read}[direction]
    return lambda: move(peer, SPANS, time.monotonic() + 30.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=20)
    repeats = parser.parse_args().repeats
    memcpy = measure_memcpy(repeats)
    print(f"{'GB/s, best (median)':22} {'write':>14} {'read':>14}")
    print(f"{'memcpy':22} {memcpy['best']:6.2f} ({memcpy['median']:5.2f})")
    transports = {}
    for name, config in CONFIGS.items():
        transports[name] = measure(name, config, repeats)
        write, read = transports[name]["write"], transports[name]["read"]
        print(f"{name:22} {write['best']:6.2f} ({write['median']:5.2f}) {read['best']:6.2f} ({read['median']:5.2f})")
    figures = {"bench": "transport", "num_blocks": NUM_BLOCKS, "block_bytes": BLOCK_BYTES, "memcpy": memcpy, "transports": transports}
    print(json.dumps(figures), flush=True)
    os._exit(0)  # see transport.nixl


if __name__ == "__main__":
    main()
