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


class Reply(Protocol):
    """One endpoint's shapes for one request. `tokens`: shown as `token_ids` where the client asked for them (vLLM's field)."""

    def opening(self) -> list[Body]: ...
    def delta(self, text: str, finish_reason: str, tokens: Sequence[int] | None = None) -> Body: ...
    def usage(self, usage: Usage) -> Body: ...
    def whole(self, text: str, finish_reason: str, usage: Usage, tokens: Sequence[int] | None = None) -> Body: ...


class ChatReply:
    def __init__(self, request_id: str, model: str, created: int, include_usage: bool) -> None:
        self._head: Body = {"id": f"chatcmpl-{request_id}", "object": "chat.completion.chunk", "created": created, "model": model}
        self._tail: Body = {"usage": None} if include_usage else {}

    def opening(self) -> list[Body]:
        return [self._chunk({"role": "assistant", "content": ""}, None)]

    def delta(self, text: str, finish_reason: str, tokens: Sequence[int] | None = None) -> Body:
        return self._chunk({"content": text} if text or not finish_reason else {}, finish_reason or None, tokens)

    def usage(self, usage: Usage) -> Body:
        return {**self._head, "choices": [], "usage": usage.body()}

    def whole(self, text: str, finish_reason: str, usage: Usage, tokens: Sequence[int] | None = None) -> Body:
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason, **_ids(tokens)}
        return {**self._head, "object": "chat.completion", "choices": [choice], "usage": usage.body()}

    def _chunk(self, delta: Body, finish_reason: str | None, tokens: Sequence[int] | None = None) -> Body:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason, **_ids(tokens)}
        return {**self._head, "choices": [choice], **self._tail}


class CompletionReply:
    def __init__(self, request_id: str, model: str, created: int, include_usage: bool) -> None:
        self._head: Body = {"id": f"cmpl-{request_id}", "object": "text_completion", "created": created, "model": model}
        self._tail: Body = {"usage": None} if include_usage else {}

    def opening(self) -> list[Body]:
        return []

    def delta(self, text: str, finish_reason: str, tokens: Sequence[int] | None = None) -> Body:
        return {**self._head, "choices": [self._choice(text, finish_reason or None, tokens)], **self._tail}

    def usage(self, usage: Usage) -> Body:
        return {**self._head, "choices": [], "usage": usage.body()}

    def whole(self, text: str, finish_reason: str, usage: Usage, tokens: Sequence[int] | None = None) -> Body:
        return {**self._head, "choices": [self._choice(text, finish_reason, tokens)], "usage": usage.body()}

    def _choice(self, text: str, finish_reason: str | None, tokens: Sequence[int] | None) -> Body:
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason, **_ids(tokens)}


def _ids(tokens: Sequence[int] | None) -> Body:
    return {} if tokens is None else {"token_ids": list(tokens)}


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
