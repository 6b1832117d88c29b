"""Who runs in the next step. Owns waiting, loading and running sequences and their blocks; knows nothing of tensors, text or the network.

There are no prefill and decode phases: a sequence only has computed < total tokens. Received KV is a sequence whose computed count starts high, and so
is a preempted one that comes back: it finds its blocks in the pool, loads those that were written back, and computes the rest.
Invariants (check_integrity):
- A sequence is in exactly one of waiting, loading, running; only the last two hold blocks.
- A hash in `_in_flight` is being computed or loaded by exactly one admitted sequence; others that want it wait for it (single flight).
- Blocks that a load may still write to are not released before its `loaded` call, whatever happens to the sequence.
"""

import time
from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from engine.admission import open_admission
from engine.block_pool import BlockPool
from engine.config import EngineConfig
from engine.lora import Adapter
from engine.predictor import LengthPredictor, Outlook, peak_growth
from engine.sequence import Sequence, SequenceKey, SequenceState
from engine.waiting import TenantShares, WaitingQueue
from kvstore.hashing import BlockHash

OUTPUT_WEIGHT = 2  # of a generated token in a tenant's share; a computed prompt token counts one


@dataclass(frozen=True, slots=True)
class LoadItem:
    """KV wanted from outside: `num_tokens` leading tokens of a block; `private`: the request's own, partly filled one."""

    block: int
    hash: BlockHash
    num_tokens: int
    private: bool = False


@dataclass(slots=True)
class Plan:
    """`scheduled`: how many tokens of which sequence go through the model now."""

    scheduled: list[tuple[Sequence, int]] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    loads: list[tuple[Sequence, list[LoadItem]]] = field(default_factory=list)
    expired: list[Sequence] = field(default_factory=list)


class Scheduler:
    def __init__(self, config: EngineConfig, pool: BlockPool) -> None:
        self._config = config
        self._pool = pool
        self._sequences: dict[SequenceKey, Sequence] = {}
        self._predictor = LengthPredictor()
        self._shares = TenantShares()
        self._waiting = WaitingQueue(open_admission(config.admission, pool, self._predictor), self._shares, config.age_cap_s)
        self._running: list[Sequence] = []
        self._loading: dict[SequenceKey, list[LoadItem]] = {}
        self._orphans: dict[SequenceKey, list[int]] = {}  # blocks of ended sequences whose load is still under way
        self._in_flight: dict[BlockHash, SequenceKey] = {}
        self._chunks_turn = False
        self.preemptions = 0

    def __contains__(self, key: SequenceKey) -> bool:
        return key in self._sequences

    def add(self, sequence: Sequence) -> None:
        self._sequences[sequence.key] = sequence
        self._shares.enter(sequence.request.tenant)
        self._waiting.add(sequence)

    def get(self, key: SequenceKey) -> Sequence | None:
        return self._sequences.get(key)

    def uses(self, adapter: Adapter) -> bool:
        return any(sequence.adapter is adapter for sequence in self._sequences.values())

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._loading)

    @property
    def waiting_tokens(self) -> int:
        return sum(sequence.num_remaining for sequence in self._sequences.values() if sequence.num_remaining > 1)

    @property
    def is_idle(self) -> bool:
        return not self._sequences and not self._orphans

    def waits_for_prefix(self, sequence: Sequence) -> bool:
        """Whether another sequence is computing or loading the block that this one would begin with."""
        return self._is_awaited(sequence, self._pool.match(sequence.hashes))

    def next_deadline(self) -> float | None:
        return min((sequence.request.deadline for sequence in self._sequences.values()), default=None)

    def schedule(self, now: float) -> Plan:
        plan = Plan(expired=[sequence for sequence in self._sequences.values() if sequence.request.deadline <= now])
        for sequence in plan.expired:
            self.drop(sequence)
        self._grow_running()
        self._admit(plan, now)
        self._fill_budget(plan)
        return plan

    def again(self, plan: Plan, now: float) -> Plan | None:
        """The next step of the same round: one more token for each sequence of `plan`. None when a new plan is due: somebody waits, ended or reached the
        deadline, a prompt is not through yet, or the pool has no blocks left to grow into."""
        batch = [sequence for sequence, _ in plan.scheduled]
        if self.num_waiting or len(batch) != len(self._running) or any(it.state is not SequenceState.RUNNING or it.num_remaining > 1 for it in batch):
            return None
        if min(sequence.request.deadline for sequence in batch) <= now or not all(self._try_grow(sequence) for sequence in batch):
            return None
        following = Plan()
        for sequence in batch:
            self._schedule(sequence, 1, following)
        return following

    def loaded(self, key: SequenceKey, num_items: int) -> tuple[Sequence, range] | None:
        """A load ended: its first `num_items` items are good. To be called once for every load. The sequence and the indices of its newly
        filled blocks; None when the sequence has ended meanwhile."""
        orphaned = self._orphans.pop(key, None)
        if orphaned is not None:
            self._pool.release(orphaned)
            return None
        sequence = self._sequences[key]
        items = self._loading.pop(key)[:num_items]
        tokens = sum(item.num_tokens for item in items)
        expected = 0 if sequence.tally.preemptions else max(0, sequence.submission.handoff_tokens - sequence.num_stored)
        sequence.tally.reused_store_tokens += tokens
        if not sequence.tally.preemptions and not sequence.submission.handoff_tokens:
            sequence.tally.cached_tokens += tokens
        sequence.tally.recomputed_tokens += max(0, expected - tokens)
        if not sequence.tally.preemptions:
            self._shares.charge(sequence.request.tenant, -tokens)  # charged at admission as if to be computed
        sequence.hold(sequence.num_stored + tokens)
        sequence.times.kv_ready = time.time()
        fresh = self.name_blocks(sequence)
        self._run(sequence)
        return sequence, fresh

    def finish(self, sequence: Sequence) -> None:
        """The sequence came to its natural end: its length is learnt."""
        if not sequence.submission.one_token:
            self._predictor.learn(sequence)
        self.drop(sequence)

    def drop(self, sequence: Sequence) -> None:
        """The sequence ends, for whatever reason; its blocks go back to the pool, at once or when its load has ended."""
        if sequence.state is SequenceState.WAITING:
            self._waiting.remove(sequence)
        elif sequence.state is SequenceState.RUNNING:
            self._running.remove(sequence)
        if sequence.state is SequenceState.LOADING:
            del self._loading[sequence.key]
            self._orphans[sequence.key] = sequence.blocks
        else:
            self._pool.release(sequence.blocks)
        self._land(sequence)
        self._shares.leave(sequence.request.tenant)
        sequence.blocks = []
        sequence.move(SequenceState.FINISHED)
        sequence.times.finished = time.time()
        del self._sequences[sequence.key]

    def name_blocks(self, sequence: Sequence) -> range:
        """Make newly filled blocks matchable; returns their indices."""
        full = min(sequence.num_stored // sequence.block_tokens, len(sequence.hashes))
        fresh = range(sequence.num_named, full)
        for index in fresh:
            self._pool.name(sequence.blocks[index], sequence.hashes[index])
            if self._in_flight.get(sequence.hashes[index]) == sequence.key:
                del self._in_flight[sequence.hashes[index]]
        sequence.num_named = max(sequence.num_named, full)
        return fresh

    def check_integrity(self, pinned: Many[int] = ()) -> list[str]:
        """Broken laws in words; `pinned`: blocks that someone outside holds for export, once for each hold."""
        references: dict[int, int] = {}
        held = [block for sequence in self._sequences.values() for block in sequence.blocks]
        for block in [*held, *(block for blocks in self._orphans.values() for block in blocks), *pinned]:
            references[block] = references.get(block, 0) + 1
        violations = self._pool.check_integrity(references)
        if len(self._waiting) + len(self._running) + len(self._loading) != len(self._sequences):
            violations.append("scheduler: a sequence is in no list or in several")
        if any(sequence.blocks for sequence in self._waiting):
            violations.append("scheduler: a waiting sequence holds blocks")
        if not set(self._in_flight.values()) <= set(self._sequences):
            violations.append("scheduler: a hash in flight belongs to no sequence")
        return violations

    def _grow_running(self) -> None:
        """Each running sequence gets the blocks for its tokens, the most urgent first, at the expense of the least urgent."""
        for sequence in sorted(self._running, key=lambda other: other.order):
            while sequence.state is SequenceState.RUNNING and not self._try_grow(sequence):
                self._preempt(max(self._running, key=lambda other: other.order))

    def _try_grow(self, sequence: Sequence) -> bool:
        missing = sequence.blocks_for(sequence.num_tokens) - len(sequence.blocks)
        if missing <= 0:
            return True
        if not self._pool.can_allocate(missing):
            return False
        sequence.blocks += self._pool.allocate(missing)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._pool.release(sequence.blocks)
        self._land(sequence)
        sequence.reset()
        sequence.move(SequenceState.WAITING)
        self._waiting.add(sequence)
        self.preemptions += 1

    def _admit(self, plan: Plan, now: float) -> None:
        """Whoever cannot have a place stops the admission: nobody smaller overtakes it. Only who waits for a prefix in flight is passed over."""
        if not self._waiting or (self._is_full and self._victim_below(self._waiting.top_priority) is None):
            return
        for sequence in self._waiting.candidates(now):
            matched = self._pool.match(sequence.hashes) if sequence.may_reuse else []
            if self._is_awaited(sequence, matched):
                continue
            while not self._fits(sequence, matched):
                victim = self._victim_below(sequence.request.priority)
                if victim is None:
                    return
                self._preempt(victim)
            self._waiting.remove(sequence)
            self._start(sequence, matched, now)
            plan.admitted.append(sequence)
            self._load_or_run(sequence, plan)

    def _is_awaited(self, sequence: Sequence, matched: list[int]) -> bool:
        """Whether the first block that it misses is on its way."""
        return any(block_hash in self._in_flight for block_hash in sequence.hashes[len(matched) : len(matched) + 1])

    @property
    def _is_full(self) -> bool:
        return len(self._running) + len(self._loading) >= self._config.max_num_seqs

    def _victim_below(self, priority: int) -> Sequence | None:
        """The least urgent running sequence, where it is of a lower class."""
        victim = max(self._running, key=lambda other: other.order, default=None)
        return victim if victim is not None and victim.request.priority > priority else None

    def _fits(self, sequence: Sequence, matched: list[int]) -> bool:
        """Whether there is a place in the batch, and memory: what it needs now and, where others run too, what all are expected to need until each ends."""
        if self._is_full:
            return False
        missing = sequence.blocks_for(sequence.num_tokens) - len(matched)
        admitted = [*self._running, *(self._sequences[key] for key in self._loading)]
        if not admitted or not self._pool.can_allocate(missing, keeping=matched):
            return self._pool.can_allocate(missing, keeping=matched)
        outlooks = [Outlook(it.num_tokens, len(it.blocks), len(it.blocks) - it.num_shared, self._reserved(it)) for it in admitted]
        outlooks.append(Outlook(sequence.num_tokens, len(matched), 0, self._reserved(sequence)))
        return self._pool.can_allocate(peak_growth(outlooks, sequence.block_tokens), keeping=matched)

    def _reserved(self, sequence: Sequence) -> int:
        """Tokens for which the sequence's growth is planned: a block's worth at least, or admission would only cause preemption."""
        remaining = self._predictor.remaining(sequence)
        return max(min(remaining, sequence.block_tokens), round(remaining * self._config.reserved_output))

    def _start(self, sequence: Sequence, matched: list[int], now: float) -> None:
        self._pool.refer(matched)
        sequence.blocks = [*matched, *self._pool.allocate(sequence.blocks_for(sequence.num_tokens) - len(matched))]
        sequence.num_named = sequence.num_shared = len(matched)
        sequence.hold(len(matched) * sequence.block_tokens)
        found = len(matched) * sequence.block_tokens
        sequence.tally.reused_device_tokens += found
        sequence.tally.cached_tokens += 0 if sequence.tally.preemptions else found
        if not sequence.times.started:
            self._shares.charge(sequence.request.tenant, sequence.num_remaining)
        sequence.times.started = sequence.times.started or now
        self._in_flight |= dict.fromkeys(sequence.hashes[len(matched) :], sequence.key)

    def _load_or_run(self, sequence: Sequence, plan: Plan) -> None:
        items = list(load_items(sequence)) if sequence.submission.load and sequence.may_reuse else []
        if items:
            sequence.move(SequenceState.LOADING)
            self._loading[sequence.key] = items
            plan.loads.append((sequence, items))
        else:
            sequence.times.kv_ready = time.time()
            self._run(sequence)

    def _run(self, sequence: Sequence) -> None:
        sequence.move(SequenceState.RUNNING)
        self._running.append(sequence)

    def _land(self, sequence: Sequence) -> None:
        """The sequence computes and loads nothing any more: whoever waited for its blocks may start."""
        for block_hash in sequence.hashes:
            if self._in_flight.get(block_hash) == sequence.key:
                del self._in_flight[block_hash]

    def _fill_budget(self, plan: Plan) -> None:
        """Decodes first, so that a long prompt delays them by at most what may run beside them; then prompts in order of arrival."""
        budget = self._config.max_num_batched_tokens
        sequences = self._by_urgency()
        is_mixed = any(sequence.num_remaining == 1 for sequence in sequences)
        prompts = self._config.mixed_chunk_tokens if is_mixed and self._config.mixed_chunk_tokens else budget
        for sequence in sequences:
            if sequence.num_remaining == 1:
                num_tokens = min(1, budget)
            else:
                num_tokens = min(sequence.num_remaining, self._config.chunk_tokens, prompts, budget)
                prompts -= num_tokens
            if num_tokens <= 0:
                return
            self._schedule(sequence, num_tokens, plan)
            budget -= num_tokens

    def _by_urgency(self) -> list[Sequence]:
        """Without `mixed_chunk`, steps of chunks alone and steps of decodes alone take turns while there are both."""
        decodes = sorted((it for it in self._running if it.num_remaining == 1), key=lambda it: it.order)
        chunks = sorted((it for it in self._running if it.num_remaining > 1), key=lambda it: it.order)
        if self._config.mixed_chunk or not (decodes and chunks):
            return decodes + chunks
        self._chunks_turn = not self._chunks_turn
        return chunks if self._chunks_turn else decodes

    def _schedule(self, sequence: Sequence, num_tokens: int, plan: Plan) -> None:
        plan.scheduled.append((sequence, num_tokens))
        if num_tokens == sequence.num_remaining:
            self._shares.charge(sequence.request.tenant, OUTPUT_WEIGHT)


def load_items(sequence: Sequence) -> Iterator[LoadItem]:
    """What may lie outside the pool: the full blocks after the matched ones, and the private rest of a hand-off. A preempted sequence looks for all its
    full blocks, of the answer too, which were written back meanwhile."""
    handoff = 0 if sequence.tally.preemptions else sequence.submission.handoff_tokens
    full = handoff // sequence.block_tokens if handoff else len(sequence.hashes)
    first = sequence.num_named
    for index in range(first, full):
        yield LoadItem(sequence.blocks[index], sequence.hashes[index], sequence.block_tokens)
    rest = handoff % sequence.block_tokens
    if rest and first <= full and sequence.submission.private_block is not None:
        yield LoadItem(sequence.blocks[full], sequence.submission.private_block, rest, private=True)
