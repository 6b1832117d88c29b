"""Adapters and embeddings through the engine: against transformers with the weights merged, in one batch with the model itself, under reuse and preemption."""

import queue
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes.lora import merged, write_adapter
from fakes.model import write_tiny_model
from transformers import LlamaForCausalLM

from engine.config import EngineConfig, LoraConfig
from engine.engine import Engine
from engine.events import Chunk, Event, Failed
from engine.lora import Adapter, load_adapter
from engine.model_config import ModelConfig
from engine.runner import open_runner
from engine.sequence import SequenceKey, Submission
from engine.tokenizer import Tokenizer
from protocol.errors import HeadraceError
from protocol.request import GenerationRequest, Sampling

TIE = 5e-4
PROMPTS = [[(7 * index + seed * index**2 + seed) % 250 for index in range(length)] for seed, length in enumerate((40, 71, 9, 64, 33, 100))]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("engine-lora") / "model")


@pytest.fixture(scope="module")
def paths(model_path: Path) -> dict[str, Path]:
    names = {"red": 0, "green": 1, "blue": 2}
    return {name: write_adapter(model_path.parent / name, model_path, seed) for name, seed in names.items()}


def read(name: str, path: Path, model_path: Path) -> Adapter:
    return load_adapter(name, path, ModelConfig.load(model_path), torch.float32, 64)


class Bench:
    def __init__(self, model_path: Path, adapters: list[Adapter], blocks: int, config: EngineConfig) -> None:
        model = ModelConfig.load(model_path)
        pool = np.zeros(blocks * model.layout(config.block_tokens, config.dtype).block_bytes, np.uint8)
        self._events: queue.Queue[Event] = queue.Queue()
        self._past: list[Event] = []
        runner = open_runner(config, model_path, model, pool)
        tokenizer = Tokenizer(model_path)
        self.engine = Engine(config, blocks, runner, tokenizer, "salt", lambda some: [self._events.put(event) for event in some] and None, adapters)
        self.engine.start()

    def last(self, key: SequenceKey) -> tuple[list[int], Chunk | Failed]:
        """Tokens and last event of a request that was submitted."""
        tokens: list[int] = []
        while True:
            for event in self._past:
                if event.key == key and isinstance(event, Chunk | Failed):
                    tokens += event.tokens if isinstance(event, Chunk) else []
                    if isinstance(event, Failed) or event.finish_reason:
                        self._past = [other for other in self._past if other.key != key]
                        return tokens, event
            tokens = []
            self._past.append(self._events.get(timeout=30))

    def ask(self, requests: list[GenerationRequest]) -> list[tuple[list[int], Chunk | Failed]]:
        for request in requests:
            self.engine.submit(Submission(request))
        return [self.last(request.key) for request in requests]

    def load(self, adapter: Adapter) -> HeadraceError | None:
        answers: queue.Queue[HeadraceError | None] = queue.Queue()
        self.engine.load_adapter(adapter, answers.put)
        return answers.get(timeout=10)


@contextmanager
def bench(model_path: Path, paths: dict[str, Path], blocks: int = 64, max_loaded: int = 8, **settings: object) -> Iterator[Bench]:
    config = EngineConfig(dtype="float32", check_integrity=True, lora=LoraConfig(max_loaded=max_loaded), **settings)  # type: ignore[arg-type]
    it = Bench(model_path, [read(name, path, model_path) for name, path in paths.items()], blocks, config)
    try:
        yield it
        time.sleep(0.02)
        assert it.engine.status.counters.get("integrity_violations", 0) == 0
    finally:
        it.engine.close()


def request(name: str, prompt: list[int], adapter: str = "", max_tokens: int = 16, pooling: str = "", **fields: str) -> GenerationRequest:
    sampling = Sampling(max_tokens=0 if pooling else max_tokens, temperature=0.0, ignore_eos=True)
    return GenerationRequest(name, tuple(prompt), sampling, time.time() + 60, adapter=adapter, pooling=pooling, **fields)  # type: ignore[arg-type]


def merged_model(model_path: Path, path: Path | None) -> LlamaForCausalLM:
    model = LlamaForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    if path is not None:
        model.load_state_dict(merged(model.state_dict(), path))
    return model


def greedy(model: LlamaForCausalLM, prompt: list[int], tokens: list[int]) -> list[int]:
    """Where `tokens` part from the model's own greedy answer without a tie."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    best = logits.topk(2).values
    return [i for i, token in enumerate(tokens) if logits[i].argmax() != token and best[i, 0] - best[i, 1] > TIE]


def test_many_adapters_in_one_batch_equal_the_merged_models(model_path: Path, paths: dict[str, Path]) -> None:
    """The same prompts for all: their KV must never meet, in whatever order the blocks come and go."""
    names = ["", *paths]
    models = {name: merged_model(model_path, paths.get(name)) for name in names}
    asked = [request(f"{name}-{index}", prompt, name) for index, prompt in enumerate(PROMPTS) for name in names]
    answers: dict[str, list[int]] = {}
    for settings in ({}, {"chunk_tokens": 16, "max_num_batched_tokens": 40}, {"blocks": 20}):
        with bench(model_path, paths, **settings) as it:  # type: ignore[arg-type]
            for again in range(2):
                for one, (tokens, _) in zip(asked, it.ask([one.resumed(again + 1, ()) for one in asked]), strict=True):
                    assert answers.setdefault(one.request_id, tokens) == tokens
    for one in asked:
        assert greedy(models[one.adapter], list(one.prompt_tokens), answers[one.request_id]) == []
    assert all(len({tuple(answers[f"{name}-{index}"]) for name in names}) == len(names) for index in range(len(PROMPTS)))


def test_load_unload_and_load_again_under_the_same_name(model_path: Path, paths: dict[str, Path]) -> None:
    with bench(model_path, {"one": paths["red"]}, max_loaded=2) as it:
        red, green = read("one", paths["red"], model_path), read("one", paths["green"], model_path)
        assert it.load(red) is None  # the same again
        refused = it.load(green)
        assert refused is not None and "unload it first" in refused.message
        assert it.load(read("two", paths["blue"], model_path)) is None
        full = it.load(read("three", paths["blue"], model_path))
        assert full is not None and full.code == "overloaded"
        before = it.ask([request("a", PROMPTS[0], "one")])[0][0]
        done: queue.Queue[HeadraceError | None] = queue.Queue()
        it.engine.unload_adapter("one", done.put)
        assert done.get(timeout=10) is None
        it.engine.unload_adapter("one", done.put)
        missing = done.get(timeout=10)
        assert missing is not None and missing.code == "model_not_found"
        _, failed = it.ask([request("b", PROMPTS[0], "one")])[0]
        assert isinstance(failed, Failed) and failed.error.code == "model_not_found"
        assert it.load(green) is None
        after = it.ask([request("c", PROMPTS[0], "one")])[0][0]
        assert after != before and greedy(merged_model(model_path, paths["green"]), PROMPTS[0], after) == []
        _, stale = it.ask([request("d", PROMPTS[0], "one", adapter_revision=red.revision)])[0]
        assert isinstance(stale, Failed) and stale.error.code == "model_not_found"
        assert [adapter.name for adapter in it.engine.status.adapters] == ["two", "one"]


def test_unload_waits_for_running_sequences_and_refuses_new_ones(model_path: Path, paths: dict[str, Path]) -> None:
    with bench(model_path, paths, max_context_tokens=4096, blocks=128) as it:
        alone = it.ask([request("alone", PROMPTS[1], "red", max_tokens=300)])[0][0]
        it.engine.submit(Submission(request("long", PROMPTS[1], "red", max_tokens=300)))
        order: queue.Queue[str] = queue.Queue()
        it.engine.unload_adapter("red", lambda error: order.put(f"unloaded {error}"))
        _, late = it.ask([request("late", PROMPTS[1], "red")])[0]
        assert isinstance(late, Failed) and order.empty()
        tokens, _ = it.last(("long", 0))
        assert tokens == alone
        assert order.get(timeout=10) == "unloaded None"


@pytest.mark.parametrize("kind", ["mean", "last"])
def test_embeddings_equal_transformers_in_any_company(model_path: Path, paths: dict[str, Path], kind: str) -> None:
    """Chunked, batched with answers, and where the prefix is in the pool already."""
    names = ["", "green"]
    models = {name: merged_model(model_path, paths.get(name)) for name in names}
    asked = [request(f"{name}-{index}", prompt, name, pooling=kind) for index, prompt in enumerate(PROMPTS) for name in names]
    answers = [request(f"answer-{index}", prompt, "green", max_tokens=70) for index, prompt in enumerate(PROMPTS[:3])]
    vectors: dict[str, torch.Tensor] = {}
    reused = 0
    for settings in ({}, {"chunk_tokens": 16, "max_num_batched_tokens": 24, "max_num_seqs": 24}, {"blocks": 14}):
        with bench(model_path, paths, **settings) as it:  # type: ignore[arg-type]
            for again in range(2):
                last = it.ask([one.resumed(again + 1, ()) for one in [*answers, *asked]])
                reused += sum(chunk.sequence.tally.reused_device_tokens for _, chunk in last[len(answers) :])
                for one, (tokens, chunk) in zip(asked, last[len(answers) :], strict=True):
                    assert isinstance(chunk, Chunk) and not tokens and chunk.finish_reason == "stop"
                    vector = torch.tensor(chunk.embedding)
                    torch.testing.assert_close(vectors.setdefault(one.request_id, vector), vector, rtol=2e-7, atol=1e-9)
    assert (reused == 0) == (kind == "mean")
    for one in asked:
        with torch.no_grad():
            hidden = models[one.adapter](torch.tensor([one.prompt_tokens]), output_hidden_states=True).hidden_states[-1][0]
        pooled = torch.nn.functional.normalize(hidden.mean(dim=0) if kind == "mean" else hidden[-1], dim=0)
        torch.testing.assert_close(vectors[one.request_id], pooled, rtol=1e-3, atol=1e-5)
        assert abs(vectors[one.request_id].norm().item() - 1) < 1e-6


@pytest.mark.parametrize("kind", ["mean", "last"])
def test_a_preempted_embedding_starts_its_sums_again(model_path: Path, kind: str) -> None:
    prompt = [(5 * index) % 250 for index in range(200)]
    with bench(model_path, {}) as it:
        _, alone = it.ask([request("alone", prompt, pooling=kind)])[0]
    with bench(model_path, {}, blocks=10, chunk_tokens=1) as it:
        it.engine.submit(Submission(request("answer", PROMPTS[2], max_tokens=120)))
        _, preempted = it.ask([request("embedding", prompt, pooling=kind)])[0]
    assert isinstance(alone, Chunk) and isinstance(preempted, Chunk)
    assert preempted.sequence.tally.preemptions > 0
    torch.testing.assert_close(torch.tensor(alone.embedding), torch.tensor(preempted.embedding), rtol=2e-7, atol=1e-9)
