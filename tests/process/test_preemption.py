"""Preemption on real processes: a decode worker whose pool is too small for its sequences; what it takes from them they find in its node's store."""

import time
from pathlib import Path

import numpy as np
import pytest
from fakes.model import write_tiny_model
from serving import ask_all, look, serving, sides, timeline

from bench.engine_scheduling import Driver
from engine.config import EngineConfig
from engine.model_config import ModelConfig
from engine.runner import open_runner
from protocol.request import GenerationRequest, Sampling

pytestmark = pytest.mark.timeout(300)
NUM_TOKENS = 200


def alone(model_path: Path, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    """The answers of one engine with room for all."""
    config = EngineConfig(runner="fake", dtype="float32")
    model = ModelConfig.load(model_path)
    pool = np.zeros(400 * model.layout(config.block_tokens, config.dtype).block_bytes, np.uint8)
    driver = Driver(config, 400, open_runner(config, model_path, model, pool), model_path)
    sampling = Sampling(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    tokens = driver.run([GenerationRequest(str(index), tuple(prompt), sampling, time.time() + 60) for index, prompt in enumerate(prompts)])
    driver.engine.close()
    return [tuple(tokens[str(index), 0]) for index in range(len(prompts))]


def test_preempted_hand_offs_load_what_they_wrote_back_and_answer_the_same(tmp_path: Path) -> None:
    prompts = [[(index * 7 + token) % 250 for token in range(70)] for index in range(12)]
    model_path = write_tiny_model(tmp_path / "model")
    block_bytes = ModelConfig.load(model_path).layout(32, "float32").block_bytes
    settings = (
        f"model={model_path}",
        "engine.runner=fake",
        "engine.dtype=float32",
        f"engine.kv_cache_bytes={40 * block_bytes}",
        "engine.max_context_tokens=1024",
        "engine.reserved_output=0",
        "engine.check_integrity=true",
    )
    with serving("local", *settings) as cluster:
        answers = ask_all(cluster, prompts, at_once=12, max_tokens=NUM_TOKENS, ignore_eos=True)
        work = [sides(timeline(cluster, answer.request_id), "decode")[-1] for answer in answers]
        counters = [worker["counters"] for worker in look(cluster)["workers"]]
    assert [answer.tokens for answer in answers] == alone(model_path, prompts)
    assert all(counter.get("integrity_violations", 0) == 0 for counter in counters)
    preempted = [side for side in work if side["preemptions"]]
    totals = {name: sum(side[name] for side in preempted) for name in ("reused_store_tokens", "handoff_tokens", "computed_tokens")}
    print(f"{len(preempted)} of {len(work)} preempted: {totals}")
    assert totals["reused_store_tokens"] > totals["handoff_tokens"], "nobody was preempted, or nothing that was written back was found"
