"""The loop around the scheduler: commands in, events out, one step after the other on a thread of its own. Knows nothing of the network, Ray or HTTP.

Invariants:
- Scheduler, pool and sequences are touched by the engine thread alone; others talk to it through `submit`, `abort`, `loaded` and `unpin`.
- Without work the thread sleeps; it wakes for a command or the next deadline.
- Blocks of an Exported event are pinned until the receiver says `unpin`; every Load event is answered by one `loaded`.
"""

import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

import torch

from engine.adapters import Adapters, Done
from engine.batch_builder import build_batch
from engine.block_pool import BlockPool
from engine.config import EngineConfig
from engine.detokenizer import Detokenizer
from engine.events import Admitted, Chunk, EngineStatus, Event, Exported, Failed, Load, stage_of
from engine.guide import Guides
from engine.lora import Adapter
from engine.pooling import pool_hidden
from engine.runner import Runner
from engine.sampler import Chosen, choose, score
from engine.scheduler import LoadItem, Plan, Scheduler
from engine.sequence import Export, Sequence, SequenceKey, SequenceState, Submission
from engine.stopwatch import Stopwatch
from engine.tokenizer import Tokenizer
from engine.turn import forced_of, turn_of
from kvstore.hashing import request_salt
from protocol.errors import Cancelled, ContextTooLong, DeadlineExceeded, HeadraceError, InvalidRequest, UnknownModel

log = logging.getLogger(__name__)

GUIDE_WAIT_S = 0.002  # for the forced tokens after a step; what takes longer comes a step later


class Engine:
    """`deliver` is called on the engine thread with the events of a step; it must return at once. `adapters`: loaded from the start."""

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int,
        runner: Runner,
        tokenizer: Tokenizer,
        salt: str,
        deliver: Callable[[list[Event]], None],
        adapters: Iterable[Adapter] = (),
    ) -> None:
        self._config = config
        self._runner = runner
        self._tokenizer = tokenizer
        self._salt = salt
        self._deliver = deliver
        self._pool = BlockPool(num_blocks, config.prefix_cache)
        self._scheduler = Scheduler(config, self._pool)
        self._adapters = Adapters(config.lora.max_loaded, adapters)
        self._num_blocks = num_blocks
        self._commands: list[Callable[[], None]] = []
        self._events: list[Event] = []
        self._pinned: Counter[int] = Counter()
        self._guides = Guides(tokenizer, config.grammar_cache_bytes, config.reasoning_marks, self._command)
        self._arrivals = 0
        self._wake = threading.Condition()
        self._closing = False
        self._counters: defaultdict[str, float] = defaultdict(float)
        self._stopwatch = Stopwatch(self._counters)
        self._status = EngineStatus(blocks_total=num_blocks, blocks_free=num_blocks, adapters=self._adapters.loaded)
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout_s: float = 30.0) -> None:
        """End after the step that is running; sequences are dropped."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(timeout_s)
        self._guides.close()

    @property
    def is_alive(self) -> bool:
        """False once the thread has ended, by a fault too: nothing that was submitted will be answered then."""
        return self._thread.is_alive()

    def submit(self, submission: Submission) -> None:
        self._command(lambda: self._add(submission))

    def abort(self, key: SequenceKey) -> None:
        """The sequence ends without a further event of its own; a pending load still wants its `loaded`."""
        self._command(lambda: self._abort(key))

    def loaded(self, key: SequenceKey, num_items: int) -> None:
        self._command(lambda: self._loaded(key, num_items))

    def unpin(self, blocks: list[int]) -> None:
        self._command(lambda: self._unpin(blocks))

    def load_adapter(self, adapter: Adapter, done: Done) -> None:
        """`done` is called on the engine thread, with what speaks against it."""
        self._command(lambda: self._adapters.load(adapter, done))

    def unload_adapter(self, name: str, done: Done) -> None:
        """`done` is called on the engine thread, when no sequence uses the adapter any more."""
        self._command(lambda: self._adapters.unload(name, done))

    @property
    def status(self) -> EngineStatus:
        """A snapshot of the last step."""
        return self._status

    # ---- engine thread

    def _loop(self) -> None:
        idle = False
        while True:
            with self._wake:
                if idle and not self._commands and not self._closing:
                    self._wake.wait(self._nap_s())
                if self._closing:
                    return
                commands, self._commands = self._commands, []
            self._stopwatch.lap("idle_s")
            for command in commands:
                command()
            self._stopwatch.lap("command_s")
            idle = not self._round()
            self._flush()
            if idle and self._config.check_integrity and self._scheduler.is_idle:
                self._check_integrity()
            self._stopwatch.lap("update_s")

    def _nap_s(self) -> float | None:
        deadline = self._scheduler.next_deadline()
        return None if deadline is None else max(0.001, deadline - time.time())

    def _round(self) -> bool:
        """A plan and the steps that follow from it; False when there was nothing to do."""
        plan = self._scheduler.schedule(time.time())
        self._counters["scheduling_rounds"] += 1
        self._stopwatch.lap("schedule_s")
        for sequence in plan.expired:
            self._counters["expired"] += 1
            self._fail(sequence, DeadlineExceeded("the request's deadline passed", stage=stage_of(sequence)))
        for sequence in plan.admitted:
            self._events.append(Admitted(sequence))
            self._export(sequence, range(sequence.num_named), admitted=True)
        self._events += [Load(sequence, items) for sequence, items in plan.loads]
        plan.scheduled = [(sequence, num_tokens) for sequence, num_tokens in plan.scheduled if not sequence.waits_for_guide]
        if plan.scheduled:
            self._flush()
            self._steps(plan)
        return bool(plan.scheduled or plan.loads or plan.expired)

    def _steps(self, plan: Plan) -> None:
        """The plan's step, and decode steps after it while nobody waits: neither a sequence in the scheduler nor a command."""
        for left in reversed(range(self._config.num_continuous_decode_steps)):
            self._run(plan)
            busy = self._commands or self._closing or any(sequence.waits_for_guide for sequence, _ in plan.scheduled)
            following = self._scheduler.again(plan, time.time()) if left and not busy else None
            if following is None:
                return
            self._flush()
            plan = following

    def _run(self, plan: Plan) -> None:
        ready = [sequence for sequence, num_tokens in plan.scheduled if num_tokens == sequence.num_remaining]
        done = [sequence for sequence in ready if sequence.pooling is None]
        batch = build_batch(plan.scheduled, self._config.block_tokens)
        self._stopwatch.lap("build_s")
        try:
            logits = self._runner.run(batch)
            self._stopwatch.lap("run_s")
            turns = [turn_of(sequence, self._tokenizer.vocab_size) for sequence in done]
            rows = [row for row, turn in enumerate(turns) if turn.choice is not None]
            choices = [turn.choice for turn in turns if turn.choice is not None]
            chosen = choose(logits[: len(done)] if len(rows) == len(done) else logits[rows], choices)
        except Exception:
            self._run_alone(plan)
            return
        pool_hidden(plan.scheduled, batch)
        score_prompts(plan, logits[len(done) :])
        self._stopwatch.lap("sample_s")
        held = {sequence for sequence, turn in zip(done, turns, strict=True) if turn.is_held}
        self._counters["grammar_waits"] += len(held)
        for sequence, num_tokens in plan.scheduled:
            sequence.advance(num_tokens - (sequence in held))
            self._export(sequence, self._scheduler.name_blocks(sequence))
        for row, one in zip(rows, chosen, strict=True):
            self._take(done[row], one)
        for sequence, turn in zip(done, turns, strict=True):
            self._take_forced(sequence, turn.forced)
        for sequence in ready:
            self._take_pooled(sequence)
        self._look_ahead([sequence for sequence in done if sequence not in held])
        self._counters["steps"] += 1
        self._counters["scheduled_tokens"] += sum(num_tokens for _, num_tokens in plan.scheduled)
        self._stopwatch.lap("update_s")

    def _look_ahead(self, grown: list[Sequence]) -> None:
        """Follow the grammars, and let the next step compute what they force at once; masks come while it runs."""
        guided = [(sequence, sequence.guide) for sequence in grown if sequence.guide is not None and sequence.state is not SequenceState.FINISHED]
        if not guided:
            return
        for _, guide in guided:
            self._guides.follow(guide)
        self._guides.wait((guide for _, guide in guided), GUIDE_WAIT_S)
        for sequence, guide in guided:
            if self._take_forced(sequence, forced_of(sequence)) and sequence.state is not SequenceState.FINISHED:
                self._guides.follow(guide)

    def _take_forced(self, sequence: Sequence, tokens: tuple[int, ...]) -> int:
        """Append what must come anyway; how many tokens that were."""
        taken = 0
        for token in tokens:
            if sequence.state is SequenceState.FINISHED or token in sequence.rules.banned:
                break
            self._take(sequence, Chosen(token))
            taken += 1
        self._counters["forced_tokens"] += taken
        return taken

    def _run_alone(self, plan: Plan) -> None:
        """A step failed: whoever fails again alone is at fault, and the others go on. Nothing of the failed step was taken over."""
        log.exception("a step of %d sequences failed", len(plan.scheduled))
        self._counters["failed_steps"] += 1
        if len(plan.scheduled) > 1:
            for one in plan.scheduled:
                self._run(Plan(scheduled=[one]))
            return
        sequence, _ = plan.scheduled[0]
        self._scheduler.drop(sequence)
        self._fail(sequence, HeadraceError("the model step failed on this worker"))

    def _fail(self, sequence: Sequence, error: HeadraceError) -> None:
        self._events.append(Failed(sequence.key, error, sequence.tally))

    def _take(self, sequence: Sequence, chosen: Chosen) -> None:
        """A new token: text, stop conditions, and the event."""
        if (token := chosen.token) is None:
            self._scheduler.drop(sequence)
            self._fail(sequence, InvalidRequest("the request's own bans and masks leave no token that may come next"))
            return
        first = sequence.num_output == 0
        sequence.append(token)
        sequence.times.first_token = sequence.times.first_token or time.time()
        shows = sequence.request.sampling.include_stop or not self._stops(sequence, token)
        text = sequence.detokenizer.push([token]) if shows else ""
        reason = self._finish_reason(sequence, token)
        if reason in ("stop", "length"):
            text += sequence.detokenizer.finish()
        if reason:
            self._export_rest(sequence)
            self._scheduler.finish(sequence)
        self._counters["generated_tokens"] += 1
        logprobs = [chosen.logprob] if chosen.logprob is not None else []
        self._events.append(Chunk(sequence, [token], text, reason, logprobs, sequence.prompt_logprobs if first else []))

    def _take_pooled(self, sequence: Sequence) -> None:
        """The end of a sequence that wants an embedding: its prompt is through."""
        if sequence.pooling is not None:
            sequence.times.first_token = time.time()
            self._scheduler.drop(sequence)
            self._counters["embeddings"] += 1
            self._events.append(Chunk(sequence, [], "", "stop", embedding=sequence.pooling.result()))

    def _stops(self, sequence: Sequence, token: int) -> bool:
        sampling = sequence.request.sampling
        return token in sampling.stop_token_ids or (token in self._tokenizer.stop_token_ids and not sampling.ignore_eos)

    def _finish_reason(self, sequence: Sequence, token: int) -> str:
        sampling = sequence.request.sampling
        if sequence.detokenizer.stopped or self._stops(sequence, token):
            return "stop"
        if sequence.num_output >= sampling.max_tokens or sequence.num_tokens >= self._config.max_context_tokens:
            return "length"
        return "handoff" if sequence.submission.one_token else ""

    def _export(self, sequence: Sequence, indices: range, admitted: bool = False) -> None:
        wanted = sequence.submission.export is Export.ALL or (sequence.submission.export is Export.COMPUTED and not admitted)
        if wanted and indices:
            self._pin(sequence, [LoadItem(sequence.blocks[i], sequence.hashes[i], sequence.block_tokens) for i in indices])

    def _export_rest(self, sequence: Sequence) -> None:
        """The partly filled last block of a hand-off."""
        name, rest = sequence.submission.private_block, sequence.num_given % sequence.block_tokens
        if sequence.submission.export is Export.ALL and name is not None and rest:
            self._pin(sequence, [LoadItem(sequence.blocks[sequence.num_given // sequence.block_tokens], name, rest, private=True)])

    def _pin(self, sequence: Sequence, items: list[LoadItem]) -> None:
        blocks = [item.block for item in items]
        self._pool.refer(blocks)
        self._pinned.update(blocks)
        self._events.append(Exported(sequence, items))

    # ---- commands, on the engine thread

    def _command(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def _add(self, submission: Submission) -> None:
        try:
            sequence = self._new_sequence(submission)
        except HeadraceError as error:
            self._events.append(Failed(submission.request.key, error))
        except Exception:  # one request that cannot begin must not end the thread, and with it all others
            log.exception("request %s cannot begin", submission.request.key)
            self._events.append(Failed(submission.request.key, HeadraceError("the request cannot begin on this worker")))
        else:
            if submission.request.sampling.grammar is not None:
                sequence.guide = self._guides.open(submission.request, lambda error: self._refuse(sequence, error))
            self._scheduler.add(sequence)

    def _new_sequence(self, submission: Submission) -> Sequence:
        """Raises what speaks against the request on this worker."""
        request, sampling = submission.request, submission.request.sampling
        given = (*request.prompt_tokens, *request.output_tokens)
        most = min(len(request.prompt_tokens) + sampling.max_tokens, self._config.max_context_tokens)
        if request.key in self._scheduler:
            raise HeadraceError(f"request {request.key} is here already")
        if not given or min(given) < 0 or max(given) >= self._runner.vocab_size:
            raise InvalidRequest(f"prompt: token ids are 0 to {self._runner.vocab_size - 1} for this model", field="prompt")
        if len(given) >= self._config.max_context_tokens or -(-most // self._config.block_tokens) > self._num_blocks:
            raise ContextTooLong(f"{most} tokens do not fit this worker", field="max_tokens")
        adapter = self._adapters.find(request.adapter, request.adapter_revision)
        if request.adapter and adapter is None:
            revision = f" in revision {request.adapter_revision}" if request.adapter_revision else ""
            raise UnknownModel(f"adapter {request.adapter!r} is not loaded here{revision}", field="model")
        detokenizer = Detokenizer(self._tokenizer, request.prompt_tokens, sampling.stop, sampling.include_stop, sampling.min_tokens)
        detokenizer.push(list(request.output_tokens))
        salt = request_salt(self._salt, request.tenant, request.adapter, adapter.revision if adapter is not None else "")
        self._arrivals += 1
        return Sequence(submission, self._config.block_tokens, salt, detokenizer, self._arrivals, self._tokenizer.stop_token_ids, adapter)

    def _refuse(self, sequence: Sequence, error: HeadraceError) -> None:
        if self._scheduler.get(sequence.key) is sequence:
            self._scheduler.drop(sequence)
            self._fail(sequence, error)

    def _abort(self, key: SequenceKey) -> None:
        sequence = self._scheduler.get(key)
        if sequence is not None:
            self._counters["aborted"] += 1
            self._scheduler.drop(sequence)
            self._fail(sequence, Cancelled("aborted"))

    def _loaded(self, key: SequenceKey, num_items: int) -> None:
        outcome = self._scheduler.loaded(key, num_items)
        if outcome is not None:
            self._export(*outcome, admitted=True)

    def _unpin(self, blocks: list[int]) -> None:
        self._pinned.subtract(blocks)
        self._pinned = +self._pinned
        self._pool.release(blocks)

    def _flush(self) -> None:
        """Publish the status, then the events."""
        counts = self._pool.counts()
        self._counters["evictions"] = self._pool.evictions
        self._counters["preemptions"] = self._scheduler.preemptions
        self._status = EngineStatus(
            steps=int(self._counters["steps"]),
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            waiting_tokens=self._scheduler.waiting_tokens,
            blocks_total=counts.total,
            blocks_free=counts.free,
            blocks_cached=counts.cached,
            adapters=self._adapters.loaded,
            counters=dict(self._counters) | self._guides.counters(),
        )
        self._adapters.settle(self._scheduler.uses)
        if self._events:
            events, self._events = self._events, []
            self._deliver(events)

    def _check_integrity(self) -> None:
        violations = self._scheduler.check_integrity(list(self._pinned.elements()))
        self._counters["integrity_violations"] += len(violations)
        for violation in violations:
            log.error("integrity: %s", violation)


def score_prompts(plan: Plan, logits: torch.Tensor) -> None:
    """Take the prompt logprobs that this step computed; `logits`: the rows after those that are sampled from. Called before the sequences advance."""
    start = 0
    for sequence, num_tokens in plan.scheduled:
        positions = sequence.positions_to_score(num_tokens)
        rows = logits[start : start + len(positions)]
        following = sequence.tokens[positions.start + 1 : positions.stop + 1]
        sequence.prompt_logprobs += score(rows, following, sequence.request.sampling.prompt_logprobs or 0)
        start += len(positions)
