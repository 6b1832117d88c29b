"""Grammars of strangers: compiled within bounds, refused in words, and followed to the letter by a model that knows nothing."""

import json
import queue
import time
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from fakes.model import write_tiny_model

from bench.schemas import SCHEMAS
from engine.config import EngineConfig
from engine.engine import Engine
from engine.events import Chunk, Event, Failed
from engine.grammars import Grammars
from engine.guide import Guide, Span, json_tokens, mask_of
from engine.model_config import ModelConfig
from engine.runner import open_runner
from engine.sequence import Submission
from engine.token_rules import apply_masks
from engine.tokenizer import Tokenizer
from protocol.errors import InvalidRequest, Unavailable
from protocol.request import GenerationRequest, Grammar, Sampling

BLOCKS, EOS = 600, 257


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Iterator[Grammars]:
    it = Grammars(tokenizer, cache_bytes=100_000)
    yield it
    it.close()


def chain(length: int, rule: str) -> str:
    return "\n".join([f"root ::= r{length}", 'r0 ::= "a"', *(f"r{index} ::= {rule.format(index - 1)}" for index in range(1, length + 1))])


def nested_lists(depth: int) -> str:
    return '{"type": "array", "items": ' * depth + "{}" + "}" * depth


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("regex", "(a", "parenthesis is not closed"),
        ("regex", "(?=a)b", "Lookahead is not supported"),
        ("regex", "(a?){40}" * 20 + "a" * 40, "too"),
        ("regex", "a{1000000000}", "too complex"),
        ("ebnf", "root ::= x", '"x" is not defined'),
        ("ebnf", 'start ::= "a"', '"root" is not found'),
        ("ebnf", 'root ::= "a" root', "could ever end"),
        ("ebnf", chain(29, "r{0} r{0}"), "too"),
        ("ebnf", "root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "Nest layer"),
        ("json_schema", '{"$ref": "#"}', "Circular"),
        ("json_schema", '{"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}', "could ever end"),
        ("json_schema", nested_lists(20_000), "JSON"),
        ("json_schema", json.dumps({"enum": [f"value {number}" for number in range(200_000)]}), "too"),
        ("nonsense", "", "unknown"),
    ],
)
def test_what_is_wrong_or_costs_too_much_is_refused(grammars: Grammars, kind: str, text: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        grammars.compile(Grammar(kind, text))


def test_the_cache_is_bounded_and_used(grammars: Grammars) -> None:
    first = grammars.compile(Grammar("regex", "x{1,5}"))
    assert grammars.compile(Grammar("regex", "x{1,5}", "another field")) is first
    for number in range(30):
        grammars.compile(Grammar("regex", f"[a-f]{{{number},95}}[0-9]+x?y?"))
        assert 0 < grammars.cached_bytes <= 100_000
    assert grammars.compile(Grammar("regex", "x{1,5}")) is not first


def test_a_compiler_that_dies_is_replaced(tokenizer: Tokenizer) -> None:
    it = Grammars(tokenizer, cache_bytes=0)
    it.compile(Grammar("regex", "a"))
    process = it._process._process
    assert process is not None
    process.kill()
    process.wait()
    it.compile(Grammar("regex", "b"))
    it.close()
    with pytest.raises(Unavailable):
        it.compile(Grammar("regex", "c"))


def test_masks() -> None:
    logits = torch.zeros(3, 70)
    apply_masks(logits, [mask_of([0, 31, 33], 64), None, mask_of([], 64)])
    assert torch.isfinite(logits).nonzero().tolist() == [[0, 0], [0, 31], [0, 33], *([1, token] for token in range(70))]


# ---- guides ------------------------------------------------------------------------------------------------------------------------

OPEN, CLOSE = 262, 263  # special tokens of the tiny model that stand for <think> and </think>


def guide_of(grammars: Grammars, tokenizer: Tokenizer, grammar: Grammar, prompt: tuple[int, ...] = (1,), output: tuple[int, ...] = ()) -> Guide:
    from xgrammar import GrammarMatcher

    request = GenerationRequest("r", prompt, Sampling(max_tokens=9, grammar=grammar), 0.0, output_tokens=output)
    guide = Guide(request, (OPEN, CLOSE), lambda error: None)
    guide.begin(GrammarMatcher(grammars.compile(grammar)), json_tokens(tokenizer))
    guide.follow(output, len(output), tokenizer)
    return guide


def allowed(guide: Guide) -> list[int] | None:
    guidance = guide.guidance
    assert guidance is not None
    if guidance.mask is None:
        return None
    return np.flatnonzero(np.unpackbits(guidance.mask.numpy().view(np.uint8), bitorder="little")).tolist()


def test_thoughts_are_free(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """Before the answer the model may begin to think; what it thinks is free; after that the grammar holds."""
    grammar, ab = Grammar("choice", '["ab", "cd"]'), [tokenizer.encode(letter)[0] for letter in "ac"]
    assert allowed(guide_of(grammars, tokenizer, grammar)) == sorted([*ab, OPEN])
    assert allowed(guide_of(grammars, tokenizer, grammar, output=(OPEN,))) is None
    assert allowed(guide_of(grammars, tokenizer, grammar, output=(OPEN, 5, 6, 7))) is None
    assert allowed(guide_of(grammars, tokenizer, grammar, output=(OPEN, 5, 6, CLOSE))) == sorted(ab)
    assert allowed(guide_of(grammars, tokenizer, grammar, prompt=(1, OPEN))) is None
    assert allowed(guide_of(grammars, tokenizer, grammar, prompt=(1, OPEN), output=(5, CLOSE))) == sorted(ab)
    assert allowed(guide_of(grammars, tokenizer, grammar, prompt=(OPEN, 3, CLOSE, 1))) == sorted(ab)
    begun = guide_of(grammars, tokenizer, grammar, output=(ab[0],))
    assert begun._span is Span.ANSWER and allowed(begun) == tokenizer.encode("b")


def test_the_end_comes_where_the_grammar_ends(grammars: Grammars, tokenizer: Tokenizer) -> None:
    grammar = Grammar("regex", "ab?")
    a, b = tokenizer.encode("ab")
    assert allowed(guide_of(grammars, tokenizer, grammar, output=(a,))) == [b, EOS]
    assert allowed(guide_of(grammars, tokenizer, grammar, output=(a, b))) == [EOS]
    assert allowed(guide_of(grammars, tokenizer, grammar, output=(a, EOS, EOS))) == [EOS]
    with pytest.raises(InvalidRequest, match="does not match"):
        guide_of(grammars, tokenizer, grammar, output=(b,))


def test_forced_tokens_are_those_that_must_come(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """The same from every state that leads to them, so a resume within them goes on with them."""
    grammar = Grammar("regex", "x=éa(b|c)")
    all_of_it = tuple(tokenizer.encode("x=éa"))
    for cut in range(len(all_of_it) + 1):
        begun = guide_of(grammars, tokenizer, grammar, (OPEN, CLOSE), all_of_it[:cut])
        forced = begun.guidance.forced if begun.guidance is not None else None
        assert forced == (all_of_it[cut:3] if cut <= 3 else all_of_it[cut:]), cut  # within a character nothing is forced


# ---- in the engine -----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(tokenizer: Tokenizer) -> Iterator[tuple[Engine, "queue.Queue[Event]"]]:
    config = EngineConfig(dtype="float32", check_integrity=True, max_num_seqs=64)
    model = ModelConfig.load(tokenizer.folder)
    pool = np.zeros(BLOCKS * model.layout(config.block_tokens, config.dtype).block_bytes, np.uint8)
    events: queue.Queue[Event] = queue.Queue()
    it = Engine(config, BLOCKS, open_runner(config, tokenizer.folder, model, pool), tokenizer, "salt", lambda some: [events.put(one) for one in some] and None)
    it.start()
    yield it, events
    it.close()
    assert it.status.counters.get("integrity_violations", 0) == 0


def run(engine: tuple[Engine, "queue.Queue[Event]"], requests: list[GenerationRequest]) -> dict[str, tuple[str, str]]:
    """Text, and finish reason or error message."""
    for request in requests:
        engine[0].submit(Submission(request))
    texts, ends = {request.request_id: "" for request in requests}, {}
    while len(ends) < len(requests):
        event = engine[1].get(timeout=60)
        name = event.key[0]
        if isinstance(event, Chunk):
            texts[name] += event.text
            if event.finish_reason:
                ends[name] = event.finish_reason
        elif isinstance(event, Failed):
            ends[name] = f"{event.error.field}: {event.error.message}"
    return {name: (texts[name], ends[name]) for name in texts}


def asked(name: str, grammar: Grammar, **sampling: float) -> GenerationRequest:
    wishes = {"max_tokens": 1500, "temperature": 1.0, "seed": 3} | sampling
    return GenerationRequest(name, tuple(range(40)), Sampling(grammar=grammar, **wishes), time.time() + 100)  # type: ignore[arg-type]


def test_answers_of_a_random_model_are_valid(engine: tuple[Engine, "queue.Queue[Event]"]) -> None:
    schemas = {name: schema for name, (_, schema) in SCHEMAS.items()}
    answers = run(engine, [asked(name, Grammar("json_schema", json.dumps(schema))) for name, schema in schemas.items()])
    for name, (text, reason) in answers.items():
        assert reason == "stop", (name, reason, text[:200])
        jsonschema.validate(json.loads(text), schemas[name])
    counters = engine[0].status.counters
    assert counters["forced_tokens"] > 500 and counters["grammar_masks"] > 500


def test_a_bad_grammar_ends_its_own_request_alone(engine: tuple[Engine, "queue.Queue[Event]"]) -> None:
    good, slow = Grammar("regex", "[ab]{30}", "guided_regex"), Grammar("ebnf", chain(29, "r{0} r{0}"), "guided_grammar")
    answers = run(engine, [asked("bad", Grammar("regex", "(", "guided_regex")), asked("slow", slow), asked("good", good), asked("short", good, max_tokens=3)])
    assert answers["bad"][1].startswith("guided_regex: regex: ")
    assert answers["slow"][1].startswith("guided_grammar: ebnf: too complex")
    assert (len(answers["good"][0]), answers["good"][1]) == (30, "stop")
    assert (len(answers["short"][0]), answers["short"][1]) == (3, "length")


def test_a_begun_answer_that_breaks_its_grammar_is_refused(engine: tuple[Engine, "queue.Queue[Event]"]) -> None:
    request = GenerationRequest("r", (1, 2), Sampling(max_tokens=9, grammar=Grammar("regex", "ab+", "f")), time.time() + 60, output_tokens=(66, 66))
    assert run(engine, [request])["r"][1].startswith("f: regex: the answer so far does not match")


def test_a_slow_guide_delays_its_own_answer_and_changes_nothing(engine: tuple[Engine, "queue.Queue[Event]"], monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence whose mask is late is computed once more at most and then sits out; one without a grammar goes on beside it."""
    requests = [
        asked("regex", Grammar("regex", "[0-9]{4}: (yes|no), forced to the end"), seed=5),
        asked("json", Grammar("json_schema", json.dumps(SCHEMAS["union"][1]))),
    ]
    expected = run(engine, requests)
    follow, counters = Guide.follow, engine[0].status.counters

    def slowly(guide: Guide, *arguments: Any) -> Any:
        time.sleep(0.03)
        return follow(guide, *arguments)

    monkeypatch.setattr(Guide, "follow", slowly)
    free = GenerationRequest("free", (1, 2, 3), Sampling(max_tokens=200, temperature=0.0, ignore_eos=True), time.time() + 60)
    answers = run(engine, [*requests, free])
    assert {name: answers[name] for name in expected} == expected
    assert answers["free"][1] == "length"
    grown = {name: engine[0].status.counters.get(name, 0) - counters.get(name, 0) for name in ("grammar_waits", "grammar_masks", "steps")}
    assert 0 < grown["grammar_waits"] <= grown["grammar_masks"] + 2
    assert grown["steps"] <= 200 + 2 * grown["grammar_masks"] + 10
