"""OpenAI request bodies: what we take, what we refuse and with which words. Owns the meaning of every field; knows nothing of workers or HTTP.

Invariant: a field is either used, harmless, or refused by name. Nothing that would change the answer is dropped in silence.
"""

import difflib
import math
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeVar

import msgspec

from protocol.errors import ContextTooLong, InvalidRequest, UnknownModel
from protocol.request import GenerationRequest, Sampling

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKENS = 128
COMPLETION_MAX_TOKENS = 16  # OpenAI's default of /v1/completions
INT32 = 2**31 - 1

Endpoint = Literal["chat", "completion"]
T = TypeVar("T")


class PromptTokenizer(Protocol):
    """What the router asks of a tokenizer. `encode_chat` raises InvalidRequest when the model's template refuses the messages."""

    @property
    def vocab_size(self) -> int: ...
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]: ...


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = False


class SharedFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that both endpoints take."""

    model: str
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: int = 0
    return_token_ids: bool = False


class TextPart(msgspec.Struct, frozen=True):
    type: str
    text: str = ""


class Message(msgspec.Struct, frozen=True):
    role: str
    content: str | list[TextPart]


class ChatFields(msgspec.Struct, frozen=True, kw_only=True):
    messages: list[Message]
    max_completion_tokens: int | None = None


class CompletionFields(msgspec.Struct, frozen=True, kw_only=True):
    prompt: str | list[str | int | list[int]]
    add_special_tokens: bool = True


# Known fields that we do not support yet, with the values that ask for nothing (null always does).
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "echo": (False,),
    "suffix": ("",),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_decoding_backend": (),
    "structured_outputs": (),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "logits_processors": (),
    "return_tokens_as_token_ids": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "kv_transfer_params": (),
    "cache_salt": (),
    "mm_processor_kwargs": (),
    "store": (False,),
}
HARMLESS = {"user", "metadata", "service_tier", "parallel_tool_calls", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "request_id"}
_MESSAGE_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tool_calls": ([],),
    "tool_call_id": (),
    "function_call": (),
    "refusal": ("",),
    "audio": (),
    "annotations": ([],),
    "reasoning_content": ("",),
    "reasoning": ("",),
}
_STREAM_NEUTRAL: dict[str, tuple[Any, ...]] = {"continuous_usage_stats": (False,)}
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_ENDPOINT_FIELDS: dict[Endpoint, type[ChatFields] | type[CompletionFields]] = {"chat": ChatFields, "completion": CompletionFields}


@dataclass(frozen=True, slots=True)
class Inquiry:
    """A body that passed every check that needs no tokenizer. `prompt`: text, token ids or chat messages. `max_tokens` None: what the context leaves."""

    endpoint: Endpoint
    model: str
    prompt: str | tuple[int, ...] | tuple[Message, ...]
    sampling: Sampling
    max_tokens: int | None
    add_special_tokens: bool
    stream: bool
    include_usage: bool
    priority: int
    return_token_ids: bool

    def check_model(self, name: str) -> None:
        if self.model != name:
            raise UnknownModel(f"the model {self.model!r} does not exist; this cluster serves {name!r}", field="model")

    def tokenize(self, tokenizer: PromptTokenizer) -> tuple[int, ...]:
        """The prompt's token ids. May take long for long texts: call it off the event loop."""
        if isinstance(self.prompt, str):
            return tuple(tokenizer.encode(self.prompt, add_special_tokens=self.add_special_tokens))
        if self.endpoint == "completion":
            return _token_ids(self.prompt, tokenizer.vocab_size, "prompt")
        return tuple(tokenizer.encode_chat([{"role": _ROLES[m.role], "content": _text(m)} for m in self.prompt if isinstance(m, Message)]))

    @property
    def prompt_characters(self) -> int:
        if isinstance(self.prompt, str):
            return len(self.prompt)
        return sum(len(_text(part)) for part in self.prompt if isinstance(part, Message))

    def generation(self, request_id: str, tokens: tuple[int, ...], deadline: float, max_context_tokens: int, vocab_size: int) -> GenerationRequest:
        field = "messages" if self.endpoint == "chat" else "prompt"
        if not tokens:
            raise InvalidRequest(f"{field}: empty", field=field)
        _token_ids(self.sampling.stop_token_ids, vocab_size, "stop_token_ids")
        room = max_context_tokens - len(tokens)
        if room < 1:
            raise ContextTooLong(f"this model's context holds {max_context_tokens} tokens; the prompt alone has {len(tokens)}", field=field)
        if self.max_tokens is not None and self.max_tokens > room:
            raise ContextTooLong(
                f"this model's context holds {max_context_tokens} tokens; {len(tokens)} in the prompt and {self.max_tokens} for the answer were asked for",
                field=field,
            )
        default = room if self.endpoint == "chat" else min(COMPLETION_MAX_TOKENS, room)
        sampling = replace(self.sampling, max_tokens=default if self.max_tokens is None else self.max_tokens)
        return GenerationRequest(request_id=request_id, prompt_tokens=tokens, sampling=sampling, deadline=deadline, priority=self.priority)


def parse(body: bytes, endpoint: Endpoint) -> Inquiry:
    """Raises InvalidRequest, which names the field."""
    raw = _decode(body)
    kind = _ENDPOINT_FIELDS[endpoint]
    used = {*SharedFields.__struct_fields__, *kind.__struct_fields__}
    raw = _known(raw, used, NEUTRAL, HARMLESS)
    if isinstance(raw.get("stream_options"), dict):
        raw["stream_options"] = _known(raw["stream_options"], {"include_usage"}, _STREAM_NEUTRAL, {"include_obfuscation"}, "stream_options.")
    if endpoint == "chat" and isinstance(raw.get("messages"), list):
        raw["messages"] = [_known_message(message, index) for index, message in enumerate(raw["messages"])]
    shared = _convert(raw, SharedFields)
    if shared.stream_options is not None and not shared.stream:
        raise InvalidRequest("stream_options: only with stream = true", field="stream_options")
    fields = _convert(raw, kind)
    if isinstance(fields, ChatFields):
        return _inquiry(endpoint, shared, _check_messages(fields.messages), _chat_max_tokens(shared, fields), True)
    return _inquiry(endpoint, shared, _check_prompt(fields.prompt), shared.max_tokens, fields.add_special_tokens)


def _inquiry(
    endpoint: Endpoint, shared: SharedFields, prompt: str | tuple[int, ...] | tuple[Message, ...], max_tokens: int | None, add_special: bool
) -> Inquiry:
    if max_tokens is not None:
        _check(1 <= max_tokens <= INT32, "max_tokens", "must be at least 1")
    _check(0 <= shared.temperature <= 2, "temperature", "must lie between 0 and 2")
    _check(0 < shared.top_p <= 1, "top_p", "must lie above 0 and at most at 1")
    _check(-1 <= shared.top_k <= INT32, "top_k", "must be at least -1 (-1 and 0: off)")
    _check(-(2**63) <= (shared.seed or 0) < 2**64, "seed", "must fit 64 bits")
    _check(-(2**31) <= shared.priority <= INT32, "priority", "must fit 32 bits")
    sampling = Sampling(
        max_tokens=max_tokens or 0,
        temperature=shared.temperature,
        top_p=shared.top_p,
        top_k=max(shared.top_k, 0),
        seed=secrets.randbits(63) if shared.seed is None else shared.seed % 2**64,
        stop=_check_stop(shared.stop),
        stop_token_ids=_check_stop_tokens(shared.stop_token_ids),
        ignore_eos=shared.ignore_eos,
        include_stop=shared.include_stop_str_in_output,
    )
    include_usage = shared.stream_options is not None and shared.stream_options.include_usage
    return Inquiry(endpoint, shared.model, prompt, sampling, max_tokens, add_special, shared.stream, include_usage, shared.priority, shared.return_token_ids)


# ---- fields -----------------------------------------------------------------------------------------------------------------------


def _decode(body: bytes) -> dict[str, Any]:
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    if not isinstance(raw, dict):
        raise InvalidRequest("the body must be a JSON object")
    return raw


def _known(raw: Mapping[str, Any], used: set[str], neutral: Mapping[str, tuple[Any, ...]], harmless: set[str], path: str = "") -> dict[str, Any]:
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
    return _known(message, {"role", "content"}, _MESSAGE_NEUTRAL, {"name"}, f"messages[{index}].")


def _same(value: Any, allowed: Any) -> bool:
    """Equal, where false is not 0 and 1.0 is 1."""
    return isinstance(value, bool) == isinstance(allowed, bool) and bool(value == allowed)


def _convert(raw: dict[str, Any], kind: type[T]) -> T:
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


def _check(holds: bool, field: str, words: str) -> None:
    if not holds:
        raise InvalidRequest(f"{field}: {words}", field=field)


def _check_stop(stop: str | list[str]) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    _check(len(strings) <= MAX_STOP_STRINGS, "stop", f"at most {MAX_STOP_STRINGS} strings")
    _check(all(strings), "stop", "a stop string must not be empty")
    _check(all(len(text) <= MAX_STOP_CHARACTERS for text in strings), "stop", f"at most {MAX_STOP_CHARACTERS} characters each")
    return strings


def _check_stop_tokens(tokens: Iterable[int]) -> tuple[int, ...]:
    ids = tuple(tokens)
    _check(len(ids) <= MAX_STOP_TOKENS, "stop_token_ids", f"at most {MAX_STOP_TOKENS} tokens")
    return _token_ids(ids, INT32, "stop_token_ids")


def _token_ids(tokens: Iterable[Any], vocab_size: int, field: str) -> tuple[int, ...]:
    ids = tuple(tokens)
    for index, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            raise InvalidRequest(f"{field}[{index}]: token {token} lies outside the vocabulary of {vocab_size}", field=f"{field}[{index}]")
    return ids


def _check_messages(messages: list[Message]) -> tuple[Message, ...]:
    _check(bool(messages), "messages", "empty")
    for index, message in enumerate(messages):
        _check(message.role in _ROLES, f"messages[{index}].role", f"{message.role!r} is not supported; known: {', '.join(_ROLES)}")
        if not isinstance(message.content, str):
            for number, part in enumerate(message.content):
                _check(part.type == "text", f"messages[{index}].content[{number}].type", f"{part.type!r} is not supported yet; only text is")
    return tuple(messages)


def _text(message: Message) -> str:
    return message.content if isinstance(message.content, str) else "\n".join(part.text for part in message.content)


def _chat_max_tokens(shared: SharedFields, fields: ChatFields) -> int | None:
    both = [value for value in (fields.max_completion_tokens, shared.max_tokens) if value is not None]
    _check(len(set(both)) <= 1, "max_tokens", "differs from max_completion_tokens; give one of them")
    return both[0] if both else None


def _check_prompt(prompt: str | list[str | int | list[int]]) -> str | tuple[int, ...]:
    _check(bool(prompt), "prompt", "empty")
    if isinstance(prompt, str):
        return prompt
    if all(isinstance(item, int) for item in prompt):
        return tuple(item for item in prompt if isinstance(item, int))
    _check(len(prompt) == 1, "prompt", "more than one prompt in a request is not supported yet")
    only = prompt[0]
    _check(bool(only), "prompt", "empty")
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
