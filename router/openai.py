"""OpenAI request bodies: what we take, what we refuse and with which words. Owns the meaning of every field; knows nothing of workers or HTTP.

Invariant: a field is either used, harmless, or refused by name. Nothing that would change the answer is dropped in silence.
"""

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import msgspec

from protocol.errors import ContextTooLong, InvalidRequest
from protocol.request import GenerationRequest, Sampling
from router.fields import (
    ENDPOINT_FIELDS,
    HARMLESS,
    MESSAGE_NEUTRAL,
    NEUTRAL,
    ROLES,
    STREAM_NEUTRAL,
    ChatFields,
    CompletionFields,
    Endpoint,
    Message,
    SharedFields,
)
from router.sampling import INT32, MAX_LOGPROBS, bad_word_tokens, check, sampling_of, token_ids

COMPLETION_MAX_TOKENS = 16  # OpenAI's default of /v1/completions

T = TypeVar("T")


class PromptTokenizer(Protocol):
    """What the router asks of a tokenizer. `encode_chat` raises InvalidRequest when the model's template refuses the messages."""

    @property
    def vocab_size(self) -> int: ...
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]: ...
    def token_bytes(self, token_id: int, special: bool = False) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Inquiry:
    """A body that passed every check that needs no tokenizer. `prompt`: text, token ids or chat messages. `max_tokens` None: what the context leaves.
    `n`: answers to the one prompt. `echo`: the prompt's text comes first; with it `max_tokens` may be 0, and the prompt is all that comes.
    `prompt_logprobs`: as the client asked; sampling's may be more, for the echo."""

    endpoint: Endpoint
    model: str
    prompt: str | tuple[int, ...] | tuple[Message, ...]
    sampling: Sampling
    bad_words: tuple[str, ...]
    max_tokens: int | None
    n: int
    echo: bool
    prompt_logprobs: int | None
    add_special_tokens: bool
    stream: bool
    include_usage: bool
    priority: int
    return_token_ids: bool

    @property
    def shows_answer(self) -> bool:
        return self.max_tokens != 0

    def tokenize(self, tokenizer: PromptTokenizer) -> tuple[int, ...]:
        """The prompt's token ids. May take long for long texts: call it off the event loop."""
        if isinstance(self.prompt, str):
            return tuple(tokenizer.encode(self.prompt, add_special_tokens=self.add_special_tokens))
        if self.endpoint == "completion":
            return token_ids(self.prompt, tokenizer.vocab_size, "prompt")
        return tuple(tokenizer.encode_chat([{"role": ROLES[m.role], "content": _text(m)} for m in self.prompt if isinstance(m, Message)]))

    @property
    def prompt_characters(self) -> int:
        if isinstance(self.prompt, str):
            return len(self.prompt)
        return sum(len(_text(part)) for part in self.prompt if isinstance(part, Message))

    def generation(self, request_id: str, tokens: tuple[int, ...], deadline: float, max_context_tokens: int, tokenizer: PromptTokenizer) -> GenerationRequest:
        field = "messages" if self.endpoint == "chat" else "prompt"
        if not tokens:
            raise InvalidRequest(f"{field}: empty", field=field)
        self._check_vocabulary(tokenizer.vocab_size)
        room = max_context_tokens - len(tokens)
        if room < 1:
            raise ContextTooLong(f"this model's context holds {max_context_tokens} tokens; the prompt alone has {len(tokens)}", field=field)
        if self.max_tokens is not None and self.max_tokens > room:
            raise ContextTooLong(
                f"this model's context holds {max_context_tokens} tokens; {len(tokens)} in the prompt and {self.max_tokens} for the answer were asked for",
                field=field,
            )
        default = room if self.endpoint == "chat" else min(COMPLETION_MAX_TOKENS, room)
        max_tokens = default if self.max_tokens is None else max(self.max_tokens, 1)
        check(self.sampling.min_tokens <= max_tokens, "min_tokens", f"{self.sampling.min_tokens} is more than max_tokens, {max_tokens}")
        sampling = replace(self.sampling, max_tokens=max_tokens, bad_words=bad_word_tokens(self.bad_words, tokenizer))
        return GenerationRequest(request_id=request_id, prompt_tokens=tokens, sampling=sampling, deadline=deadline, priority=self.priority)

    def _check_vocabulary(self, vocab_size: int) -> None:
        token_ids(self.sampling.stop_token_ids, vocab_size, "stop_token_ids")
        for token in self.sampling.logit_bias:
            check(token < vocab_size, f"logit_bias.{token}", f"lies outside the vocabulary of {vocab_size}")


def parse(body: bytes, endpoint: Endpoint) -> Inquiry:
    """Raises InvalidRequest, which names the field."""
    raw = decode(body)
    kind = ENDPOINT_FIELDS[endpoint]
    used = {*SharedFields.__struct_fields__, *kind.__struct_fields__}
    raw = known(raw, used, NEUTRAL, HARMLESS)
    if isinstance(raw.get("stream_options"), dict):
        raw["stream_options"] = known(raw["stream_options"], {"include_usage"}, STREAM_NEUTRAL, {"include_obfuscation"}, "stream_options.")
    if endpoint == "chat" and isinstance(raw.get("messages"), list):
        raw["messages"] = [_known_message(message, index) for index, message in enumerate(raw["messages"])]
    shared = convert(raw, SharedFields)
    if shared.stream_options is not None and not shared.stream:
        raise InvalidRequest("stream_options: only with stream = true", field="stream_options")
    fields = convert(raw, kind)
    return _chat(shared, fields) if isinstance(fields, ChatFields) else _completion(shared, fields)


def _chat(shared: SharedFields, fields: ChatFields) -> Inquiry:
    check(fields.top_logprobs is None or fields.logprobs, "top_logprobs", "only with logprobs = true")
    logprobs = (fields.top_logprobs or 0) if fields.logprobs else None
    check(0 <= (logprobs or 0) <= MAX_LOGPROBS, "top_logprobs", f"must lie between 0 and {MAX_LOGPROBS}")
    max_tokens = _chat_max_tokens(shared, fields)
    return _inquiry("chat", shared, _check_messages(fields.messages), max_tokens, sampling_of(shared, logprobs, shared.prompt_logprobs))


def _completion(shared: SharedFields, fields: CompletionFields) -> Inquiry:
    scored = [count for count in (shared.prompt_logprobs, fields.logprobs if fields.echo else None) if count is not None]
    sampling = sampling_of(shared, fields.logprobs, max(scored) if scored else None)
    inquiry = _inquiry("completion", shared, _check_prompt(fields.prompt), shared.max_tokens, sampling, least=0 if fields.echo else 1)
    return replace(inquiry, echo=fields.echo, add_special_tokens=fields.add_special_tokens)


def _inquiry(
    endpoint: Endpoint,
    shared: SharedFields,
    prompt: str | tuple[int, ...] | tuple[Message, ...],
    max_tokens: int | None,
    sampling: Sampling,
    least: int = 1,
) -> Inquiry:
    check(max_tokens is None or least <= max_tokens <= INT32, "max_tokens", "must be at least 1 (0 with echo)")
    check(shared.prompt_logprobs is None or not shared.stream, "prompt_logprobs", "not with stream = true; with echo and logprobs a stream begins with them")
    return Inquiry(
        endpoint=endpoint,
        model=shared.model,
        prompt=prompt,
        sampling=sampling,
        bad_words=tuple(shared.bad_words),
        max_tokens=max_tokens,
        n=shared.n,
        echo=False,
        prompt_logprobs=shared.prompt_logprobs,
        add_special_tokens=True,
        stream=shared.stream,
        include_usage=shared.stream_options is not None and shared.stream_options.include_usage,
        priority=shared.priority,
        return_token_ids=shared.return_token_ids,
    )


# ---- fields -----------------------------------------------------------------------------------------------------------------------


def decode(body: bytes) -> dict[str, Any]:
    """A JSON object, or InvalidRequest."""
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    if not isinstance(raw, dict):
        raise InvalidRequest("the body must be a JSON object")
    return raw


def known(raw: Mapping[str, Any], used: set[str], neutral: Mapping[str, tuple[Any, ...]], harmless: set[str], path: str = "") -> dict[str, Any]:
    """The fields in use that are not null. Refuses unknown names and unsupported wishes."""
    for name, value in raw.items():
        if name in used or name in harmless:
            continue
        if name not in neutral:
            near = difflib.get_close_matches(name, sorted({*used, *neutral, *harmless}), n=1, cutoff=0.5)
            raise InvalidRequest(f"{path}{name}: unknown field" + (f"; did you mean {near[0]}?" if near else ""), field=f"{path}{name}")
        if value is not None and not any(_same(value, allowed) for allowed in neutral[name]):
            raise InvalidRequest(f"{path}{name}: not supported yet", field=f"{path}{name}")
    return {name: value for name, value in raw.items() if name in used and value is not None}


def _known_message(message: Any, index: int) -> Any:
    if not isinstance(message, dict):
        return message
    return known(message, {"role", "content"}, MESSAGE_NEUTRAL, {"name"}, f"messages[{index}].")


def _same(value: Any, allowed: Any) -> bool:
    """Equal, where false is not 0 and 1.0 is 1."""
    return isinstance(value, bool) == isinstance(allowed, bool) and bool(value == allowed)


def convert(raw: dict[str, Any], kind: type[T]) -> T:
    """Raises InvalidRequest, which names the field."""
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at `$")
        missing = re.search(r"missing required field `(\w+)`", message)
        field = where.rstrip("`").lstrip(".")
        if missing:
            field = ".".join(part for part in (field, missing[1]) if part)
            raise InvalidRequest(f"{field}: required", field=field) from None
        message = message.replace("`", "")
        raise InvalidRequest(f"{field}: {message[0].lower()}{message[1:]}", field=field) from None


def _check_messages(messages: list[Message]) -> tuple[Message, ...]:
    check(bool(messages), "messages", "empty")
    for index, message in enumerate(messages):
        check(message.role in ROLES, f"messages[{index}].role", f"{message.role!r} is not supported; known: {', '.join(ROLES)}")
        if not isinstance(message.content, str):
            for number, part in enumerate(message.content):
                check(part.type == "text", f"messages[{index}].content[{number}].type", f"{part.type!r} is not supported yet; only text is")
    return tuple(messages)


def _text(message: Message) -> str:
    return message.content if isinstance(message.content, str) else "\n".join(part.text for part in message.content)


def _chat_max_tokens(shared: SharedFields, fields: ChatFields) -> int | None:
    both = [value for value in (fields.max_completion_tokens, shared.max_tokens) if value is not None]
    check(len(set(both)) <= 1, "max_tokens", "differs from max_completion_tokens; give one of them")
    return both[0] if both else None


def _check_prompt(prompt: str | list[str | int | list[int]]) -> str | tuple[int, ...]:
    check(bool(prompt), "prompt", "empty")
    if isinstance(prompt, str):
        return prompt
    if all(isinstance(item, int) for item in prompt):
        return tuple(item for item in prompt if isinstance(item, int))
    check(len(prompt) == 1, "prompt", "more than one prompt in a request is not supported yet")
    only = prompt[0]
    check(bool(only), "prompt", "empty")
    if isinstance(only, str):
        return only
    return tuple(only) if isinstance(only, list) else (only,)


# ---- headers ----------------------------------------------------------------------------------------------------------------------


def timeout_of(text: str | None, header: str, default_s: float, max_s: float) -> float:
    """Seconds that the client gives its request."""
    if text is None:
        return default_s
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and 0 < seconds <= max_s):
        raise InvalidRequest(f"header {header}: must be a number of seconds above 0, at most {max_s:g}", field=header)
    return seconds
