"""A request inside the engine: its tokens, its blocks and how far it is. Owns the state machine; knows nothing of scheduling or models.

Invariants: `num_computed` <= `num_stored` <= len(tokens). Positions below `num_stored` have their KV in `blocks`; positions from `num_computed` on
go through the model next. The two differ by one only on a full prefix hit: the last token is computed again for its logits and not written.
"""

import time
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum

from engine.detokenizer import Detokenizer
from engine.guide import Guide
from engine.lora import Adapter
from engine.pooling import Pooling
from engine.token_rules import TokenRules
from kvstore.hashing import BlockHash, block_hashes
from protocol.errors import IllegalTransition
from protocol.logprobs import TokenLogprob
from protocol.request import GenerationRequest

SequenceKey = tuple[str, int]  # request id, attempt


class SequenceState(Enum):
    WAITING = "waiting"  # for blocks and a place in the batch
    LOADING = "loading"  # has blocks; their KV is on its way from the store, bounded by a deadline
    RUNNING = "running"
    FINISHED = "finished"


TRANSITIONS = {
    SequenceState.WAITING: {SequenceState.LOADING, SequenceState.RUNNING, SequenceState.FINISHED},
    SequenceState.LOADING: {SequenceState.RUNNING, SequenceState.FINISHED},
    SequenceState.RUNNING: {SequenceState.WAITING, SequenceState.FINISHED},
    SequenceState.FINISHED: set(),
}


class Export(Enum):
    """Which blocks of a sequence the engine offers to whoever moves KV."""

    NONE = "none"
    COMPUTED = "computed"  # full blocks that this worker computed: write-back
    ALL = "all"  # every block of the prompt, the partly filled last one too: hand-off


@dataclass(frozen=True, slots=True)
class Submission:
    """`one_token`: the sequence ends with its first new token (prefill phase). `load`: look for missing prefix blocks outside the pool.
    `handoff_tokens`: KV of so many leading tokens was pushed for this request; `private_block` names its last, partly filled block."""

    request: GenerationRequest
    one_token: bool = False
    load: bool = False
    export: Export = Export.NONE
    handoff_tokens: int = 0
    private_block: BlockHash | None = None


@dataclass(slots=True)
class Tally:
    """What was done for the sequence; protocol message Work says what each means."""

    computed_tokens: int = 0
    computed_prompt_tokens: int = 0
    reused_device_tokens: int = 0
    reused_store_tokens: int = 0
    cached_tokens: int = 0
    handoff_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0


@dataclass(slots=True)
class Times:
    """Unix seconds; 0 while it has not happened."""

    queued: float = field(default_factory=time.time)
    started: float = 0.0
    kv_ready: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0


class Sequence:
    """`rules`, `guide`: what the request and its grammar say about the next token. `prompt_logprobs`: from the prompt's second token on, as computed.
    `pooling`: an embedding is wanted; such a sequence ends with its prompt."""

    def __init__(
        self,
        submission: Submission,
        block_tokens: int,
        salt: bytes,
        detokenizer: Detokenizer,
        arrival: int,
        eos_token_ids: Collection[int] = (),
        adapter: Adapter | None = None,
    ) -> None:
        request = submission.request
        self.submission = submission
        self.request = request
        self.block_tokens = block_tokens
        self.detokenizer = detokenizer
        self.rules = TokenRules(request, eos_token_ids)
        self.guide: Guide | None = None
        self.prompt_logprobs: list[TokenLogprob] = []
        self.adapter = adapter
        self.pooling = Pooling(request.pooling, len(request.prompt_tokens)) if request.pooling else None
        self.order = (request.priority, arrival)
        self.state = SequenceState.WAITING
        self.tokens: list[int] = [*request.prompt_tokens, *request.output_tokens]
        self.num_prompt = len(request.prompt_tokens)
        self.num_given = len(self.tokens)  # tokens that came with the request: prompt and answer so far
        self.num_computed = 0
        self.num_stored = 0
        self.blocks: list[int] = []
        self.num_named = 0  # leading blocks that have their hash in the pool
        self.num_shared = 0  # leading blocks that were in the pool at admission: others may hold them too
        self.hashes = block_hashes(self.tokens, block_tokens, salt)
        self._salt = salt
        self.tally = Tally()
        self.times = Times()

    @property
    def key(self) -> SequenceKey:
        return self.request.key

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_remaining(self) -> int:
        """Tokens to go through the model before the next one can be sampled."""
        return len(self.tokens) - self.num_computed

    @property
    def num_to_score(self) -> int:
        """Prompt positions whose logits are wanted beside the last one's: all but the last, where the request asks for the prompt's logprobs."""
        return self.num_prompt - 1 if self.request.wants_prompt_logprobs else 0

    @property
    def may_reuse(self) -> bool:
        """Whether KV from elsewhere may stand in for computing; not while positions have to go through the model for their logits."""
        return len(self.prompt_logprobs) >= self.num_to_score and (self.pooling is None or not self.pooling.needs_all)

    def positions_to_score(self, num_tokens: int) -> range:
        """Those of the next `num_tokens` positions whose logits give the prompt logprobs that are still missing."""
        start = max(self.num_computed, len(self.prompt_logprobs))
        return range(start, max(start, min(self.num_computed + num_tokens, self.num_to_score)))

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)

    def move(self, state: SequenceState) -> None:
        if state not in TRANSITIONS[self.state]:
            raise IllegalTransition(f"sequence {self.key}: {self.state.value} -> {state.value}")
        self.state = state

    def hold(self, num_tokens: int) -> None:
        """The first `num_tokens` have their KV in the blocks; at least the last token is still to be computed."""
        self.num_stored = num_tokens
        self.num_computed = min(num_tokens, len(self.tokens) - 1)

    def advance(self, num_tokens: int) -> None:
        """`num_tokens` more went through the model."""
        prompt_left = max(0, self.num_prompt - self.num_computed)
        self.tally.computed_tokens += num_tokens
        self.tally.computed_prompt_tokens += min(num_tokens, prompt_left)
        self.num_computed += num_tokens
        self.num_stored = max(self.num_stored, self.num_computed)

    @property
    def waits_for_guide(self) -> bool:
        """Its logits were computed once already and could not be used: nothing to do before its grammar says what may come."""
        return self.guide is not None and self.guide.is_overdue and self.num_remaining == 1 and self.guide.guidance is None

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.rules.push(token)
        if self.guide is not None:
            self.guide.push(token)
        full = len(self.tokens) // self.block_tokens
        if full > len(self.hashes):
            parent = self.hashes[-1] if self.hashes else self._salt
            start = (full - 1) * self.block_tokens
            self.hashes += block_hashes(self.tokens[start : start + self.block_tokens], self.block_tokens, self._salt, parent)

    def reset(self) -> None:
        """Back to the start, tokens kept: preemption by recompute. The caller took the blocks."""
        self.blocks = []
        self.num_computed = self.num_stored = self.num_named = self.num_shared = 0
        self.tally.preemptions += 1
        if self.pooling is not None:
            self.pooling.reset()
