"""Logprobs in OpenAI's shapes, and what of an answer's chunks one choice shows. Owns the texts and offsets of single tokens; knows nothing of HTTP.

A token that is no whole UTF-8 text is written as `bytes:\\xe4\\xbd`, so that different tokens have different texts; a special one by its name.
Invariant: a token's text_offset is the number of characters that the prompt (with echo) and the tokens before it show.
"""

import codecs
from collections.abc import Sequence
from typing import Any, Protocol

from protocol.logprobs import TokenLogprob

Body = dict[str, Any]
_LEAST_LOGPROB = -9999.0  # JSON has no infinity


class TokenBytes(Protocol):
    def token_bytes(self, token_id: int, special: bool = False) -> bytes: ...


def token_text(tokenizer: TokenBytes, token: int) -> str:
    raw = tokenizer.token_bytes(token, special=True)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(tokenizer: TokenBytes, entries: Sequence[TokenLogprob]) -> Body:
    content = [
        {**_entry(tokenizer, one.token, one.logprob), "top_logprobs": [_entry(tokenizer, token, logprob) for token, logprob in one.top]} for one in entries
    ]
    return {"content": content, "refusal": None}


def _entry(tokenizer: TokenBytes, token: int, logprob: float) -> Body:
    return {"token": token_text(tokenizer, token), "logprob": max(logprob, _LEAST_LOGPROB), "bytes": list(tokenizer.token_bytes(token, special=True))}


def prompt_logprobs(tokenizer: TokenBytes, entries: Sequence[TokenLogprob], num_top: int) -> list[Body | None]:
    """vLLM's extension: for each position the likeliest tokens and the prompt's own, by id; nothing is known of the first."""
    positions: list[Body | None] = [None]
    for one in entries:
        ranked = [(token, logprob, index + 1) for index, (token, logprob) in enumerate(one.top[:num_top])]
        if one.token not in {token for token, _, _ in ranked}:
            ranked.append((one.token, one.logprob, one.rank))
        positions.append(
            {
                str(token): {"logprob": max(logprob, _LEAST_LOGPROB), "rank": rank, "decoded_token": token_text(tokenizer, token)}
                for token, logprob, rank in ranked
            }
        )
    return positions


class CompletionLogprobs:
    """The legacy shape of /v1/completions, in pieces as they come."""

    def __init__(self, tokenizer: TokenBytes, num_top: int) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._offset = 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def prompt(self, tokens: Sequence[int], entries: Sequence[TokenLogprob]) -> Body:
        """Of an echoed prompt, whose first token has none."""
        body = self.body(entries[:0])
        body["text_offset"] = [self._advance(tokens[0])]
        body["tokens"], body["token_logprobs"], body["top_logprobs"] = [token_text(self._tokenizer, tokens[0])], [None], [None]
        return joined(body, self.body(entries))

    def body(self, entries: Sequence[TokenLogprob]) -> Body:
        return {
            "text_offset": [self._advance(one.token) for one in entries],
            "token_logprobs": [max(one.logprob, _LEAST_LOGPROB) for one in entries],
            "tokens": [token_text(self._tokenizer, one.token) for one in entries],
            "top_logprobs": [
                {token_text(self._tokenizer, token): max(logprob, _LEAST_LOGPROB) for token, logprob in (*one.top[: self._num_top], (one.token, one.logprob))}
                for one in entries
            ],
        }

    def _advance(self, token: int) -> int:
        offset = self._offset
        self._offset += len(self._utf8.decode(self._tokenizer.token_bytes(token)))
        return offset


def joined(one: Body, other: Body) -> Body:
    return {name: values + other[name] for name, values in one.items()}
