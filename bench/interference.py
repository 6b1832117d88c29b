"""How much arriving prompts slow running answers: colocated against disaggregated, on this machine, in interleaved runs.

`python -m bench.interference` keeps a few answers streaming, quiet at first, then while 2,000-token prompts arrive one after the other. Prints the medians
of the time between tokens, their ratio to the quiet median of the same cluster, the share of gaps over twice the quiet median, and one JSON line.
"""

import argparse
import asyncio
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable

import httpx

from cli.config import load_config
from cluster.local import Cluster

SETUPS = {"colocated": "examples/colocated.yaml", "disaggregated": "examples/local.yaml"}


async def stream(client: httpx.AsyncClient, model: str, prompt: list[int], max_tokens: int) -> list[float]:
    """When each chunk of the answer came, in seconds."""
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    times = []
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())
    return times


async def keep_busy(client: httpx.AsyncClient, model: str, seed: int, tokens: int, running: Callable[[], bool]) -> int:
    """Long prompts, one after the other, until the answers are through; how many."""
    count, rng = 0, random.Random(seed)
    while running():
        await stream(client, model, [rng.randrange(1000, 40000) for _ in range(tokens)], 1)
        count += 1
    return count


async def gaps(url: str, model: str, streams: int, tokens: int, prompt_tokens: int, seed: int) -> tuple[list[float], int]:
    """Times between tokens of `streams` answers, while prompts of `prompt_tokens` arrive (0: none); and how many arrived. First tokens are left out."""
    rng = random.Random(seed)
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        prompts = [[rng.randrange(1000, 40000) for _ in range(64)] for _ in range(streams)]
        answers = [asyncio.create_task(stream(client, model, prompt, tokens)) for prompt in prompts]
        arrived = await keep_busy(client, model, seed, prompt_tokens, lambda: not all(it.done() for it in answers)) if prompt_tokens else 0
        return [later - sooner for times in await asyncio.gather(*answers) for sooner, later in itertools.pairwise(times)], arrived


def measure(cluster: Cluster, arguments: argparse.Namespace, run: int) -> dict[str, float]:
    model = cluster.config.model_name
    quiet, _ = asyncio.run(gaps(cluster.url, model, arguments.streams, arguments.tokens, 0, run))
    busy, arrived = asyncio.run(gaps(cluster.url, model, arguments.streams, arguments.tokens, arguments.prompt_tokens, 1000 + run))
    median = statistics.median(quiet)
    return {
        "quiet_ms": 1e3 * median,
        "busy_ms": 1e3 * statistics.median(busy),
        "ratio": statistics.median(busy) / median,
        "quiet_share": sum(gap > 2 * median for gap in quiet) / len(quiet),
        "busy_share": sum(gap > 2 * median for gap in busy) / len(busy),
        "prompts": arrived,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=150)
    parser.add_argument("--prompt-tokens", type=int, default=2000)
    parser.add_argument("--set", action="append", default=[], help="key=value for both clusters")
    arguments = parser.parse_args()
    results: dict[str, list[dict[str, float]]] = {name: [] for name in SETUPS}
    for run in range(arguments.runs):
        for name, path in SETUPS.items():
            with Cluster(load_config(path, ["router.http_port=0", *arguments.set])) as cluster:
                results[name].append(measure(cluster, arguments, run))
            print(name, run, {key: round(value, 3) for key, value in results[name][-1].items()}, flush=True)
    medians = {name: {key: round(statistics.median(row[key] for row in rows), 4) for key in rows[0]} for name, rows in results.items()}
    for name, row in medians.items():
        shares = f"{100 * row['quiet_share']:.1f} % -> {100 * row['busy_share']:.1f} %"
        print(f"{name}: median ITL {row['quiet_ms']:.1f} -> {row['busy_ms']:.1f} ms ({row['ratio']:.2f}x), over twice the quiet median {shares}")
    print(json.dumps({"bench": "interference", "runs": arguments.runs} | medians))


if __name__ == "__main__":
    main()
