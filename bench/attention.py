"""Attention on one thread: native over the paged pool, the torch reference, and torch's SDPA over contiguous K/V (what paging may cost).

Decode is bound by memory: GB/s of K/V read, over sequences enough to leave the caches. Prefill is bound by arithmetic: GFLOP/s of the
causal half. Prints a table, then one JSON line.

    python -m bench.attention [--threads 1] [--dtype bfloat16]
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention import ATTENTION, Step, load_attention
from engine.batch import Batch
from engine.rotary import Rotary

HEADS, KV_HEADS, DIM, BLOCK = 9, 3, 64, 32
DECODE = [(512, 128), (2048, 32), (8192, 8)]  # (context, sequences): 48 MiB of K/V in bf16
PREFILL = [512, 2048]
UNROTATED = Rotary(torch.ones(1, DIM // 2), torch.zeros(1, DIM // 2))
ROUNDS, SECONDS = 5, 0.4


@dataclass
class Problem:
    sequences: int
    context: int
    queries: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        blocks = -(-self.context // BLOCK)
        torch.manual_seed(0)
        self.pool = torch.randn(self.sequences * blocks, KV_HEADS, 1, 2, BLOCK, DIM).to(self.dtype)
        self.q = torch.randn(self.sequences * self.queries, HEADS, DIM).to(self.dtype)
        self.out = torch.empty_like(self.q)
        self.batch = Batch(
            tokens=torch.zeros(0, dtype=torch.int64),
            positions=torch.zeros(len(self.q), dtype=torch.int64),
            slots=torch.full((len(self.q),), -1),
            block_tables=torch.randperm(self.sequences * blocks).int().view(self.sequences, blocks),
            query_starts=torch.arange(0, len(self.q) + 1, self.queries, dtype=torch.int32),
            context_lens=torch.full((self.sequences,), self.context, dtype=torch.int32),
            logit_rows=torch.zeros(0, dtype=torch.int64),
        )

    @property
    def kv_bytes(self) -> int:
        return self.sequences * self.context * KV_HEADS * 2 * DIM * self.pool.element_size()

    @property
    def flops(self) -> int:
        """Two products over what a causal query sees."""
        seen = sum(range(self.context - self.queries + 1, self.context + 1))
        return self.sequences * seen * HEADS * DIM * 4

    def paged(self, name: str, threads: int) -> Callable[[], object]:
        qkv = torch.cat((self.q.flatten(1), torch.zeros(len(self.q), 2 * KV_HEADS * DIM, dtype=self.dtype)), dim=1)
        attend = load_attention(name, threads).begin(Step(self.batch, self.pool, UNROTATED, qkv, self.out, DIM**-0.5))
        return lambda: attend(0)

    def contiguous(self) -> Callable[[], object]:
        def heads(x: Tensor, count: int) -> Tensor:
            return x.view(self.sequences, -1, count, DIM).transpose(1, 2).contiguous()

        q = heads(self.q, HEADS)
        k, v = (torch.randn(self.sequences, KV_HEADS, self.context, DIM).to(self.dtype) for _ in range(2))
        return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=self.queries > 1, enable_gqa=True)


def best_seconds(run: Callable[[], object]) -> float:
    """The fastest of a few rounds: the machine may be shared."""
    run()
    best, spent = float("inf"), 0.0
    for _ in range(ROUNDS):
        start = time.perf_counter()
        run()
        best, spent = min(best, time.perf_counter() - start), spent + time.perf_counter() - start
        if spent > SECONDS:
            break
    return best


def measure(problem: Problem, work: float, threads: int) -> dict[str, float]:
    """Work per nanosecond (GB/s, GFLOP/s) of each way."""
    ways = {name: problem.paged(name, threads) for name in ATTENTION} | {"sdpa_contiguous": problem.contiguous()}
    return {name: round(work / best_seconds(run) / 1e9, 2) for name, run in ways.items()}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    results: dict[str, dict[str, float]] = {}
    for context, sequences in DECODE:
        problem = Problem(sequences, context, 1, dtype)
        results[f"decode_{context}_GBps"] = measure(problem, problem.kv_bytes, options.threads)
    for context in PREFILL:
        problem = Problem(1, context, context, dtype)
        results[f"prefill_{context}_GFLOPs"] = measure(problem, problem.flops, options.threads)
    for name, row in results.items():
        print(f"{name:22}", "  ".join(f"{way} {value:8.2f}" for way, value in row.items()))
    print(json.dumps({"bench": "attention", "dtype": options.dtype, "threads": options.threads, "results": results}))


if __name__ == "__main__":
    main()
