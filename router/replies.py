"""OpenAI response bodies: completions, stream chunks, usage, errors. Owns their shapes; knows nothing of how an answer comes about.

Invariant: the texts of a stream's chunks, joined, are the text of the whole reply.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from protocol.errors import HeadraceError

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens. `cached_tokens`: of the prompt, computed for earlier requests and reused."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def body(self) -> Body:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True, slots=True)
class Piece:
    """What a choice gains, or all of it. `tokens`: shown as `token_ids` where the client asked for them (vLLM's field); so are `prompt_logprobs`."""

    text: str
    finish_reason: str = ""
    tokens: Sequence[int] | None = None
    logprobs: Body | None = None
    prompt_logprobs: list[Body | None] | None = None


class Reply(Protocol):
    """One endpoint's shapes for one request. `index`: of the choice."""

    def opening(self, index: int) -> list[Body]: ...
    def delta(self, index: int, piece: Piece) -> Body: ...
    def usage(self, usage: Usage) -> Body: ...
    def whole(self, pieces: Sequence[Piece], usage: Usage) -> Body: ...


class ChatReply:
    def __init__(self, request_id: str, model: str, created: int, include_usage: bool) -> None:
        self._head: Body = {"id": f"chatcmpl-{request_id}", "object": "chat.completion.chunk", "created": created, "model": model}
        self._tail: Body = {"usage": None} if include_usage else {}

    def opening(self, index: int) -> list[Body]:
        return [self._chunk(index, {"role": "assistant", "content": ""}, Piece(""))]

    def delta(self, index: int, piece: Piece) -> Body:
        return self._chunk(index, {"content": piece.text} if piece.text or not piece.finish_reason else {}, piece)

    def usage(self, usage: Usage) -> Body:
        return {**self._head, "choices": [], "usage": usage.body()}

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> Body:
        choices = [_choice(index, piece, {"message": {"role": "assistant", "content": piece.text, "refusal": None}}) for index, piece in enumerate(pieces)]
        of_prompt = pieces[0].prompt_logprobs
        extra = {} if of_prompt is None else {"prompt_logprobs": of_prompt}
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": usage.body(), **extra}

    def _chunk(self, index: int, delta: Body, piece: Piece) -> Body:
        return {**self._head, "choices": [_choice(index, piece, {"delta": delta})], **self._tail}


class CompletionReply:
    def __init__(self, request_id: str, model: str, created: int, include_usage: bool) -> None:
        self._head: Body = {"id": f"cmpl-{request_id}", "object": "text_completion", "created": created, "model": model}
        self._tail: Body = {"usage": None} if include_usage else {}

    def opening(self, index: int) -> list[Body]:
        return []

    def delta(self, index: int, piece: Piece) -> Body:
        return {**self._head, "choices": [self._choice(index, piece)], **self._tail}

    def usage(self, usage: Usage) -> Body:
        return {**self._head, "choices": [], "usage": usage.body()}

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> Body:
        return {**self._head, "choices": [self._choice(index, piece) for index, piece in enumerate(pieces)], "usage": usage.body()}

    def _choice(self, index: int, piece: Piece) -> Body:
        extra = {} if piece.prompt_logprobs is None else {"prompt_logprobs": piece.prompt_logprobs}
        return _choice(index, piece, {"text": piece.text}) | extra


def _choice(index: int, piece: Piece, content: Body) -> Body:
    ids = {} if piece.tokens is None else {"token_ids": list(piece.tokens)}
    return {"index": index, **content, "logprobs": piece.logprobs, "finish_reason": piece.finish_reason or None, **ids}


_TYPES = {404: "not_found_error", 429: "rate_limit_error", 503: "service_unavailable_error", 504: "timeout_error"}


def error_body(error: HeadraceError) -> Body:
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "internal_error")
    body: Body = {"message": error.message, "type": kind, "param": error.field, "code": error.code}
    if error.stage is not None:
        body["stage"] = error.stage
    return {"error": body}


def event(body: Body, name: str = "") -> bytes:
    """One server-sent event."""
    head = f"event: {name}\ndata: ".encode() if name else b"data: "
    return head + msgspec.json.encode(body) + b"\n\n"


DONE = b"data: [DONE]\n\n"
