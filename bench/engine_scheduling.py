"""What scheduling gives and what it costs. Prints a line for each measurement, then one JSON line.

- continuous over static batching: the same requests of varied lengths through the real engine, in one run: a place in the batch is given away again when
  an answer ends, or when all of its batch have ended.
- cost: the engine thread's time by its own counters, on the real model at batch 16; what is not the model's step is on the critical path.
- prefix hits: longest prefix first against first come, first served, in a pool too small for all prefixes, in virtual time: hit rate, longest wait, and how
  often somebody was overtaken after the age cap.
- reserved output: memory kept at admission for what answers are expected to grow to (their mean, learnt), or not: preemptions, tokens computed, steps.
- predicted lengths: seconds from arrival to end where long prompts get answers twenty times as long, first come against shortest predicted first, whose
  predictions are learnt on the way; in virtual time.
- crowd: time to first token of a few requests alone, and with ten times as many others at the same time: as equals of one tenant, from another tenant,
  from a lower class; in virtual time.
- decode rounds: scheduling rounds for each step, and that the tokens are the same.

    python -m bench.engine_scheduling [--no-model]
"""

import argparse
import json
import queue
import random
import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from engine.batch import Batch
from engine.block_pool import BlockPool
from engine.checkpoint import resolve
from engine.config import EngineConfig
from engine.engine import Engine
from engine.events import Chunk, Event, Failed
from engine.model_config import ModelConfig
from engine.runner import Runner, open_runner
from engine.scheduler import Plan, Scheduler
from engine.sequence import Sequence, SequenceKey, SequenceState, Submission
from engine.tokenizer import Tokenizer
from protocol.request import GenerationRequest, Sampling

NEVER = 1e12
AGE_CAP_S = 3.0
BLOCK = 32
VOCABULARY = 256


class SleepingRunner:
    """A step takes as long as a memory-bound model's: a fixed time and a little for each token. The next token follows from the last and its position."""

    vocab_size = VOCABULARY

    def __init__(self, base_s: float = 0.004, token_s: float = 0.0001) -> None:
        self._base_s = base_s
        self._token_s = token_s

    def run(self, batch: Batch) -> torch.Tensor:
        time.sleep(self._base_s + self._token_s * len(batch.tokens))
        rows = batch.logit_rows
        logits = torch.zeros(len(rows), VOCABULARY)
        logits[torch.arange(len(rows)), (batch.tokens[rows] * 31 + batch.positions[rows]) % VOCABULARY] = 1.0
        return logits


class Driver:
    def __init__(self, config: EngineConfig, num_blocks: int, runner: Runner, model_path: Path) -> None:
        self._events: queue.Queue[Event] = queue.Queue()
        self.engine = Engine(config, num_blocks, runner, Tokenizer(model_path), "salt", self._deliver)
        self.engine.start()

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            self._events.put(event)

    def run(self, requests: Many[GenerationRequest]) -> dict[SequenceKey, list[int]]:
        """All at once; the tokens of each."""
        for request in requests:
            self.engine.submit(Submission(request))
        tokens: dict[SequenceKey, list[int]] = {request.key: [] for request in requests}
        left = len(requests)
        while left:
            event = self._events.get(timeout=300)
            assert not isinstance(event, Failed), event.error
            if isinstance(event, Chunk):
                tokens[event.key] += event.tokens
                left -= bool(event.finish_reason)
        return tokens


def requests_of(lengths: Many[int], num_prompt: int, seed: int = 0) -> list[GenerationRequest]:
    rng = random.Random(seed)
    prompts = [tuple(rng.randrange(250) for _ in range(num_prompt)) for _ in lengths]
    return [
        GenerationRequest(f"{index}", prompt, Sampling(max_tokens=length, temperature=0.0, ignore_eos=True), NEVER)
        for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]


def varied_lengths(count: int, mean: float, seed: int = 0) -> list[int]:
    """Geometric, as answers roughly are; at least 1, at most 6 means."""
    rng = np.random.default_rng(seed)
    return [int(length) for length in np.minimum(rng.geometric(1 / mean, count), 6 * mean)]


def batching(model_path: Path, runner: Runner, config: EngineConfig, num_blocks: int, requests: list[GenerationRequest]) -> dict[str, float]:
    """Useful output tokens a second, and steps, of continuous and static batching. `unpadded`: static, but rows whose answer has ended cost nothing."""
    groups = [requests[first : first + config.max_num_seqs] for first in range(0, len(requests), config.max_num_seqs)]
    ways = {"continuous": [requests], "unpadded": groups, "static": [padded(group) for group in groups]}
    useful = sum(request.sampling.max_tokens for request in requests)
    outcome: dict[str, float] = {}
    for name, batches in ways.items():
        driver = Driver(config, num_blocks, runner, model_path)
        started = time.perf_counter()
        for batch in batches:
            driver.run(batch)
        outcome[name] = useful / (time.perf_counter() - started)
        driver.engine.close()
        outcome[f"{name}_steps"] = driver.engine.status.steps
    return outcome | {"ratio": outcome["continuous"] / outcome["static"], "ratio_unpadded": outcome["continuous"] / outcome["unpadded"]}


def padded(group: list[GenerationRequest]) -> list[GenerationRequest]:
    """Every row goes on until the longest answer of its batch has ended."""
    longest = max(request.sampling.max_tokens for request in group)
    return [replace(request, sampling=replace(request.sampling, max_tokens=longest)) for request in group]


def cost(model_path: Path, runner: Runner, config: EngineConfig, num_blocks: int) -> dict[str, float]:
    """Shares of the engine thread's busy time, in percent, and its microseconds a step."""
    driver = Driver(config, num_blocks, runner, model_path)
    driver.run(requests_of([64] * config.max_num_seqs, 128))
    counters = driver.engine.status.counters
    driver.engine.close()
    names = ("command_s", "schedule_s", "build_s", "run_s", "sample_s", "update_s")
    busy = sum(counters[name] for name in names)
    shares = {name.removesuffix("_s") + "_percent": 100 * counters[name] / busy for name in names}
    return shares | {"schedule_and_build_us": 1e6 * (counters["schedule_s"] + counters["build_s"]) / counters["steps"]}


@dataclass
class PrefixRun:
    hit_rate: float  # prompt tokens found in the pool
    longest_wait_s: float
    mean_wait_s: float
    overtaken_past_cap: int  # AGE_CAP_S, also where the run itself has another cap


def prefix_run(admission: str, age_cap_s: float, num_requests: int = 400, seed: int = 0) -> PrefixRun:
    """8 prefixes of 16 blocks in a pool of 80, 4 sequences at a time; requests come somewhat faster than first come, first served can take them."""
    rng = random.Random(seed)
    config = EngineConfig(block_tokens=BLOCK, max_num_seqs=4, admission=admission, age_cap_s=age_cap_s, max_num_batched_tokens=512, chunk_tokens=512)
    scheduler = Scheduler(config, BlockPool(80))
    prefixes = [[rng.randrange(1000) for _ in range(16 * BLOCK)] for _ in range(8)]
    arrivals = [0.1 * index for index in range(num_requests)]
    sequences = [_sequence(index, rng.choice(prefixes) + [rng.randrange(1000) for _ in range(40)], at) for index, at in enumerate(arrivals)]
    waiting: dict[SequenceKey, Sequence] = {}
    now, coming, waits, overtaken = 0.0, list(reversed(sequences)), [], 0
    while coming or not scheduler.is_idle:
        while coming and coming[-1].times.queued <= now:
            scheduler.add(sequence := coming.pop())
            waiting[sequence.key] = sequence
        plan = scheduler.schedule(now)
        for sequence in plan.admitted:
            if waiting.pop(sequence.key, None) is not None:
                waits.append(now - sequence.times.queued)
                overtaken += sum(_is_wronged(other, sequence, scheduler, now - AGE_CAP_S) for other in waiting.values())
        now += 0.02 + 0.0005 * sum(num_tokens for _, num_tokens in plan.scheduled)
        _advance(scheduler, plan)
    hits = sum(sequence.tally.reused_device_tokens for sequence in sequences) / sum(sequence.num_prompt for sequence in sequences)
    return PrefixRun(hits, max(waits), sum(waits) / len(waits), overtaken)


def memory_run(reserved_output: float, num_requests: int = 300) -> dict[str, float]:
    """Two tenants with answers of 40 and of 250 tokens that nobody announced, in a pool of 120 blocks."""
    rng = random.Random(0)
    config = EngineConfig(block_tokens=BLOCK, max_num_seqs=32, reserved_output=reserved_output)
    scheduler = Scheduler(config, BlockPool(120))
    lengths = [rng.choice((40, 250)) for _ in range(num_requests)]
    for index, length in enumerate(lengths):
        scheduler.add(_sequence(index, [rng.randrange(1000) for _ in range(64)], 0.0, max_tokens=1000, tenant=str(length)))
    steps = tokens = 0
    while not scheduler.is_idle:
        plan = scheduler.schedule(0.0)
        steps, tokens = steps + 1, tokens + sum(num_tokens for _, num_tokens in plan.scheduled)
        _advance(scheduler, plan, lambda sequence: int(sequence.request.tenant))
    return {"preemptions": scheduler.preemptions, "steps": steps, "tokens": tokens, "tokens_needed": sum(63 + length for length in lengths)}


def length_run(admission: str, num_requests: int = 400) -> dict[str, float]:
    """Requests come somewhat faster than they can be served; no length is known before an answer of its kind has ended."""
    rng = random.Random(0)
    config = EngineConfig(block_tokens=BLOCK, max_num_seqs=8, admission=admission, age_cap_s=60.0)
    scheduler = Scheduler(config, BlockPool(200))
    shapes = [rng.choice(((32, 10), (200, 200))) for _ in range(num_requests)]
    coming = [_sequence(index, [rng.randrange(1000) for _ in range(shape[0])], 0.28 * index, max_tokens=1000) for index, shape in enumerate(shapes)]
    now, took = 0.0, list[float]()
    coming.reverse()
    while coming or not scheduler.is_idle:
        while coming and coming[-1].times.queued <= now:
            scheduler.add(coming.pop())
        plan = scheduler.schedule(now)
        now = now + 0.02 + 0.0005 * sum(num_tokens for _, num_tokens in plan.scheduled)
        _advance(scheduler, plan, lambda sequence: 10 if sequence.num_prompt == 32 else 200)
        took += [now - sequence.times.queued for sequence, _ in plan.scheduled if sequence.state is SequenceState.FINISHED]
    return {"mean_s": sum(took) / num_requests, "p99_s": float(np.percentile(took, 99)), "makespan_s": now}


def crowd_run(crowd: int, tenant: str = "", priority: int = 0, num_requests: int = 60) -> dict[str, float]:
    """Seconds to the first token of one request every half second, 8 places; `crowd` others come with each of them, of that tenant and class."""
    rng = random.Random(0)
    scheduler = Scheduler(EngineConfig(block_tokens=BLOCK, max_num_seqs=8), BlockPool(200))
    ours = [_sequence(index, [rng.randrange(1000) for _ in range(64)], 0.5 * index, max_tokens=30) for index in range(num_requests)]
    coming = list(ours)
    for index in range(crowd * num_requests):
        tokens = [rng.randrange(1000) for _ in range(64)]
        coming.append(_sequence(num_requests + index, tokens, 0.5 * index / crowd, max_tokens=30, tenant=tenant, priority=priority))
    coming.sort(key=lambda sequence: -sequence.times.queued)
    now, first_tokens = 0.0, list[float]()
    while len(first_tokens) < num_requests:
        while coming and coming[-1].times.queued <= now:
            scheduler.add(coming.pop())
        plan = scheduler.schedule(now)
        now += 0.02 + 0.0005 * sum(num_tokens for _, num_tokens in plan.scheduled)
        awaited = [sequence for sequence, _ in plan.scheduled if not sequence.num_output and sequence in ours]
        _advance(scheduler, plan)
        first_tokens += [now - sequence.times.queued for sequence in awaited if sequence.num_output]
    return {"mean_s": sum(first_tokens) / num_requests, "p99_s": float(np.percentile(first_tokens, 99))}


def _sequence(index: int, tokens: list[int], queued: float, max_tokens: int = 8, tenant: str = "", priority: int = 0) -> Sequence:
    request = GenerationRequest(str(index), tuple(tokens), Sampling(max_tokens=max_tokens), NEVER, tenant=tenant, priority=priority)
    sequence = Sequence(Submission(request), BLOCK, b"salt", None, index)  # type: ignore[arg-type]
    sequence.times.queued = queued
    return sequence


def _is_wronged(waiting: Sequence, admitted: Sequence, scheduler: Scheduler, due_since: float) -> bool:
    """Waited past the cap, came before the admitted one, and did not wait for a prefix that is being computed."""
    return waiting.times.queued <= due_since and waiting.order < admitted.order and not scheduler.waits_for_prefix(waiting)


def _advance(scheduler: Scheduler, plan: Plan, length_of: Callable[[Sequence], int] = lambda sequence: sequence.request.sampling.max_tokens) -> None:
    for sequence, num_tokens in plan.scheduled:
        done = num_tokens == sequence.num_remaining
        sequence.advance(num_tokens)
        scheduler.name_blocks(sequence)
        if done:
            sequence.append(1)
        if sequence.num_output == length_of(sequence):
            scheduler.finish(sequence)


def decode_rounds(model_path: Path, num_steps: int) -> dict[str, float]:
    """Scheduling rounds for each step with 1 and with `num_steps` decode steps a round; fails where a token differs."""
    rates, tokens = {}, []
    for steps in (1, num_steps):
        driver = Driver(EngineConfig(num_continuous_decode_steps=steps, max_num_seqs=16), 400, SleepingRunner(), model_path)
        tokens.append(driver.run(requests_of([64] * 16, 64)))
        status = driver.engine.status
        rates[f"rounds_per_step_{steps}"] = status.counters["scheduling_rounds"] / status.steps
        driver.engine.close()
    assert tokens[0] == tokens[1]
    return rates


def real_model(model_path: Path) -> dict[str, dict[str, float]]:
    model = ModelConfig.load(model_path)
    config = EngineConfig(max_num_seqs=16)
    num_blocks = 256
    runner = open_runner(config, model_path, model, np.zeros(num_blocks * model.layout(BLOCK, config.dtype).block_bytes, np.uint8))
    lengths = varied_lengths(40, mean=24)
    eight = EngineConfig(max_num_seqs=8)
    return {"cost": cost(model_path, runner, config, num_blocks), "batching_model": batching(model_path, runner, eight, num_blocks, requests_of(lengths, 32))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--no-model", action="store_true", help="leave out what runs the real model")
    arguments = parser.parse_args()
    model_path = resolve(arguments.model, Path("~/.cache/headrace/models"))
    requests = requests_of(varied_lengths(128, mean=48), 64)
    figures: dict[str, dict[str, float]] = {
        "batching_step_model": batching(model_path, SleepingRunner(), EngineConfig(max_num_seqs=16), 1024, requests),
        "fcfs": vars(prefix_run("fcfs", AGE_CAP_S)),
        "lpm": vars(prefix_run("lpm", AGE_CAP_S)),
        "lpm_without_cap": vars(prefix_run("lpm", NEVER)),
        "reserved_0": memory_run(0.0),
        "reserved_1": memory_run(1.0),
        "lengths_fcfs": length_run("fcfs"),
        "lengths_shortest": length_run("shortest_predicted"),
        "alone": crowd_run(0),
        "crowd_of_equals": crowd_run(10),
        "crowd_of_a_tenant": crowd_run(10, tenant="crowd"),
        "crowd_of_a_class": crowd_run(10, tenant="crowd", priority=1),
        "decode_rounds": decode_rounds(model_path, 8),
    }
    if not arguments.no_model:
        figures |= real_model(model_path)
    for name, values in figures.items():
        print(f"{name:20s} " + "  ".join(f"{key} {value:.3g}" for key, value in values.items()))
    rounded = {name: {key: round(value, 4) for key, value in values.items()} for name, values in figures.items()}
    print(json.dumps({"bench": "engine_scheduling", **rounded}))


if __name__ == "__main__":
    main()
