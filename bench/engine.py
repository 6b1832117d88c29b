"""How near the engine's step comes to what this machine can do, in one run.

Limits, measured on the same threads: a plain streaming read of the very weights that a step reads, and products whose operands stay in registers
(bf16 pairs, int8 quadruples, fp32). Then the step of the real model as a fraction of them: decode against the read, prefill against the products.
Limit and step alternate and the median of their ratios counts, so that a busy machine slows both. A profile tells where a step's time goes, and the
products are set beside oneDNN's. Prints tables, then one JSON line.

    python -m bench.engine [--threads 1,2] [--formats bf16,w8a8] [--rounds 9] [--cpu-clock]
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import headrace_native
import torch
from headrace_native import Array
from torch import Tensor

from engine.adaptation import Adaptation
from engine.arena import Arena
from engine.attention import Step, load_attention
from engine.batch import Batch
from engine.checkpoint import resolve
from engine.linear import Linear, load_format
from engine.model import Flow, LlamaModel, Rows
from engine.model_config import ModelConfig
from engine.weights import Weights, load_weights

PEAK_OF = {"fp32": "fp32", "bf16": "bf16", "w8a8": "int8"}
DECODE = [(1, 32), (1, 512), (16, 512)]  # (sequences, context)
PREFILL = [512, 2048]
LINEAR_ROWS = [1, 16, 512]
LARGE_BYTES = 512 * 1024**2

Call = Callable[[], object]


@dataclass(frozen=True)
class Watch:
    """Seconds of a call; `cpu`: of the calling thread alone, for one thread on a busy machine."""

    rounds: int
    cpu: bool

    def seconds(self, call: Call) -> float:
        clock = time.thread_time if self.cpu else time.perf_counter
        start = clock()
        call()
        return clock() - start

    def compare(self, limit: Call, call: Call) -> tuple[float, float]:
        """Median of limit / call, paired; and the median seconds of `call`."""
        limit()
        call()
        pairs = [(self.seconds(limit), self.seconds(call)) for _ in range(self.rounds)]
        return statistics.median(a / b for a, b in pairs), statistics.median(b for _, b in pairs)

    def median(self, call: Call) -> float:
        call()
        return statistics.median(self.seconds(call) for _ in range(self.rounds))


@dataclass(frozen=True)
class Machine:
    watch: Watch
    threads: int

    def peak(self, kind: str) -> float:
        """Operations (multiplications and additions) per second."""
        repeats = 100_000
        operations = 2 * headrace_native.multiply(kind, repeats, self.threads)
        return operations / self.watch.median(lambda: headrace_native.multiply(kind, repeats, self.threads))

    def products(self, kind: str, operations: float) -> Call:
        """A call that does so many operations in registers."""
        repeats = 1000
        of_thousand = 2 * headrace_native.multiply(kind, repeats, self.threads)
        count = max(1, round(operations / of_thousand * repeats))
        return lambda: headrace_native.multiply(kind, count, self.threads)

    def read(self, memory: list[Array]) -> Call:
        return lambda: headrace_native.read_memory(memory, self.threads)


def linears(weights: Weights) -> Iterator[tuple[str, Linear]]:
    for layer in weights.layers:
        yield from (("qkv", layer.qkv), ("output", layer.output), ("gate_up", layer.gate_up), ("down", layer.down))
    yield "head", weights.head


class Subject:
    """The model in one format, and batches for it."""

    def __init__(self, name: str, path: Path, threads: int) -> None:
        torch.set_num_threads(threads)
        self.config = ModelConfig.load(path)
        self.weights = load_weights(path, self.config, load_format(name))
        self.model = LlamaModel(self.config, self.weights)
        self.attention = load_attention("native", threads)
        self.threads = threads
        self.dtype = self.weights.embedding.dtype
        self._layout = self.config.layout(32, str(self.dtype).removeprefix("torch."))

    def batch(self, sequences: int, context: int, queries: int) -> tuple[Batch, Tensor]:
        """The last `queries` tokens of each sequence, and a pool that holds all of them; logits of each sequence's last."""
        blocks = -(-context // 32)
        positions = torch.arange(context - queries, context)
        slots = (torch.arange(sequences)[:, None] * blocks * 32 + positions).flatten()
        batch = Batch(
            tokens=torch.arange(sequences * queries) % self.config.vocab_size,
            positions=positions.repeat(sequences),
            slots=slots,
            block_tables=torch.arange(sequences * blocks, dtype=torch.int32).view(sequences, blocks),
            query_starts=torch.arange(0, sequences * queries + 1, queries, dtype=torch.int32),
            context_lens=torch.full((sequences,), context, dtype=torch.int32),
            logit_rows=torch.arange(queries - 1, sequences * queries, queries),
        )
        return batch, Arena().take((sequences * blocks, *self._layout.shape), self.dtype)  # large pages, as in a worker

    def step(self, sequences: int, context: int, queries: int) -> Call:
        batch, pool = self.batch(sequences, context, queries)
        return lambda: self.model.forward(batch, pool, self.attention)

    def memory(self) -> list[Array]:
        """Every weight that a step multiplies by."""
        return [linear.packed for _, linear in linears(self.weights)]

    def operations(self, sequences: int, context: int, queries: int) -> tuple[float, float]:
        """Of the products with weights, and of attention (the causal half)."""
        c, rows = self.config, sequences * queries
        qkv = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
        per_row = c.hidden_size * (qkv + 3 * c.intermediate_size) + c.num_heads * c.head_dim * c.hidden_size
        seen = sequences * sum(range(context - queries + 1, context + 1))
        attention = 4 * seen * c.num_heads * c.head_dim * c.num_layers
        return 2.0 * (rows * per_row * c.num_layers + sequences * c.hidden_size * c.vocab_size), float(attention)

    def schedule(self, sequences: int, context: int, queries: int) -> list[tuple[str, Call]]:
        """The operations of a step in their order."""
        batch, pool = self.batch(sequences, context, queries)
        c, threads, rows = self.config, self.threads, sequences * queries
        residual = torch.randn(rows, c.hidden_size)
        flow = Rows(Flow.of(residual, residual * 0.1, c, self.dtype), c, Adaptation((), threads))
        qkv = torch.randn(rows, (c.num_heads + 2 * c.num_kv_heads) * c.head_dim).to(self.dtype)
        step = Step(batch, pool, self.model.rotary, qkv, torch.zeros(rows, c.num_heads, c.head_dim, dtype=self.dtype), c.head_dim**-0.5)
        attend, attended, packed_qkv = self.attention.begin(step), Array(step.out.flatten(1)), Array(qkv)
        last, logits = Array(torch.randn(sequences, c.hidden_size).to(self.dtype)), Array(torch.empty(sequences, c.vocab_size))

        def norm(weight: Array) -> Call:
            return lambda: headrace_native.add_rms_norm(flow.hidden, flow.residual, flow.update, weight, 1e-5, threads)

        calls: list[tuple[str, Call]] = []
        for index, layer in enumerate(self.weights.layers):
            calls += [
                ("norms", norm(layer.input_norm)),
                ("qkv", partial(layer.qkv, packed_qkv, flow.hidden, threads)),
                ("attention", partial(attend, index)),
                ("output", partial(layer.output, flow.update, attended, threads)),
                ("norms", norm(layer.post_norm)),
                ("gate_up", partial(layer.gate_up, flow.gate_up, flow.hidden, threads)),
                ("silu_mul", partial(headrace_native.silu_mul, flow.product, flow.gate_up, threads)),
                ("down", partial(layer.down, flow.update, flow.product, threads)),
            ]
        return [*calls, ("head", partial(self.weights.head, logits, last, threads))]


# ---- the tables ----------------------------------------------------------------------------------------------------------------


def limits(machine: Machine) -> dict[str, float]:
    """GB/s and GFLOP/s (or GOP/s) of this machine."""
    large = [Array(Arena().take((LARGE_BYTES,), torch.uint8).fill_(1))]
    found = {"read_GBps": LARGE_BYTES / machine.watch.median(machine.read(large)) / 1e9}
    found |= {f"{kind}_Gops": machine.peak(kind) / 1e9 for kind in ("bf16", "int8", "fp32")}
    return {name: round(value, 1) for name, value in found.items()}


def decode(machine: Machine, subject: Subject) -> dict[str, dict[str, float]]:
    """Steps of one token each as a fraction of reading the same weights once; 16 sequences also of the products' peak."""
    rows = {}
    for sequences, context in DECODE:
        fraction, seconds = machine.watch.compare(machine.read(subject.memory()), subject.step(sequences, context, 1))
        rows[f"decode {sequences} x {context}"] = {"ms": seconds * 1e3, "tokens_per_s": sequences / seconds, "of_read": fraction}
    return rows


def both(first: Call, second: Call) -> Call:
    return lambda: (first(), second())


def prefill(machine: Machine, subject: Subject, kind: str) -> dict[str, dict[str, float]]:
    """Whole prompts as a fraction of the time that their operations take in registers: the weights' in the format's own, attention's in the activations'."""
    activations = "fp32" if kind == "fp32" else "bf16"
    rows = {}
    for tokens in PREFILL:
        products, attention = subject.operations(1, tokens, tokens)
        of_weights, of_attention = machine.products(kind, products), machine.products(activations, attention)
        fraction, seconds = machine.watch.compare(both(of_weights, of_attention), subject.step(1, tokens, tokens))
        rows[f"prefill {tokens}"] = {"ms": seconds * 1e3, "tokens_per_s": tokens / seconds, "of_peak": fraction}
    return rows


def profile(machine: Machine, subject: Subject, shape: tuple[int, int, int]) -> dict[str, float]:
    """Milliseconds of a step by operation, measured in a step's order; `rest` is the step less their sum: the embedding and the buffers."""
    schedule, rounds = subject.schedule(*shape), []
    step = machine.watch.median(subject.step(*shape)) * 1e3
    for _ in range(machine.watch.rounds):
        spent: dict[str, float] = {}
        for name, call in schedule:
            spent[name] = spent.get(name, 0.0) + machine.watch.seconds(call) * 1e3
        rounds.append(spent)
    parts = {name: statistics.median(spent[name] for spent in rounds) for name in rounds[0]}
    return {"step": round(step, 2), **{name: round(ms, 2) for name, ms in parts.items()}, "rest": round(step - sum(parts.values()), 2)}


def onednn(weight: Tensor, x: Tensor, name: str) -> dict[str, Call]:
    """torch's own products of the same shape; for int8 the products alone, their inputs rounded beforehand."""
    if name != "w8a8":
        return {"torch": lambda: torch.nn.functional.linear(x, weight)}
    whole, scales = (weight.float() * 40).round().clamp(-127, 127).to(torch.int8), torch.full((len(weight),), 0.01)
    packed = torch.ops.onednn.qlinear_prepack(whole, None)
    rounded, zeros = torch.randint(0, 255, x.shape, dtype=torch.uint8), torch.zeros(len(weight), dtype=torch.int64)
    signed = torch.randint(-127, 127, x.shape, dtype=torch.int8)
    return {
        "_int_mm": lambda: torch._int_mm(signed, whole.t()),
        "qlinear": lambda: torch.ops.onednn.qlinear_pointwise(rounded, 0.02, 128, packed, scales, zeros, None, 1.0, 0, torch.bfloat16, "none", [], ""),
    }


def repeated(call: Call, times: int) -> Call:
    return lambda: [call() for _ in range(times)]


def beside_onednn(machine: Machine, subject: Subject, name: str) -> dict[str, dict[str, float]]:
    """GOP/s of our products and of torch's, by shape and rows, each over the same weight again and again."""
    c, table = subject.config, {}
    shapes = {"gate_up": (2 * c.intermediate_size, c.hidden_size), "down": (c.hidden_size, c.intermediate_size)}
    for kind, (outputs, width) in shapes.items():
        weight = torch.randn(outputs, width).to(subject.dtype)
        linear = load_format(name).pack(weight, None, Arena())
        for rows in LINEAR_ROWS:
            x, out = torch.randn(rows, width).to(subject.dtype), torch.empty(rows, outputs, dtype=subject.dtype)
            ends = Array(out), Array(x)
            ways = {"ours": partial(linear, *ends, machine.threads)} | onednn(weight, x, name)
            seconds = {way: machine.watch.median(repeated(call, max(1, 1024 // rows))) / max(1, 1024 // rows) for way, call in ways.items()}
            table[f"{kind} x {rows}"] = {way: round(2e-9 * rows * outputs * width / taken, 1) for way, taken in seconds.items()}
    return table


def show(title: str, rows: dict[str, dict[str, float]]) -> None:
    print(f"\n{title}")
    for name, values in rows.items():
        print(f"  {name:18}", "  ".join(f"{key} {value:9.2f}" for key, value in values.items()), flush=True)


def measure(machine: Machine, path: Path, formats: list[str]) -> dict[str, object]:
    found: dict[str, object] = {"limits": limits(machine)}
    show(f"{machine.threads} threads", {"limits": limits(machine)})
    for name in formats:
        subject = Subject(name, path, machine.threads)
        steps = decode(machine, subject) | prefill(machine, subject, PEAK_OF[name])
        show(f"{name}: steps", steps)
        profiles = {f"{s} x {q} of {c}": profile(machine, subject, (s, c, q)) for s, c, q in [(1, 32, 1), (16, 512, 1), (1, 512, 512)]}
        show(f"{name}: ms by operation", profiles)
        products = beside_onednn(machine, subject, name)
        show(f"{name}: GOP/s of products", products)
        rounded = {row: {key: round(value, 3) for key, value in values.items()} for row, values in steps.items()}
        found[name] = {"steps": rounded, "profile_ms": profiles, "products_Gops": products}
    return found


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--cache-dir", default="~/.cache/headrace")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--formats", default="bf16,w8a8")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cpu-clock", action="store_true", help="seconds of the thread instead of the wall, where one thread is measured")
    options = parser.parse_args()
    path = resolve(options.model, Path(options.cache_dir).expanduser() / "models")
    results = {}
    for threads in map(int, options.threads.split(",")):
        torch.set_num_threads(threads)
        machine = Machine(Watch(options.rounds, options.cpu_clock and threads == 1), threads)
        results[threads] = measure(machine, path, options.formats.split(","))
    print(json.dumps({"bench": "engine", "model": options.model, "instruction_set": headrace_native.instruction_set(), "threads": results}))


if __name__ == "__main__":
    main()
