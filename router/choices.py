"""One choice of a reply: what of its answer's chunks the client asked to see. Owns echo and the choice of logprob shapes; knows nothing of HTTP or workers.

Invariant: pieces made of an answer's chunks, joined, are the piece made of the whole answer.
"""

import codecs
from collections.abc import Sequence

from router.life import Chunk
from router.logprobs import Body, CompletionLogprobs, TokenBytes, chat_logprobs, joined, prompt_logprobs
from router.openai import Inquiry
from router.replies import Piece


class Choice:
    def __init__(self, inquiry: Inquiry, prompt_tokens: Sequence[int], tokenizer: TokenBytes) -> None:
        self._inquiry = inquiry
        self._prompt_tokens = prompt_tokens
        self._tokenizer = tokenizer
        self._echo = _prompt_text(inquiry, prompt_tokens, tokenizer) if inquiry.echo else ""
        self._completion = CompletionLogprobs(tokenizer, inquiry.sampling.logprobs or 0)
        self._begun = False

    def piece(self, chunk: Chunk) -> Piece:
        """What the next chunk, or one for the whole answer, adds."""
        first, self._begun = not self._begun, True
        text, tokens = (chunk.text, chunk.tokens) if self._inquiry.shows_answer else ("", ())
        finish_reason = chunk.finish_reason if self._inquiry.shows_answer or not chunk.finish_reason else "length"
        return Piece(
            text=self._echo + text if first else text,
            finish_reason=finish_reason,
            tokens=tokens if self._inquiry.return_token_ids else None,
            logprobs=self._logprobs(chunk, first),
            prompt_logprobs=self._prompt_logprobs(chunk) if first else None,
        )

    def _logprobs(self, chunk: Chunk, first: bool) -> Body | None:
        if self._inquiry.sampling.logprobs is None:
            return None
        if self._inquiry.endpoint == "chat":
            return chat_logprobs(self._tokenizer, chunk.logprobs)
        of_prompt = self._completion.prompt(self._prompt_tokens, chunk.prompt_logprobs) if first and self._inquiry.echo else None
        of_answer = self._completion.body(chunk.logprobs if self._inquiry.shows_answer else ())
        return of_answer if of_prompt is None else joined(of_prompt, of_answer)

    def _prompt_logprobs(self, chunk: Chunk) -> list[Body | None] | None:
        asked = self._inquiry.prompt_logprobs
        return None if asked is None else prompt_logprobs(self._tokenizer, chunk.prompt_logprobs, asked)


def whole(chunks: Sequence[Chunk]) -> Chunk:
    """An answer's chunks as one."""
    return Chunk(
        text="".join(chunk.text for chunk in chunks),
        tokens=tuple(token for chunk in chunks for token in chunk.tokens),
        finish_reason=chunks[-1].finish_reason,
        logprobs=tuple(one for chunk in chunks for one in chunk.logprobs),
        prompt_logprobs=tuple(one for chunk in chunks for one in chunk.prompt_logprobs),
    )


def _prompt_text(inquiry: Inquiry, tokens: Sequence[int], tokenizer: TokenBytes) -> str:
    """The text as it was given; of token ids, without a character that they only begin: the answer may complete and show it."""
    if isinstance(inquiry.prompt, str):
        return inquiry.prompt
    return codecs.getincrementaldecoder("utf-8")("replace").decode(b"".join(map(tokenizer.token_bytes, tokens)))
