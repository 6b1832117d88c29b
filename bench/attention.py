"""Native paged attention beside the machine's own limits, measured in the same rounds.

Decode is bound by memory: GB/s of K/V over all layers of a pool (up to 3 GB, larger than the caches). Its roofs are plain reads of as many bytes:
`stream` of contiguous ones, `in_place` of the same addresses in the same order (runs of a block's K and V of one head and layer).
Prefill is bound by arithmetic: GFLOP/s of the causal half; its roof is torch's best matrix product, torch's SDPA over contiguous K/V stands beside it.
Every round measures each way once, one after the other (on one thread its CPU time: neighbours count less); what is told are medians, and the
median of the rounds' ratios. Prints a table, then one JSON line.

    python -m bench.attention [--threads 1 2] [--dtype bfloat16] [--rounds 7]
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
import torch.nn.functional as F

from engine.attention import Step, load_attention
from engine.batch import Batch
from engine.rotary import Rotary
from transport.arena import private_arena

HEADS, KV_HEADS, DIM, BLOCK, LAYERS = 9, 3, 64, 32, 30  # SmolLM2-135M
CONTEXTS = [512, 2048, 8192]
BATCHES = [1, 16]
UNROTATED = Rotary(torch.ones(1, DIM // 2), torch.zeros(1, DIM // 2))
MATRIX = 1024
Way = Callable[[], object]


@dataclass
class Problem:
    """`sequences` of one context in a pool of random K/V; each has `queries` rows."""

    sequences: int
    context: int
    queries: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        blocks, self.layers = self.sequences * self.context // BLOCK, LAYERS if self.queries == 1 else 1
        block_shape = (KV_HEADS, self.layers, 2, BLOCK, DIM)
        self.kv_bytes = blocks * math.prod(block_shape) * self.dtype.itemsize
        self.pool = torch.from_numpy(private_arena(self.kv_bytes)).view(self.dtype).view(blocks, *block_shape)
        self.pool.copy_(torch.randn(block_shape))
        self.q = torch.randn(self.sequences * self.queries, HEADS, DIM).to(self.dtype)
        seen = sum(range(self.context - self.queries + 1, self.context + 1))
        self.flops = self.sequences * seen * HEADS * DIM * 4 * self.layers

    def batch(self) -> Batch:
        rows = len(self.q)
        return Batch(
            tokens=torch.zeros(0, dtype=torch.int64),
            positions=torch.zeros(rows, dtype=torch.int64),
            slots=torch.full((rows,), -1),
            block_tables=torch.arange(len(self.pool)).int().view(self.sequences, -1),
            query_starts=torch.arange(0, rows + 1, self.queries, dtype=torch.int32),
            context_lens=torch.full((self.sequences,), self.context, dtype=torch.int32),
            logit_rows=torch.zeros(0, dtype=torch.int64),
        )

    def native(self, threads: int) -> Way:
        qkv = torch.cat((self.q.flatten(1), torch.zeros(len(self.q), 2 * KV_HEADS * DIM, dtype=self.dtype)), dim=1)
        attend = load_attention("native", threads).begin(Step(self.batch(), self.pool, UNROTATED, qkv, torch.empty_like(self.q), DIM**-0.5))
        return lambda: [attend(layer) for layer in range(self.layers)]

    def sdpa(self) -> Way:
        q = self.q.view(self.sequences, -1, HEADS, DIM).transpose(1, 2).contiguous()
        k, v = (torch.randn(self.sequences, KV_HEADS, self.context, DIM).to(self.dtype) for _ in range(2))
        return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def stream(self) -> Way:
        words = self.pool.view(-1).view(torch.int64)
        return lambda: words.amax()

    def in_place(self) -> Way:
        words = self.pool.view(len(self.pool), KV_HEADS, self.layers, -1).view(torch.int64)
        return lambda: [words[:, head, layer].amax() for layer in range(self.layers) for head in range(KV_HEADS)]


def product(dtype: torch.dtype) -> tuple[Way, float]:
    """A matrix product and its work."""
    a, b = torch.randn(2, MATRIX, MATRIX).to(dtype)
    return lambda: F.linear(a, b), 2.0 * MATRIX**3


def measure(ways: dict[str, tuple[Way, float]], clock: Callable[[], float], rounds: int) -> dict[str, float]:
    """Medians of work per nanosecond (GB/s, GFLOP/s) of each way, and of native's share of each other way in the same round."""
    for way, _ in ways.values():
        way()
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, (way, work) in ways.items():
            start = clock()
            way()
            rates[name].append(work / (clock() - start) / 1e9)
    shares = {f"of_{name}": median(ours / theirs for ours, theirs in zip(rates["native"], rates[name], strict=True)) for name in ways if name != "native"}
    return {name: round(value, 2) for name, value in ({name: median(values) for name, values in rates.items()} | shares).items()}


def measure_threads(threads: int, dtype: torch.dtype, rounds: int) -> dict[str, dict[str, float]]:
    torch.set_num_threads(threads)
    clock = time.thread_time if threads == 1 else time.perf_counter
    results = {}
    for context in CONTEXTS:
        for sequences in BATCHES:
            problem = Problem(sequences, context, 1, dtype)
            ways = {"native": problem.native(threads), "stream": problem.stream(), "in_place": problem.in_place()}
            results[f"decode_{context}x{sequences}"] = measure({name: (way, problem.kv_bytes) for name, way in ways.items()}, clock, rounds)
    for context in CONTEXTS:
        problem = Problem(1, context, context, dtype)
        ways = {"native": (problem.native(threads), problem.flops), "product": product(dtype), "sdpa": (problem.sdpa(), problem.flops)}
        results[f"prefill_{context}"] = measure(ways, clock, rounds)
    return results


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    results = {}
    for threads in options.threads:
        results[f"threads_{threads}"] = rows = measure_threads(threads, getattr(torch, options.dtype), options.rounds)
        for name, row in rows.items():
            print(f"threads {threads}  {name:16}", "  ".join(f"{way} {value:7.2f}" for way, value in row.items()), flush=True)
    print(json.dumps({"bench": "attention", "dtype": options.dtype, "decode": "GB/s of K/V", "prefill": "GFLOP/s", "results": results}))


if __name__ == "__main__":
    main()
