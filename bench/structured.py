"""Structured output on the real model: are the answers valid, what does a mask cost, how many forward passes do forced tokens save?

One engine in this process. Every schema of bench.schemas is asked at temperature 0 and 0.7, with two seeds, all at once; each answer is parsed and checked by
jsonschema. Then the rigid schemas alone, with forced tokens appended (as served) and one by one (as with logprobs): the same tokens, fewer passes.
Prints a table, then one JSON line.

    python -m bench.structured [--model smollm2-135m-instruct]
"""

import argparse
import json
import queue
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import torch

from bench.schemas import RIGID, SCHEMAS, Schema
from engine.checkpoint import resolve
from engine.config import EngineConfig
from engine.engine import Engine
from engine.events import Chunk, Event, Failed
from engine.guide import mask_of
from engine.model_config import ModelConfig
from engine.runner import open_runner
from engine.sequence import SequenceKey, Submission
from engine.token_rules import apply_masks
from engine.tokenizer import Tokenizer
from protocol.request import GenerationRequest, Grammar, Sampling

BLOCKS, MAX_TOKENS, DEADLINE_S = 3000, 400, 1200.0
WAYS = [(0.0, 1), (0.0, 2), (0.7, 1), (0.7, 2)]  # temperature, seed; the greedy ones differ in their prompt


class Bench:
    """An engine over the real model, and answers by request id."""

    def __init__(self, folder: Path, dtype: str = "bfloat16") -> None:
        config = EngineConfig(dtype=dtype, max_num_seqs=32)  # type: ignore[arg-type]
        model = ModelConfig.load(folder)
        pool = np.zeros(BLOCKS * model.layout(config.block_tokens, config.dtype).block_bytes, np.uint8)
        self.tokenizer = Tokenizer(folder)
        self._events: queue.Queue[Event] = queue.Queue()
        self.engine = Engine(config, BLOCKS, open_runner(config, folder, model, pool), self.tokenizer, "bench", self._deliver)
        self.engine.start()

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            self._events.put(event)

    def request(self, name: str, words: str, schema: Schema, **sampling: Any) -> GenerationRequest:
        prompt = self.tokenizer.encode_chat([{"role": "user", "content": f"{words} Answer in JSON."}])
        wishes: dict[str, Any] = {"max_tokens": MAX_TOKENS, "grammar": Grammar("json_schema", json.dumps(schema, ensure_ascii=False))} | sampling
        return GenerationRequest(name, tuple(prompt), Sampling(**wishes), time.time() + DEADLINE_S)

    def run(self, requests: list[GenerationRequest]) -> dict[str, tuple[str, list[int], str]]:
        """Text, tokens and finish reason (or error) of each."""
        for request in requests:
            self.engine.submit(Submission(request))
        text: dict[SequenceKey, str] = {request.key: "" for request in requests}
        tokens: dict[SequenceKey, list[int]] = {request.key: [] for request in requests}
        reasons: dict[SequenceKey, str] = {}
        while len(reasons) < len(requests):
            event = self._events.get(timeout=DEADLINE_S)
            key = event.key
            if isinstance(event, Chunk):
                text[key] += event.text
                tokens[key] += event.tokens
                if event.finish_reason:
                    reasons[key] = event.finish_reason
            elif isinstance(event, Failed):
                reasons[key] = event.error.message
        return {key[0]: (text[key], tokens[key], reasons[key]) for key in reasons}

    def counted(self, name: str, work: Callable[[], Any]) -> tuple[Any, float]:
        """What the work gives, and by how much the counter grew."""
        before = self.engine.status.counters.get(name, 0)
        result = work()
        time.sleep(0.05)  # the step that ended it is published
        return result, self.engine.status.counters.get(name, 0) - before


def fault_of(schema: Schema, text: str, reason: str) -> str:
    """Why the answer is not valid; empty where it is."""
    if reason != "stop":
        return reason
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error).splitlines()[0]
    return ""


def check_validity(bench: Bench) -> dict[str, Any]:
    requests = {
        f"{name}/{temperature}/{seed}": bench.request(
            f"{name}/{temperature}/{seed}", words + " Be brief." * (seed - 1), schema, temperature=temperature, seed=seed
        )
        for name, (words, schema) in SCHEMAS.items()
        for temperature, seed in WAYS
    }
    started = time.monotonic()
    answers = bench.run(list(requests.values()))
    faults = {}
    for name, (text, _, reason) in answers.items():
        if fault := fault_of(SCHEMAS[name.split("/")[0]][1], text, reason):
            faults[name] = fault
            print(f"INVALID {name}: {fault}: {text[:200]!r}")
    for name in SCHEMAS:
        print(f"{name:16} {answers[f'{name}/0.7/1'][0][:130]}")
    counters = bench.engine.status.counters
    masks = counters["grammar_masks"]
    return {
        "answers": len(answers),
        "valid": len(answers) - len(faults),
        "seconds": round(time.monotonic() - started, 1),
        "tokens": sum(len(tokens) for _, tokens, _ in answers.values()),
        "forced_tokens": int(counters["forced_tokens"]),
        "mask_ms_per_token": round(1000 * counters["grammar_s"] / masks, 4),
        "apply_ms_per_row": apply_ms(bench.tokenizer.vocab_size),
        "rows_that_waited": int(counters["grammar_waits"]),
        "compile_ms_each": round(1000 * counters["grammar_compile_s"] / counters["grammars_compiled"], 1),
    }


def apply_ms(vocab_size: int, rows: int = 16, rounds: int = 50) -> float:
    """Milliseconds to lay one row's mask over its logits."""
    logits, masks = torch.zeros(rows, vocab_size), [mask_of(range(0, vocab_size, 3), vocab_size)] * rows
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        apply_masks(logits, masks)
        times.append(time.perf_counter() - started)
    return round(1000 * sorted(times)[rounds // 2] / rows, 4)


def count_passes(bench: Bench) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for name, (words, schema) in RIGID.items():
        served = bench.request(f"{name}/served", words, schema, temperature=0.0)
        stepwise = bench.request(f"{name}/stepwise", words, schema, temperature=0.0, logprobs=0)
        answer, passes = bench.counted("steps", partial(bench.run, [served]))
        plain, all_passes = bench.counted("steps", partial(bench.run, [stepwise]))
        (text, tokens, reason), (_, plain_tokens, _) = answer[served.request_id], plain[stepwise.request_id]
        assert tokens == plain_tokens and not fault_of(schema, text, reason), text
        rows[name] = {"tokens": len(tokens), "passes": int(passes), "passes_stepwise": int(all_passes), "cut": round(all_passes / passes, 2)}
        print(f"{name:16} {len(tokens)} tokens, {passes:.0f} passes instead of {all_passes:.0f}: {text}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="as in the configuration")
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/headrace/models"))
    options = parser.parse_args()
    bench = Bench(resolve(options.model, options.cache.expanduser()))
    try:
        result = {"bench": "structured", **check_validity(bench), "rigid": count_passes(bench)}
    finally:
        bench.engine.close()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
