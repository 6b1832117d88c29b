"""Token ids -> text that may be shown now. Owns UTF-8 over token boundaries and stop strings; knows nothing of sampling, steps or streams.

Invariant: the state is a pure function of (prompt tokens, answer tokens so far), however the answer was split into pushes; so a hand-off or a resume
rebuilds it by pushing the answer so far once and dropping the text that this gives.
"""

import codecs
from collections.abc import Sequence

from engine.tokenizer import Tokenizer

_MAX_UTF8_BYTES = 4


class Detokenizer:
    """`stopped`: the stop string that ended the answer; `num_tokens`: answer tokens used, the one that completed the stop string included.

    Of several stop strings the one completed first counts, of those completed by the same character the longest; one that is complete within the first
    `min_tokens` tokens is text like any other. Special tokens give no text.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_tokens: Sequence[int] = (), stop: Sequence[str] = (), include_stop: bool = False, min_tokens: int = 0
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(text for text in stop if text)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._prompt_tail = _incomplete_tail(tokenizer, prompt_tokens)
        self._held = ""
        self._is_finished = False
        self.stopped: str | None = None
        self.num_tokens = 0

    def push(self, tokens: Sequence[int]) -> str:
        """The text to show after these further tokens: without an incomplete character or what may become a stop string. Tokens after a stop are ignored."""
        shown = []
        for token in tokens:
            if self.stopped is not None or self._is_finished:
                break
            self.num_tokens += 1
            shown.append(self._show(self._decode(self._tokenizer.token_bytes(token))))
        return "".join(shown)

    def finish(self) -> str:
        """The rest, when the answer ends here: what was held back; an incomplete character becomes U+FFFD, as in a whole decode."""
        if self.stopped is not None or self._is_finished:
            return ""
        self._is_finished = True
        shown = self._show(self._utf8.decode(b"", final=True))
        rest, self._held = self._held, ""
        return shown + ("" if self.stopped is not None else rest)

    def _decode(self, piece: bytes) -> str:
        """A character that the prompt began and the answer goes on with is shown whole; one that it does not go on with belongs to the prompt alone."""
        if piece and self._prompt_tail:
            tail, self._prompt_tail = self._prompt_tail, b""
            if _strictly_decoded(tail + piece[:1]) is not None:
                self._utf8.decode(tail)
        return self._utf8.decode(piece)

    def _show(self, text: str) -> str:
        if not text or not self._stop:
            return text
        known = len(self._held)  # what ends in here is no stop: it would have been one before, had it counted
        self._held += text
        found = ((stop, self._held.find(stop, max(0, known - len(stop) + 1))) for stop in self._stop)
        matches = [(start + len(stop), start, stop) for stop, start in found if start >= 0]
        if matches and self.num_tokens > self._min_tokens:
            end, start, self.stopped = min(matches)
            shown, self._held = self._held[: end if self._include_stop else start], ""
            return shown
        split = len(self._held) - self._possible_stop_length()
        shown, self._held = self._held[:split], self._held[split:]
        return shown

    def _possible_stop_length(self) -> int:
        """How many of the held characters, counted from the end, may be the start of a stop string."""
        longest = min(len(self._held), max(map(len, self._stop)) - 1)
        return next((length for length in range(longest, 0, -1) if any(stop.startswith(self._held[-length:]) for stop in self._stop)), 0)


def _incomplete_tail(tokenizer: Tokenizer, prompt_tokens: Sequence[int]) -> bytes:
    """The bytes of the character that the prompt began and did not complete."""
    tail = b""
    for token in reversed(prompt_tokens):
        tail = tokenizer.token_bytes(token) + tail
        if len(tail) >= _MAX_UTF8_BYTES:
            break
    begun = (tail[-length:] for length in range(min(len(tail), _MAX_UTF8_BYTES - 1), 0, -1))
    return next((candidate for candidate in begun if _strictly_decoded(candidate) == ""), b"")


def _strictly_decoded(begun: bytes) -> str | None:
    """The whole characters of bytes that are valid or only incomplete UTF-8; else None."""
    try:
        return codecs.getincrementaldecoder("utf-8")("strict").decode(begun)
    except UnicodeDecodeError:
        return None
