"""The engine loop over a tiny model: any schedule, preemption, load or resume gives the tokens of the plain greedy loop."""

import queue
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes.model import write_tiny_model

from engine.batch import Batch
from engine.config import EngineConfig
from engine.engine import Engine
from engine.events import Chunk, Event, Exported, Failed, Load
from engine.model_config import ModelConfig
from engine.runner import RUNNERS, open_runner
from engine.sequence import Export, SequenceKey, Submission
from engine.tokenizer import Tokenizer
from kvstore.hashing import private_hash
from protocol.request import GenerationRequest, Sampling


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


class Bench:
    """An engine, its raw pool, and the events of each request."""

    def __init__(self, model_path: Path, blocks: int, config: EngineConfig) -> None:
        model = ModelConfig.load(model_path)
        self.layout = model.layout(config.block_tokens, config.dtype)
        self.pool = np.zeros(blocks * self.layout.block_bytes, np.uint8)
        self.events: queue.Queue[Event] = queue.Queue()
        self.on_event: Callable[[Event], None] = lambda event: None  # on the engine thread, before the next step
        runner = open_runner(config, model_path, model, self.pool)
        self.engine = Engine(config, blocks, runner, Tokenizer(model_path), "salt", self._deliver)
        self.engine.start()

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            self.on_event(event)
            self.events.put(event)

    def block(self, index: int) -> np.ndarray:
        return self.pool[index * self.layout.block_bytes : (index + 1) * self.layout.block_bytes]

    def collect(self, keys: set[SequenceKey]) -> dict[SequenceKey, tuple[list[int], str, str]]:
        """Tokens, text and finish reason of each request, all running to their end."""
        tokens: dict[SequenceKey, list[int]] = {key: [] for key in keys}
        text = dict.fromkeys(keys, "")
        reasons: dict[SequenceKey, str] = {}
        while len(reasons) < len(keys):
            event = self.events.get(timeout=20)
            key = event.key
            if isinstance(event, Chunk):
                tokens[key] += event.tokens
                text[key] += event.text
                if event.finish_reason:
                    reasons[key] = event.finish_reason
            elif isinstance(event, Failed):
                reasons[key] = event.error.code
            elif isinstance(event, Load):
                self.engine.loaded(key, 0)
            elif isinstance(event, Exported):
                self.engine.unpin([item.block for item in event.items])
        return {key: (tokens[key], text[key], reasons[key]) for key in keys}


@contextmanager
def bench(model_path: Path, *, blocks: int = 64, runner: str = "fake", **settings: object) -> Iterator[Bench]:
    config = EngineConfig(dtype="float32", runner=runner, check_integrity=True, **settings)  # type: ignore[arg-type]
    it = Bench(model_path, blocks, config)
    try:
        yield it
        time.sleep(0.02)
        assert it.engine.status.counters.get("integrity_violations", 0) == 0
    finally:
        it.engine.close()


def request(name: str, prompt: list[int], max_tokens: int = 20, **sampling: object) -> GenerationRequest:
    sampling = {"temperature": 0.0, "ignore_eos": True} | sampling
    return GenerationRequest(name, tuple(prompt), Sampling(max_tokens=max_tokens, **sampling), time.time() + 60)  # type: ignore[arg-type]


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    shared = [rng.randrange(250) for _ in range(70)]
    return [shared[: rng.randrange(70)] + [rng.randrange(250) for _ in range(rng.randrange(1, 90))] for _ in range(count)]


@pytest.mark.parametrize("runner", sorted(RUNNERS))
def test_alone_batched_chunked_and_preempted_give_the_same_tokens(model_path: Path, runner: str) -> None:
    asked = prompts(12)
    with bench(model_path, runner=runner, prefix_cache=False) as it:
        alone = []
        for index, prompt in enumerate(asked):
            it.engine.submit(Submission(request(str(index), prompt)))
            alone.append(it.collect({(str(index), 0)})[str(index), 0])
    keys = {(str(index), 0) for index in range(len(asked))}
    for settings in ({}, {"chunk_tokens": 16, "max_num_batched_tokens": 24}, {"blocks": 14}):
        with bench(model_path, runner=runner, **settings) as it:  # type: ignore[arg-type]
            for index, prompt in enumerate(asked):
                it.engine.submit(Submission(request(str(index), prompt)))
            together = it.collect(keys)
            assert [together[str(index), 0] for index in range(len(asked))] == alone
            status = it.engine.status
            assert status.blocks_free + status.blocks_cached == status.blocks_total


def test_prefix_reuse_computes_only_the_rest(model_path: Path) -> None:
    prompt = prompts(1, seed=3)[0][:5] * 20  # 100 tokens
    with bench(model_path) as it:
        it.engine.submit(Submission(request("a", prompt)))
        first = it.collect({("a", 0)})["a", 0]
        before = it.engine.status.counters["scheduled_tokens"]
        it.engine.submit(Submission(request("b", prompt)))
        assert it.collect({("b", 0)})["b", 0] == first
        assert it.engine.status.counters["scheduled_tokens"] - before == (100 - 96) + 19


@pytest.mark.parametrize("runner", sorted(RUNNERS))
@pytest.mark.parametrize("length", [1, 31, 32, 33, 64, 100])
def test_a_handoff_goes_on_with_the_same_tokens_and_computes_no_prompt(model_path: Path, runner: str, length: int) -> None:
    """Prefill in one engine, its exported blocks carried to another: the whole hand-off but the network."""
    prompt = [(7 * index) % 250 for index in range(length)]
    with bench(model_path, runner=runner) as whole:
        whole.engine.submit(Submission(request("r", prompt)))
        expected = whole.collect({("r", 0)})["r", 0]
    private = private_hash("r", 1, length) if length % 32 else None
    carried: dict[bytes, np.ndarray] = {}
    with bench(model_path, runner=runner) as prefill, bench(model_path, runner=runner) as decode:
        wanted = request("r", prompt).resumed(1, ())
        prefill.engine.submit(Submission(wanted, one_token=True, export=Export.ALL, private_block=private))
        first: list[int] = []
        while not first:
            event = prefill.events.get(timeout=20)
            if isinstance(event, Exported):
                carried |= {item.hash: prefill.block(item.block).copy() for item in event.items}
                prefill.engine.unpin([item.block for item in event.items])
            elif isinstance(event, Chunk):
                first = event.tokens
                assert event.finish_reason == "handoff"
        assert len(carried) == -(-length // 32)
        decode.engine.submit(Submission(wanted.resumed(2, tuple(first)), load=True, handoff_tokens=length, private_block=private))
        tokens = list(first)
        while len(tokens) < len(expected[0]):
            event = decode.events.get(timeout=20)
            if isinstance(event, Load):
                for item in event.items:
                    decode.block(item.block)[:] = carried[item.hash]
                decode.engine.loaded(event.key, len(event.items))
            elif isinstance(event, Chunk):
                tokens += event.tokens
                last = event.sequence
        assert tokens == expected[0]
        assert last.tally.computed_prompt_tokens == 0 and last.tally.recomputed_tokens == 0


def test_resuming_anywhere_gives_the_rest_of_the_same_answer(model_path: Path) -> None:
    with bench(model_path) as it:
        sampling = {"temperature": 0.9, "top_p": 0.95, "seed": 42}
        whole = request("r", list(range(40)), **sampling)
        it.engine.submit(Submission(whole))
        tokens, text, reason = it.collect({("r", 0)})["r", 0]
        assert reason == "length" and len(tokens) == 20
        for attempt, cut in enumerate(range(1, 20), start=1):
            it.engine.submit(Submission(whole.resumed(attempt, tuple(tokens[:cut]))))
            rest = it.collect({("r", attempt)})["r", attempt]
            assert rest[0] == tokens[cut:] and text.endswith(rest[1])


def test_abort_and_deadline_free_everything(model_path: Path) -> None:
    with bench(model_path, blocks=128) as it:
        it.engine.submit(Submission(request("gone", list(range(50)), max_tokens=3000)))
        it.engine.abort(("gone", 0))
        late = GenerationRequest("late", tuple(range(50)), Sampling(max_tokens=3000, ignore_eos=True), time.time() + 0.2)
        it.engine.submit(Submission(late))
        ends = it.collect({("gone", 0), ("late", 0)})
        assert ends["gone", 0][2] == "cancelled"
        assert ends["late", 0][2] in ("deadline_exceeded", "length")
        status = it.engine.status
        assert status.num_running == status.num_waiting == 0
        assert status.blocks_free + status.blocks_cached == status.blocks_total


def test_a_request_that_can_never_fit_is_refused(model_path: Path) -> None:
    with bench(model_path, blocks=4) as it:
        it.engine.submit(Submission(request("big", list(range(100)), max_tokens=100)))
        assert it.collect({("big", 0)})["big", 0][2] == "context_length_exceeded"


def test_stop_string_and_eos_end_the_answer(model_path: Path) -> None:
    with bench(model_path) as it:
        it.engine.submit(Submission(request("free", list(range(40)), max_tokens=40)))
        _, text, _ = it.collect({("free", 0)})["free", 0]
        stop = text[10:13]
        it.engine.submit(Submission(request("stopped", list(range(40)), max_tokens=40, stop=(stop,))))
        _, cut, reason = it.collect({("stopped", 0)})["stopped", 0]
        assert reason == "stop" and cut == text[: text.index(stop)]


@pytest.mark.parametrize("runner", sorted(RUNNERS))
def test_preemption_in_a_pool_of_40_blocks_changes_no_token(model_path: Path, runner: str) -> None:
    """Twelve answers of unknown length, 120 tokens each: up to 75 blocks."""
    asked = [request(str(index), prompt, max_tokens=120) for index, prompt in enumerate(prompts(12, seed=5))]
    outcomes = []
    for blocks in (128, 40):
        with bench(model_path, runner=runner, blocks=blocks) as it:
            for each in asked:
                it.engine.submit(Submission(each))
            outcomes.append(it.collect({each.key for each in asked}))
            preemptions = it.engine.status.counters["preemptions"]
            assert (preemptions > 0) == (blocks == 40)
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("runner", sorted(RUNNERS))
def test_a_preempted_sequence_finds_what_it_wrote_back(model_path: Path, runner: str) -> None:
    """An urgent request takes the pool; afterwards the preempted one loads the blocks of its prompt and of its answer from a store outside."""
    victim = GenerationRequest(
        "victim", tuple(prompts(1)[0][:20] * 3), Sampling(max_tokens=160, temperature=0.0, ignore_eos=True), time.time() + 60, priority=1
    )
    urgent = request("urgent", [index % 250 for index in range(290)], max_tokens=20)
    with bench(model_path, runner=runner) as it:
        it.engine.submit(Submission(victim))
        expected = it.collect({victim.key})[victim.key]
    stored: dict[bytes, np.ndarray] = {}
    tokens: list[int] = []
    with bench(model_path, runner=runner, blocks=10) as it:

        def interrupt(event: Event) -> None:
            if isinstance(event, Chunk) and event.sequence.num_output == 80 and event.key == victim.key:
                it.engine.submit(Submission(urgent))

        it.on_event = interrupt
        it.engine.submit(Submission(victim, load=True, export=Export.COMPUTED))
        while len(tokens) < 160:
            event = it.events.get(timeout=20)
            if isinstance(event, Exported):
                stored |= {item.hash: it.block(item.block).copy() for item in event.items}
                it.engine.unpin([item.block for item in event.items])
            elif isinstance(event, Load):
                present = [item for item in event.items if item.hash in stored]
                for item in present:
                    it.block(item.block)[:] = stored[item.hash]
                it.engine.loaded(event.key, len(present))
            elif isinstance(event, Chunk) and event.key == victim.key:
                tokens += event.tokens
                tally = event.sequence.tally
        assert tokens == expected[0]
        assert tally.preemptions == 1
        assert tally.reused_store_tokens >= 128, "two blocks of the prompt and at least two of the answer"
        assert tally.computed_tokens <= len(victim.prompt_tokens) + 160 + 31, "only the last partial block is computed again"


@pytest.mark.parametrize("runner", sorted(RUNNERS))
def test_several_decode_steps_of_a_round_give_the_same_tokens(model_path: Path, runner: str) -> None:
    asked = [request(str(index), prompt, max_tokens=10 + 7 * index) for index, prompt in enumerate(prompts(6))]
    outcomes, rounds = [], []
    for steps in (1, 8):
        with bench(model_path, runner=runner, num_continuous_decode_steps=steps, prefix_cache=False) as it:
            for each in asked:
                it.engine.submit(Submission(each))
            outcomes.append(it.collect({each.key for each in asked}))
            rounds.append(it.engine.status.counters["scheduling_rounds"] / it.engine.status.steps)
    assert outcomes[0] == outcomes[1]
    assert rounds[1] < 0.5 <= rounds[0], "a finish ends a round"


def test_without_mixed_chunks_the_tokens_are_the_same_and_the_counters_part_all_time(model_path: Path) -> None:
    asked = [request(str(index), prompt) for index, prompt in enumerate(prompts(8))]
    outcomes = []
    for mixed in (True, False):
        with bench(model_path, mixed_chunk=mixed, chunk_tokens=16, max_num_batched_tokens=32) as it:
            for each in asked:
                it.engine.submit(Submission(each))
            outcomes.append(it.collect({each.key for each in asked}))
            counters = it.engine.status.counters
            assert {"idle_s", "command_s", "schedule_s", "build_s", "run_s", "sample_s", "update_s"} <= set(counters)
    assert outcomes[0] == outcomes[1]


def test_a_stop_token_shows_no_text_unless_asked(model_path: Path) -> None:
    with bench(model_path) as it:
        it.engine.submit(Submission(request("free", list(range(40)))))
        tokens, _, _ = it.collect({("free", 0)})["free", 0]
        stop = next(token for token in tokens[5:] if token < 128 and token not in tokens[:5])
        for include in (False, True):
            name = f"stopped {include}"
            it.engine.submit(Submission(request(name, list(range(40)), stop_token_ids=(stop,), include_stop=include)))
            some, cut, reason = it.collect({(name, 0)})[name, 0]
            assert reason == "stop" and some == tokens[: tokens.index(stop) + 1]
            it.engine.submit(Submission(request("cut", list(range(40)), max_tokens=len(some) - 1 + include)))
            assert cut == it.collect({("cut", 0)})["cut", 0][1]


def test_prompt_logprobs_compute_every_position_past_the_cache_and_survive_preemption(model_path: Path) -> None:
    prompt = [(7 * index) % 250 for index in range(100)]
    with bench(model_path, runner="torch") as it:
        it.engine.submit(Submission(request("first", prompt)))
        it.collect({("first", 0)})
        before = it.engine.status.counters["scheduled_tokens"]
        it.engine.submit(Submission(request("scored", prompt, max_tokens=1, prompt_logprobs=1)))
        chunk = _first_chunk(it)
        assert it.engine.status.counters["scheduled_tokens"] - before == 100
    assert [one.token for one in chunk.prompt_logprobs] == prompt[1:]
    with bench(model_path, runner="torch", blocks=13, chunk_tokens=16, max_num_batched_tokens=40) as it:
        for index in range(6):
            it.engine.submit(Submission(request(str(index), prompt, max_tokens=100, prompt_logprobs=1)))
        scored = {}
        preemptions = 0
        while len(scored) < 6 or it.engine.status.num_running:
            event = it.events.get(timeout=20)
            assert not isinstance(event, Failed)
            if isinstance(event, Chunk) and event.prompt_logprobs:
                assert event.key not in scored
                scored[event.key] = event.prompt_logprobs
            preemptions = max(preemptions, event.sequence.tally.preemptions)
        assert preemptions > 0
        assert all(some == chunk.prompt_logprobs for some in scored.values())


def _first_chunk(it: Bench) -> Chunk:
    while not isinstance(event := it.events.get(timeout=20), Chunk):
        pass
    return event


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_ended_by_a_fault_says_so(model_path: Path) -> None:
    bench = Bench(model_path, 4, EngineConfig(dtype="float32"))
    assert bench.engine.is_alive
    bench.engine.unpin([0])  # nobody pinned it
    bench.engine._thread.join(20)
    assert not bench.engine.is_alive


def test_a_request_that_breaks_the_step_fails_alone(model_path: Path) -> None:
    """Whoever makes a step fail is found by running its sequences alone; the others go on as if nothing had been."""
    with bench(model_path) as it:
        for name in ("a", "b"):
            it.engine.submit(Submission(request(name, list(range(40)), max_tokens=12)))
        alone = it.collect({("a", 0), ("b", 0)})
        whole, run = it.engine._runner, it.engine._runner.run

        def fragile(batch: Batch) -> torch.Tensor:
            if 201 in batch.tokens.tolist():
                raise RuntimeError("a poisoned token")
            return run(batch)

        whole.run = fragile  # type: ignore[method-assign]
        for name, prompt in (("a", list(range(40))), ("poison", [201] * 40), ("b", list(range(40)))):
            it.engine.submit(Submission(request(name, prompt, max_tokens=12)))
        together = it.collect({("a", 0), ("poison", 0), ("b", 0)})
        assert together["poison", 0][2] == "internal_error"
        assert (together["a", 0], together["b", 0]) == (alone["a", 0], alone["b", 0])


def test_tokens_that_the_model_lacks_are_refused_and_harm_nobody(model_path: Path) -> None:
    with bench(model_path) as it:
        it.engine.submit(Submission(request("strange", [1, 2, 9999])))
        it.engine.submit(Submission(request("negative", [-1, 2, 3])))
        it.engine.submit(Submission(request("fine", [1, 2, 3])))
        ends = it.collect({("strange", 0), ("negative", 0), ("fine", 0)})
        assert ends["strange", 0][2] == "invalid_request"
        assert ends["negative", 0][2] == "invalid_request"
        assert ends["fine", 0][2] == "length"
        assert it.engine.is_alive
