"""Request bodies: what is taken, what is refused and which field is named."""

import json
from typing import Any

import pytest
from fakes.tokenizer import ByteTokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import ContextTooLong, InvalidRequest
from protocol.request import GenerationRequest
from router.fields import NEUTRAL, Endpoint
from router.openai import Inquiry, parse, timeout_of

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "m", "prompt": "hi"}


def body(endpoint: Endpoint, **fields: Any) -> bytes:
    return json.dumps((CHAT if endpoint == "chat" else TEXT) | fields).encode()


def built(inquiry: Inquiry, context: int = 100) -> GenerationRequest:
    return inquiry.generation("r", inquiry.tokenize(ByteTokenizer()), 0.0, context, ByteTokenizer())


BOTH: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model"),
    ({"model": 3}, "model"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 2**40}, "max_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 2**31}, "top_k"),
    ({"seed": 2**64}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": "a" * 257}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop": {"a": 1}}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [1] * 129}, "stop_token_ids"),
    ({"stop_token_ids": 3}, "stop_token_ids"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    ({"priority": 2**31}, "priority"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": True}, "n"),
    ({"best_of": 3}, "best_of"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1"),
    ({"logit_bias": {"257": 1}}, "logit_bias.257"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"1": "x"}}, "logit_bias[...]"),
    ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"min_p": 1.1}, "min_p"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"bad_words": [" "]}, "bad_words[0]"),
    ({"bad_words": "x"}, "bad_words"),
    ({"bad_words": ["a"] * 129}, "bad_words"),
    ({"bad_words": ["a" * 257]}, "bad_words[0]"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"store": True}, "store"),
    ({"temprature": 0.1}, "temprature"),
]
ONLY_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"logprobs": 3}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"echo": True}, "echo"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "oracle", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "user", "content": "x", "colour": 1}]}, "messages[0].colour"),
    ({"prompt": "hi"}, "prompt"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_tokens"),
]
ONLY_TEXT: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", "b"]}, "prompt"),
    ({"prompt": [[1], [2]]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [1.5]}, "prompt[0]"),
    ({"prompt": 3}, "prompt"),
    ({"prompt": [1, -1]}, "prompt[1]"),
    ({"prompt": [1, 257]}, "prompt[1]"),
    ({"prompt": [2**70]}, "prompt[0]"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"top_logprobs": 1}, "top_logprobs"),
    ({"echo": "yes"}, "echo"),
    ({"suffix": "x"}, "suffix"),
    ({"messages": []}, "messages"),
    ({"stop_token_ids": [257]}, "stop_token_ids[0]"),
]
CASES = [("chat", *case) for case in BOTH + ONLY_CHAT] + [("completion", *case) for case in BOTH + ONLY_TEXT]


@pytest.mark.parametrize("endpoint,fields,field", CASES, ids=lambda value: json.dumps(value)[:50])
def test_bad_bodies_name_their_field(endpoint: Endpoint, fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        built(parse(body(endpoint, **fields), endpoint))
    assert caught.value.field == field
    assert caught.value.status == 400
    assert field in caught.value.message


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"null",
        b'{"model": "m", "prompt": "\xff"}',
        b'{"prompt": "\\ud800 x"}',
        b'{"temperature": NaN}',
        b'{"temperature": 1e999}',
        b"[" * 100_000,
    ],
    ids=range(10),
)
def test_what_is_no_json_object(raw: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse(raw, "completion")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(st.characters(codec="utf-8")),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "type", "text"]), inner, max_size=3),
        max_leaves=6,
    ),
    st.sampled_from(["messages", "prompt", "stop", "seed", "max_tokens", "stream_options", "n", "tools", "logit_bias", "bad_words", "logprobs"]),
    st.sampled_from(["chat", "completion"]),
)
@settings(max_examples=300, deadline=None)
def test_any_value_is_taken_or_refused_cleanly(value: Any, field: str, endpoint: Endpoint) -> None:
    try:
        built(parse(body(endpoint, **{field: value}), endpoint))
    except InvalidRequest as error:
        assert error.message


@pytest.mark.parametrize("endpoint", ["chat", "completion"])
def test_neutral_values_and_nulls_ask_for_nothing(endpoint: Endpoint) -> None:
    fields: dict[str, Any] = {name: values[0] if values else None for name, values in NEUTRAL.items()}
    fields |= {"user": "u", "metadata": {"a": "b"}, "service_tier": "auto", "parallel_tool_calls": True, "temperature": None, "stop": None, "stream": None}
    assert built(parse(body(endpoint, **fields), endpoint)).prompt_tokens == built(parse(body(endpoint), endpoint)).prompt_tokens


def test_nearest_name_is_told() -> None:
    with pytest.raises(InvalidRequest, match="did you mean temperature"):
        parse(body("chat", temprature=1), "chat")


def test_sampling_fields_arrive() -> None:
    fields = {"temperature": 0, "top_p": 0.5, "top_k": -1, "seed": -1, "stop": "END", "stop_token_ids": [7], "ignore_eos": True, "priority": 3}
    request = built(parse(body("completion", include_stop_str_in_output=True, max_tokens=5, **fields), "completion"))
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed, sampling.max_tokens) == (0, 0.5, 0, 2**64 - 1, 5)
    assert (sampling.stop, sampling.stop_token_ids, sampling.ignore_eos, sampling.include_stop) == (("END",), (7,), True, True)
    assert request.priority == 3


def test_penalties_bans_and_logprobs_arrive() -> None:
    fields = {"presence_penalty": 0.5, "frequency_penalty": -1, "repetition_penalty": 1.2, "min_p": 0.1, "min_tokens": 2, "prompt_logprobs": 1}
    request = built(parse(body("completion", logit_bias={"7": -100, "8": 1.5}, bad_words=["ab", " c"], logprobs=4, echo=True, **fields), "completion"))
    s = request.sampling
    assert (s.presence_penalty, s.frequency_penalty, s.repetition_penalty, s.min_p, s.min_tokens) == (0.5, -1, 1.2, 0.1, 2)
    assert (s.logit_bias, s.bad_words, s.logprobs, s.prompt_logprobs) == ({7: -100, 8: 1.5}, ((97, 98), (99,)), 4, 4)
    chat = built(parse(body("chat", logprobs=True), "chat")).sampling
    assert (chat.logprobs, chat.prompt_logprobs) == (0, None)
    assert built(parse(body("chat", logprobs=True, top_logprobs=20), "chat")).sampling.logprobs == 20


def test_no_tokens_only_with_echo() -> None:
    inquiry = parse(body("completion", max_tokens=0, echo=True), "completion")
    assert built(inquiry).sampling.max_tokens == 1 and not inquiry.shows_answer


def test_a_seed_is_drawn_where_none_is_given() -> None:
    seeds = {built(parse(body("chat"), "chat")).sampling.seed for _ in range(8)}
    assert len(seeds) == 8


@pytest.mark.parametrize("prompt", ["ab", ["ab"], [256, 97, 98], [[256, 97, 98]]])
def test_prompts_of_every_form(prompt: Any) -> None:
    assert built(parse(body("completion", prompt=prompt), "completion")).prompt_tokens == (256, 97, 98)


def test_text_parts_are_lines() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    whole = parse(body("chat", messages=[{"role": "developer", "content": "a\nb", "name": "x", "tool_calls": None}]), "chat")
    assert parse(body("chat", messages=[{"role": "system", "content": parts}]), "chat").tokenize(ByteTokenizer()) == whole.tokenize(ByteTokenizer())


def test_default_lengths() -> None:
    chat, text = built(parse(body("chat"), "chat")), built(parse(body("completion"), "completion"))
    assert chat.sampling.max_tokens == 100 - len(chat.prompt_tokens)
    assert text.sampling.max_tokens == 16
    assert built(parse(body("completion", prompt="a" * 90), "completion")).sampling.max_tokens == 9


@pytest.mark.parametrize("fields", [{"prompt": "a" * 90, "max_tokens": 10}, {"prompt": "a" * 99}, {"prompt": "a" * 5000}])
def test_what_does_not_fit_the_context(fields: dict[str, Any]) -> None:
    with pytest.raises(ContextTooLong) as caught:
        built(parse(body("completion", **fields), "completion"))
    assert caught.value.field == "prompt"


@pytest.mark.parametrize("text", ["", "x", "0", "-1", "nan", "inf", "61"])
def test_bad_timeouts(text: str) -> None:
    with pytest.raises(InvalidRequest, match="x-request-timeout-s"):
        timeout_of(text, "x-request-timeout-s", 5.0, 60.0)


def test_good_timeouts() -> None:
    assert timeout_of(None, "h", 5.0, 60.0) == 5.0
    assert timeout_of("1.5", "h", 5.0, 60.0) == 1.5
