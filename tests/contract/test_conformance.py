"""Every request feature, alone and in pairs: colocated == handed off == resumed from (request, tokens so far), in tokens, text, logprobs, finish reason and
usage. A feature joins FEATURES or is refused by the router.

Two real engines over the tiny model; blocks are carried between them by hand, requests go through their wire form. All cases run at once, so that companions
and chunking are part of the test.
"""

import itertools
import queue
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes.lora import write_adapter
from fakes.model import write_tiny_model

from engine.config import EngineConfig
from engine.engine import Engine
from engine.events import Chunk, Event, Exported, Failed, Load
from engine.lora import load_adapter
from engine.model_config import ModelConfig
from engine.runner import open_runner
from engine.sequence import Export, SequenceKey, Submission
from engine.token_rules import TokenRules
from engine.tokenizer import Tokenizer
from kvstore.hashing import private_hash
from protocol import headrace_pb2 as pb
from protocol.logprobs import TokenLogprob
from protocol.request import GenerationRequest, Grammar, Sampling

BLOCK_TOKENS, EOS = 32, 257
PROMPT = tuple((11 * index + index**2) % 250 for index in range(BLOCK_TOKENS + 9))
SCHEMA = '{"type": "object", "properties": {"é": {"enum": ["a", "b"]}, "z": {"type": "string", "maxLength": 6}}, "required": ["é", "z"]}'
BASE: dict[str, Any] = {"max_tokens": 16, "temperature": 0.0}


@dataclass
class Outcome:
    """An answer by token: what each brought."""

    tokens: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str = ""

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def usage(self) -> tuple[int, int]:
        return len(PROMPT), len(self.tokens)

    def rest(self, cut: int) -> "Outcome":
        """What is still to come once `cut` tokens are out."""
        return Outcome(self.tokens[cut:], self.texts[cut:], self.logprobs[cut:], [], self.finish_reason)

    def take(self, chunk: Chunk) -> None:
        self.tokens += chunk.tokens
        self.texts.append(chunk.text)
        self.logprobs += [TokenLogprob.from_message(one.to_message()) for one in chunk.logprobs]
        self.prompt_logprobs += [TokenLogprob.from_message(one.to_message()) for one in chunk.prompt_logprobs]


# What a feature asks for, given the answer without it. "sample" and "adapter" are fields of the request, the others are Sampling's.
Feature = Callable[[Outcome], dict[str, Any]]
FEATURES: dict[str, Feature] = {
    "temperature": lambda _: {"temperature": 1.8, "seed": 5},
    "top_p": lambda _: {"temperature": 1.0, "top_p": 0.7, "seed": 6},
    "top_k": lambda _: {"temperature": 1.2, "top_k": 5, "seed": 7},
    "min_p": lambda _: {"temperature": 1.1, "min_p": 0.2, "seed": 8},
    "sample": lambda _: {"temperature": 0.9, "seed": 9, "sample": 3},
    "presence_penalty": lambda _: {"presence_penalty": 1.5},
    "frequency_penalty": lambda _: {"frequency_penalty": 1.2},
    "repetition_penalty": lambda _: {"repetition_penalty": 1.8},
    "logit_bias": lambda it: {"logit_bias": {it.tokens[0]: -100.0, 65: 3.0, 66: 2.5}},
    "bad_words": lambda it: {"bad_words": ((it.tokens[-2],), tuple(it.tokens[1:3]), tuple(it.tokens[7:10]))},
    "min_tokens": lambda it: {"min_tokens": 9, "stop_token_ids": (it.tokens[3],)},
    "max_tokens": lambda _: {"max_tokens": 7},
    "one_token": lambda _: {"max_tokens": 1},
    "eos": lambda _: {"logit_bias": {EOS: 60.0}, "min_tokens": 5},
    "ignore_eos": lambda _: {"logit_bias": {EOS: 11.0}, "ignore_eos": True},
    "stop": lambda it: {"stop": (it.text[5:8] or "zz", "never there")},
    "include_stop": lambda it: {"stop": (it.text[6:8] or "zz",), "include_stop": True},
    "stop_token_ids": lambda it: {"stop_token_ids": (it.tokens[-5:][0],)},
    "logprobs": lambda _: {"logprobs": 3},
    "prompt_logprobs": lambda _: {"prompt_logprobs": 2},
    "adapter": lambda _: {"adapter": "red"},
    "json_schema": lambda _: {"grammar": Grammar("json_schema", SCHEMA)},
    "json_object": lambda _: {"grammar": Grammar("json_object", "")},
    "regex": lambda _: {"grammar": Grammar("regex", "[0-9]{3}-[a-z]{4,9} (yes|no)[.!]{2}")},
    "ebnf": lambda _: {"grammar": Grammar("ebnf", 'root ::= "[" item (", " item){3,9} "]"\nitem ::= [a-c]{2} | "(" item ")"')},
    "choice": lambda _: {"grammar": Grammar("choice", '["forward at once", "forward slowly", "back to where it was"]')},
}
GRAMMARS = ("json_schema", "json_object", "regex", "ebnf", "choice")


class Side:
    """An engine, its raw pool, and its events in a queue that both sides share."""

    def __init__(self, name: str, model_path: Path, events: "queue.Queue[tuple[str, Event]]", blocks: int) -> None:
        config = EngineConfig(dtype="float32", max_num_seqs=64, chunk_tokens=24, check_integrity=True)
        model = ModelConfig.load(model_path)
        layout = model.layout(BLOCK_TOKENS, "float32")
        self._block_bytes = layout.block_bytes
        self.pool = np.zeros(blocks * layout.block_bytes, np.uint8)
        runner = open_runner(config, model_path, model, self.pool)
        adapters = [load_adapter("red", model_path / "red", model, torch.float32, 64)]
        self.engine = Engine(
            config, blocks, runner, Tokenizer(model_path), "salt", lambda some: [events.put((name, event)) for event in some] and None, adapters
        )
        self.engine.start()

    def block(self, index: int) -> np.ndarray:
        return self.pool[index * self._block_bytes : (index + 1) * self._block_bytes]


class Pair:
    """A prefill and a decode engine, and the hand-off between them without a network."""

    def __init__(self, model_path: Path, blocks: int = 1200) -> None:
        self._events: queue.Queue[tuple[str, Event]] = queue.Queue()
        self.prefill, self.decode = (Side(name, model_path, self._events, blocks) for name in ("prefill", "decode"))
        self.preemptions = 0
        self._carried: dict[bytes, np.ndarray] = {}
        self._attempts = itertools.count(1)

    def close(self) -> None:
        for side in (self.prefill, self.decode):
            side.engine.close()
            assert side.engine.status.counters.get("integrity_violations", 0) == 0

    def run(self, requests: Sequence[GenerationRequest], handoff: bool = False) -> list[Outcome]:
        """All at once: in one engine, or begun in one and gone on with in the other."""
        requests = [replace(request, attempt=next(self._attempts)) for request in requests]
        outcomes = {request.request_id + f"#{request.attempt}": Outcome() for request in requests}
        assert len(outcomes) == len(requests)
        self._names = {request.key: request.request_id + f"#{request.attempt}" for request in requests}
        for request in requests:
            if handoff:
                submission = Submission(wired(request), one_token=True, export=Export.ALL, private_block=self._private(request.key))
                self.prefill.engine.submit(submission)
            else:
                self.decode.engine.submit(Submission(wired(request)))
        while not all(outcome.finish_reason for outcome in outcomes.values()):
            name, event = self._events.get(timeout=30)
            self._handle(self.prefill if name == "prefill" else self.decode, event, outcomes)
        return list(outcomes.values())

    def _private(self, key: SequenceKey) -> Any:
        return private_hash(*key, len(PROMPT)) if len(PROMPT) % BLOCK_TOKENS else None

    def _handle(self, side: Side, event: Event, outcomes: dict[str, Outcome]) -> None:
        key = event.key
        match event:
            case Exported():
                self._carried |= {item.hash: side.block(item.block).copy() for item in event.items}
                side.engine.unpin([item.block for item in event.items])
            case Load():
                for item in event.items:
                    side.block(item.block)[:] = self._carried[item.hash]
                side.engine.loaded(key, len(event.items))
            case Failed():
                raise AssertionError(f"{key}: {event.error.code}: {event.error.message}")
            case Chunk():
                outcome = outcomes[self._names[key]]
                outcome.take(event)
                if event.finish_reason == "handoff":
                    self._hand_over(event.sequence.request, outcome)
                else:
                    outcome.finish_reason = event.finish_reason
                    self.preemptions += event.sequence.tally.preemptions
                    assert event.sequence.tally.recomputed_tokens == 0

    def _hand_over(self, request: GenerationRequest, outcome: Outcome) -> None:
        following = request.resumed(next(self._attempts), tuple(outcome.tokens))
        self._names[following.key] = self._names[request.key]
        self.decode.engine.submit(Submission(wired(following), load=True, handoff_tokens=len(PROMPT), private_block=self._private(request.key)))


def wired(request: GenerationRequest) -> GenerationRequest:
    return GenerationRequest.from_message(pb.Request.FromString(request.to_message().SerializeToString()))


def asked(name: str, wishes: dict[str, Any]) -> GenerationRequest:
    wishes = BASE | wishes
    fields = {field: wishes.pop(field) for field in ("sample", "adapter") if field in wishes}
    return GenerationRequest(name, PROMPT, Sampling(**wishes), time.time() + 120, **fields)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_tiny_model(tmp_path_factory.mktemp("model"))
    write_adapter(path / "red", path, size=0.2)
    return path


@pytest.fixture(scope="module")
def pair(model_path: Path) -> Iterator[Pair]:
    it = Pair(model_path)
    yield it
    it.close()


@dataclass(frozen=True)
class Case:
    request: GenerationRequest
    wishes: dict[str, Any]
    outcome: Outcome


@pytest.fixture(scope="module")
def plain(pair: Pair) -> Outcome:
    return pair.run([asked("plain", {})])[0]


@pytest.fixture(scope="module")
def singles(pair: Pair, plain: Outcome) -> dict[str, Case]:
    return _cases(pair, {name: feature(plain) for name, feature in FEATURES.items()})


@pytest.fixture(scope="module")
def pairs(pair: Pair, singles: dict[str, Case]) -> dict[str, Case]:
    """The second feature is fitted to the answer that the first one gives."""
    wishes = {}
    for one, other in itertools.combinations(FEATURES, 2):
        first = singles[one]
        fitting = first.outcome if len(first.outcome.tokens) >= 10 else _padded(first.outcome)
        wishes[f"{one}+{other}"] = first.wishes | FEATURES[other](fitting)
    return _cases(pair, wishes)


def _padded(outcome: Outcome) -> Outcome:
    return Outcome((outcome.tokens * 10)[:10], outcome.texts * 10)


def _cases(pair: Pair, wishes: dict[str, dict[str, Any]]) -> dict[str, Case]:
    requests = [asked(name, some) for name, some in wishes.items()]
    return {r.request_id: Case(r, wishes[r.request_id], outcome) for r, outcome in zip(requests, pair.run(requests), strict=True)}


Resume = Callable[[GenerationRequest, list[int]], GenerationRequest]


def handed_off(pair: Pair, cases: dict[str, Case]) -> list[str]:
    """The cases that a hand-off changes."""
    outcomes = pair.run([case.request for case in cases.values()], handoff=True)
    return [name for (name, case), outcome in zip(cases.items(), outcomes, strict=True) if outcome != case.outcome]


def resumed(pair: Pair, cases: dict[str, Case], cuts: Callable[[int], Sequence[int]], resume: Resume) -> set[str]:
    """The cases that going on from some cut changes."""
    begun = [(name, cut) for name, case in cases.items() for cut in cuts(len(case.outcome.tokens))]
    outcomes = pair.run([resume(cases[name].request, cases[name].outcome.tokens[:cut]) for name, cut in begun])
    return {name for (name, cut), outcome in zip(begun, outcomes, strict=True) if outcome != cases[name].outcome.rest(cut)}


def from_tokens(request: GenerationRequest, tokens: list[int]) -> GenerationRequest:
    return replace(request, output_tokens=tuple(tokens))


def test_features_do_something(plain: Outcome, singles: dict[str, Case]) -> None:
    """Each changes the answer, so that losing it would show."""
    assert [name for name, case in singles.items() if case.outcome == plain] == []
    reasons = {name: case.outcome.finish_reason for name, case in singles.items()}
    assert {name for name, reason in reasons.items() if reason == "stop" and name not in GRAMMARS} == {"eos", "stop", "include_stop", "stop_token_ids"} | (
        {"min_tokens"} if reasons["min_tokens"] == "stop" else set()
    )


def test_alone(pair: Pair, singles: dict[str, Case]) -> None:
    assert handed_off(pair, singles) == []
    assert resumed(pair, singles, lambda count: range(1, count), from_tokens) == set()


def test_in_pairs(pair: Pair, pairs: dict[str, Case]) -> None:
    assert len(pairs) == len(FEATURES) * (len(FEATURES) - 1) // 2
    assert handed_off(pair, pairs) == []
    assert resumed(pair, pairs, lambda count: sorted({1, count // 2, count - 1} & set(range(1, count))), from_tokens) == set()


def test_preempted(pair: Pair, model_path: Path, singles: dict[str, Case]) -> None:
    """In a pool that is too small for them all, so that some start again from their tokens."""
    requests = [asked(name, {"max_tokens": 90} | case.wishes) for name, case in singles.items()]
    cramped = Pair(model_path, blocks=14)
    outcomes = cramped.run(requests)
    cramped.close()
    assert cramped.preemptions > 0
    assert outcomes == pair.run(requests)


def as_another_sample(request: GenerationRequest, tokens: list[int]) -> GenerationRequest:
    return replace(from_tokens(request, tokens), sample=0)


def as_prompt(request: GenerationRequest, tokens: list[int]) -> GenerationRequest:
    """The answer so far becomes prompt, and whatever the request had counted is lost."""
    return replace(request, prompt_tokens=request.prompt_tokens + tuple(tokens))


BROKEN = {
    as_prompt: {
        "presence_penalty",
        "frequency_penalty",
        "min_tokens",
        "max_tokens",
        "eos",
        "stop",
        "include_stop",
        "bad_words",
        "prompt_logprobs",
        "json_schema",
        "choice",
    },
    as_another_sample: {"sample"},
}


@pytest.mark.parametrize("resume", BROKEN)
def test_a_resume_that_loses_state_is_seen(pair: Pair, singles: dict[str, Case], resume: Resume) -> None:
    assert resumed(pair, singles, lambda count: range(1, count), resume) >= BROKEN[resume]


def test_rules_that_are_not_replayed_are_seen(pair: Pair, singles: dict[str, Case], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.sequence.TokenRules", lambda request, eos: TokenRules(replace(request, output_tokens=()), eos))
    penalties = {"presence_penalty", "frequency_penalty", "repetition_penalty"}
    assert resumed(pair, singles, lambda count: range(1, count), from_tokens) == penalties | {"bad_words", "eos"}
    assert set(handed_off(pair, singles)) == {"repetition_penalty", "eos"}  # one lost token shows less than many


def test_grammars_hold_and_forced_tokens_are_not_sampled(pair: Pair, singles: dict[str, Case]) -> None:
    assert singles["choice"].outcome.text in ("forward at once", "forward slowly", "back to where it was"[:16])
    assert re.fullmatch("[0-9]{3}-[a-z]{4,9} (yes|no)?[.!]{0,2}", singles["regex"].outcome.text)
    assert re.fullmatch(r'\{"é": "[ab]", "z?"?:?', singles["json_schema"].outcome.text)
    steps, forced = [[side.engine.status.counters.get(name, 0) for side in (pair.prefill, pair.decode)] for name in ("steps", "forced_tokens")]
    with_logprobs = [name for name in GRAMMARS if pair.run([asked(name, singles[name].wishes | {"logprobs": 0})])[0].tokens != singles[name].outcome.tokens]
    assert with_logprobs == []
    assert min(steps) > 0 and min(forced) > 0


def test_usage_counts_the_answer_once(pair: Pair, singles: dict[str, Case]) -> None:
    case = singles["max_tokens"]
    assert [outcome.usage for outcome in pair.run([case.request], handoff=True)] == [(len(PROMPT), 7)]
    assert pair.run([singles["one_token"].request], handoff=True)[0].usage == (len(PROMPT), 1)


def test_prompt_logprobs_are_those_of_an_answer_with_the_same_tokens(pair: Pair, singles: dict[str, Case]) -> None:
    """Computed in other chunks, at other times, in other company, past a prefix cache that has everything."""
    answer = singles["logprobs"].outcome
    request = asked("again", {"prompt_logprobs": 3, "max_tokens": 1})
    request = replace(request, prompt_tokens=PROMPT + tuple(answer.tokens))
    again = pair.run([request])[0].prompt_logprobs
    assert [one.token for one in again] == [*PROMPT[1:], *answer.tokens]
    assert again[len(PROMPT) - 1 :] == answer.logprobs


def test_what_an_engine_cannot_do_is_refused(pair: Pair) -> None:
    with pytest.raises(AssertionError, match="is not loaded here"):
        pair.run([replace(asked("adapter", {}), adapter="lora")])
    with pytest.raises(AssertionError, match="no token that may come next"):
        pair.run([asked("hopeless", {"bad_words": tuple((token,) for token in range(264))})])
    assert pair.run([asked("after", {})])[0].finish_reason == "length"
