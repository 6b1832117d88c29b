"""Where an answer stands in its grammar: which tokens may come next, and which must. Owns the thread that follows the grammars while the model runs; knows
nothing of schedules, blocks or logits.

Invariants:
- A guidance is a pure function of (request, answer so far): a guide that is opened on a begun answer says what one that saw its every token says.
- The engine thread calls, the guides' own thread follows; a matcher is touched by the latter alone. What is slow delays its own sequence, not the step loop.
- Forced tokens are what the model's own tokenizer makes of the forced text, each decided by the state before it; one that further text could lengthen is
  left to sampling.
"""

import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import torch

from engine.tokenizer import Tokenizer
from protocol.errors import HeadraceError, InvalidRequest, Unavailable
from protocol.request import GenerationRequest, Grammar

if TYPE_CHECKING:  # the library is loaded with the first grammar
    from xgrammar import CompiledGrammar, GrammarMatcher

    from engine.grammars import Grammars

log = logging.getLogger(__name__)

MAX_FORCED = 64  # tokens found at once; the rest is found after these
_TEXT_WINDOW = 256  # characters of forced text that the tokenizer looks at to decide one token
STEP_LIMIT_S = 1.0  # a grammar that takes longer for one token is given up
COMPILATIONS = 2  # at a time


@dataclass(frozen=True, slots=True)
class Guidance:
    """What may follow the answer's first `num_output` tokens. `forced`: tokens that must come, in order; `mask`: as in sampler.Choice, None: anything."""

    num_output: int
    forced: tuple[int, ...] = ()
    mask: torch.Tensor | None = None


class Span(Enum):
    """A grammar holds for the answer proper; what a model thinks before it is free."""

    BEFORE = "before"  # the answer may begin with a thought
    THINKING = "thinking"
    ANSWER = "answer"


class Guide:
    """One sequence's. `push` and `guidance` on the engine thread, the rest on the guides' thread. `is_overdue`: the engine waits for the guidance.
    `refuse`: ends the sequence, on the engine thread, when its grammar turns out to be wrong or too slow."""

    def __init__(self, request: GenerationRequest, marks: tuple[int, int] | None, refuse: Callable[[HeadraceError], None]) -> None:
        grammar = request.sampling.grammar
        assert grammar is not None
        self.grammar: Grammar = grammar
        self.unfollowed: list[int] = list(request.output_tokens)
        self.num_output = len(request.output_tokens)
        self.is_overdue = False
        self.refuse = refuse
        self._marks = marks
        self._span = _span_of(request.prompt_tokens, marks)
        self._latest: Guidance | None = None
        self._matcher: GrammarMatcher | None = None
        self._only: torch.Tensor | None = None

    def push(self, token: int) -> None:
        self.unfollowed.append(token)
        self.num_output += 1
        self.is_overdue = False

    @property
    def guidance(self) -> Guidance | None:
        """None while it is not known for the answer as it stands."""
        latest = self._latest
        return latest if latest is not None and latest.num_output == self.num_output else None

    # ---- guides' thread

    def begin(self, matcher: "GrammarMatcher", json_tokens: torch.Tensor) -> None:
        """`json_tokens`: mask of what JSON may contain."""
        self._matcher = matcher
        self._only = json_tokens if self.grammar.kind in ("json_schema", "json_object") else None

    def follow(self, tokens: Iterable[int], num_output: int, tokenizer: Tokenizer) -> Guidance:
        """Go on by `tokens`. InvalidRequest where they break the grammar."""
        for token in tokens:
            self._accept(token)
        forced = self._forced(tokenizer) if self._span is Span.ANSWER else ()
        self._latest = Guidance(num_output, forced, self._mask(tokenizer))
        return self._latest

    def _accept(self, token: int) -> None:
        assert self._matcher is not None
        if self._marks is not None and self._span is not Span.ANSWER:
            opening, closing = self._marks
            if self._span is Span.THINKING:
                self._span = Span.ANSWER if token == closing else Span.THINKING
                return
            if token == opening:
                self._span = Span.THINKING
                return
            self._span = Span.ANSWER
        if not self._matcher.is_terminated() and not self._matcher.accept_token(token):
            raise InvalidRequest(f"{self.grammar.kind}: the answer so far does not match: token {token}", field=self.grammar.field)

    def _mask(self, tokenizer: Tokenizer) -> torch.Tensor | None:
        assert self._matcher is not None
        if self._span is Span.THINKING:
            return None
        if self._matcher.is_terminated():  # an answer that goes on past its end, as with ignore_eos: nothing else may come
            return mask_of(tokenizer.stop_token_ids, tokenizer.vocab_size)
        mask = torch.empty(1, -(-tokenizer.vocab_size // 32), dtype=torch.int32)
        self._matcher.fill_next_token_bitmask(mask)
        if self._only is not None:
            mask[0] &= self._only
        if self._span is Span.BEFORE and self._marks is not None:
            mask[0] |= mask_of(self._marks[:1], tokenizer.vocab_size)
        return mask[0]

    def _forced(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        assert self._matcher is not None
        candidates = [] if self._matcher.is_terminated() else self._matcher.find_jump_forward_tokens()[:MAX_FORCED]
        if not candidates:
            return ()
        rest = self._matcher.find_jump_forward_string().encode()
        stable: list[int] = []
        for token in candidates:
            text = rest[: 4 * _TEXT_WINDOW].decode(errors="ignore")[:_TEXT_WINDOW]
            if tokenizer.encode(text, add_special_tokens=False)[:1] != [token]:
                break
            stable.append(token)
            rest = rest[len(tokenizer.token_bytes(token)) :]
        return tuple(stable)


class Guides:
    """Those of one engine. `on_engine` runs a command on the engine thread and wakes it."""

    def __init__(
        self, tokenizer: Tokenizer, cache_bytes: int, reasoning_marks: tuple[str, str] | None, on_engine: Callable[[Callable[[], None]], None]
    ) -> None:
        self._tokenizer = tokenizer
        self._cache_bytes = cache_bytes
        self._marks = _mark_ids(tokenizer, reasoning_marks)
        self._on_engine = on_engine
        self._jobs: queue.SimpleQueue[tuple[Guide, list[int], int] | None] = queue.SimpleQueue()
        self._counters: defaultdict[str, float] = defaultdict(float)
        self._fresh = threading.Condition()
        self._lock = threading.Lock()
        self._grammars: Grammars | None = None
        self._json_tokens = torch.empty(0, dtype=torch.int32)
        self._compilers = ThreadPoolExecutor(COMPILATIONS, thread_name_prefix="grammars")
        self._thread: threading.Thread | None = None

    def open(self, request: GenerationRequest, refuse: Callable[[HeadraceError], None]) -> Guide:
        """Compile and follow in the background."""
        guide = Guide(request, self._marks, refuse)
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="guides", daemon=True)
            self._thread.start()
        self._compilers.submit(self._open, guide)
        return guide

    def follow(self, guide: Guide) -> None:
        """The tokens pushed since the last call; the guidance after them comes in the background."""
        tokens, guide.unfollowed = guide.unfollowed, []
        self._jobs.put((guide, tokens, guide.num_output))

    def wait(self, guides: Iterable[Guide], timeout_s: float) -> None:
        """Until each has its guidance, or the time is over."""
        asked = list(guides)
        with self._fresh:
            self._fresh.wait_for(lambda: all(guide.guidance is not None for guide in asked), timeout_s)

    def counters(self) -> dict[str, float]:
        """grammar_masks and grammar_s (what following and masking took), grammars_compiled, grammar_compile_s, grammars_refused, grammar_cache_bytes."""
        return dict(self._counters)

    def close(self) -> None:
        self._jobs.put(None)
        self._compilers.shutdown(wait=False, cancel_futures=True)
        if self._grammars is not None:
            self._grammars.close()

    # ---- background

    def _open(self, guide: Guide) -> None:
        started = time.monotonic()
        try:
            from xgrammar import GrammarMatcher

            grammars = self._library()
            compiled: CompiledGrammar = grammars.compile(guide.grammar)
            guide.begin(GrammarMatcher(compiled), self._json_tokens)
        except InvalidRequest as error:  # perhaps of another request with the same grammar
            self._counters["grammars_refused"] += 1
            self._refuse(guide, InvalidRequest(error.message, field=guide.grammar.field))
            return
        except HeadraceError as error:
            self._refuse(guide, error)
            return
        except Exception as error:
            log.exception("a grammar was not compiled")
            self._refuse(guide, Unavailable(f"the grammar was not compiled: {error}"))
            return
        with self._lock:
            self._counters["grammars_compiled"] += 1
            self._counters["grammar_compile_s"] += time.monotonic() - started
            self._counters["grammar_cache_bytes"] = grammars.cached_bytes
        self._on_engine(lambda: self.follow(guide))

    def _library(self) -> "Grammars":
        from engine.grammars import Grammars

        with self._lock:
            if self._grammars is None:
                self._json_tokens = json_tokens(self._tokenizer)
                self._grammars = Grammars(self._tokenizer, self._cache_bytes)
            return self._grammars

    def _refuse(self, guide: Guide, error: HeadraceError) -> None:
        self._on_engine(lambda: guide.refuse(error))

    def _loop(self) -> None:
        while (job := self._jobs.get()) is not None:
            guide, tokens, num_output = job
            started = time.perf_counter()
            try:
                guide.follow(tokens, num_output, self._tokenizer)
                spent = time.perf_counter() - started
                if spent > STEP_LIMIT_S:
                    raise InvalidRequest(f"{guide.grammar.kind}: too ambiguous to be followed token by token", field=guide.grammar.field)
            except HeadraceError as error:
                self._refuse(guide, error)
                continue
            except Exception as error:
                log.exception("a grammar could not be followed")
                self._refuse(guide, HeadraceError(f"the grammar could not be followed: {error}"))
                continue
            self._counters["grammar_masks"] += 1
            self._counters["grammar_s"] += spent
            with self._fresh:
                self._fresh.notify()
            if guide.is_overdue:
                self._on_engine(lambda: None)


def mask_of(tokens: Iterable[int], vocab_size: int) -> torch.Tensor:
    """That allows these tokens alone."""
    bits = torch.zeros(-(-vocab_size // 32) * 32, dtype=torch.bool)
    bits[list(tokens)] = True
    words = (bits.view(-1, 32).to(torch.int64) << torch.arange(32)).sum(dim=-1)
    return words.to(torch.int32)  # wraps: bit 31 is the sign


def json_tokens(tokenizer: Tokenizer) -> torch.Tensor:
    """Mask of the tokens without control characters: JSON has them escaped alone, and the grammars of bounded strings do not say so."""
    return mask_of((token for token in range(tokenizer.vocab_size) if min(tokenizer.token_bytes(token), default=32) >= 32), tokenizer.vocab_size)


def _span_of(prompt: Iterable[int], marks: tuple[int, int] | None) -> Span:
    """A prompt may end within a thought (the template opened it), or have closed it, or leave it to the model."""
    if marks is None:
        return Span.ANSWER
    last = next((token for token in reversed(tuple(prompt)) if token in marks), None)
    return Span.BEFORE if last is None else Span.THINKING if last == marks[0] else Span.ANSWER


def _mark_ids(tokenizer: Tokenizer, marks: tuple[str, str] | None) -> tuple[int, int] | None:
    """The ids of the marks, where the model has both as tokens."""
    ids = [tokenizer.token_id(mark) for mark in marks or ()]
    return (ids[0], ids[1]) if len(ids) == 2 and ids[0] is not None and ids[1] is not None else None
