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
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from engine.batch_builder import build_batch
from engine.block_pool import BlockPool
from engine.config import EngineConfig
from engine.detokenizer import Detokenizer
from engine.runner import Runner
from engine.sampler import Choice, Chosen, choose, score
from engine.scheduler import LoadItem, Plan, Scheduler
from engine.sequence import Export, Sequence, SequenceKey, Submission
from engine.stopwatch import Stopwatch
from engine.tokenizer import Tokenizer
from kvstore.hashing import salt_of
from protocol.errors import Cancelled, ContextTooLong, DeadlineExceeded, HeadraceError, InvalidRequest
from protocol.logprobs import TokenLogprob
from protocol.request import GenerationRequest

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens and text of a sequence. `finish_reason`: "", "stop", "length", or "handoff" when a one-token sequence would go on.
    `logprobs`: one for each token, where the request asks; `prompt_logprobs`: with the first token of an answer, where it asks for these."""

    sequence: Sequence
    tokens: list[int]
    text: str
    finish_reason: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Failed:
    sequence: Sequence
    error: HeadraceError


@dataclass(frozen=True, slots=True)
class Admitted:
    """The sequence left the queue and has its blocks."""

    sequence: Sequence


@dataclass(frozen=True, slots=True)
class Load:
    """KV is wanted in these blocks; answer with `Engine.loaded`."""

    sequence: Sequence
    items: list[LoadItem]


@dataclass(frozen=True, slots=True)
class Exported:
    """Blocks whose KV is complete, pinned for the receiver."""

    sequence: Sequence
    items: list[LoadItem]


Event = Admitted | Chunk | Failed | Load | Exported


@dataclass(slots=True)
class EngineStatus:
    """The counters that end in `_s` part the engine thread's whole time: idle_s, command_s, schedule_s, build_s, run_s, sample_s, update_s."""

    steps: int = 0
    num_running: int = 0
    num_waiting: int = 0
    waiting_tokens: int = 0
    blocks_total: int = 0
    blocks_free: int = 0
    blocks_cached: int = 0
    counters: dict[str, float] = field(default_factory=dict)


class Engine:
    """`deliver` is called on the engine thread with the events of a step; it must return at once."""

    def __init__(self, config: EngineConfig, num_blocks: int, runner: Runner, tokenizer: Tokenizer, salt: str, deliver: Callable[[list[Event]], None]) -> None:
        self._config = config
        self._runner = runner
        self._tokenizer = tokenizer
        self._salt = salt
        self._deliver = deliver
        self._pool = BlockPool(num_blocks, config.prefix_cache)
        self._scheduler = Scheduler(config, self._pool)
        self._num_blocks = num_blocks
        self._commands: list[Callable[[], None]] = []
        self._events: list[Event] = []
        self._pinned: Counter[int] = Counter()
        self._arrivals = 0
        self._wake = threading.Condition()
        self._closing = False
        self._counters: defaultdict[str, float] = defaultdict(float)
        self._stopwatch = Stopwatch(self._counters)
        self._status = EngineStatus(blocks_total=num_blocks, blocks_free=num_blocks)
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout_s: float = 30.0) -> None:
        """End after the step that is running; sequences are dropped."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(timeout_s)

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
            self._events.append(Failed(sequence, DeadlineExceeded("the request's deadline passed", stage=stage_of(sequence))))
        for sequence in plan.admitted:
            self._events.append(Admitted(sequence))
            self._export(sequence, range(sequence.num_named), admitted=True)
        self._events += [Load(sequence, items) for sequence, items in plan.loads]
        if plan.scheduled:
            self._flush()
            self._steps(plan)
        return bool(plan.scheduled or plan.loads or plan.expired)

    def _steps(self, plan: Plan) -> None:
        """The plan's step, and decode steps after it while nobody waits: neither a sequence in the scheduler nor a command."""
        for left in reversed(range(self._config.num_continuous_decode_steps)):
            self._run(plan)
            following = self._scheduler.again(plan, time.time()) if left and not (self._commands or self._closing) else None
            if following is None:
                return
            self._flush()
            plan = following

    def _run(self, plan: Plan) -> None:
        done = [sequence for sequence, num_tokens in plan.scheduled if num_tokens == sequence.num_remaining]
        batch = build_batch(plan.scheduled, self._config.block_tokens)
        self._stopwatch.lap("build_s")
        try:
            logits = self._runner.run(batch)
            self._stopwatch.lap("run_s")
            score_prompts(plan, logits[len(done) :])
            chosen = choose(logits[: len(done)], [choice_of(sequence) for sequence in done])
        except Exception as error:
            self._fail_batch(plan, error)
            return
        self._stopwatch.lap("sample_s")
        for sequence, num_tokens in plan.scheduled:
            sequence.advance(num_tokens)
            self._export(sequence, self._scheduler.name_blocks(sequence))
        for sequence, one in zip(done, chosen, strict=True):
            self._take(sequence, one)
        self._counters["steps"] += 1
        self._counters["scheduled_tokens"] += sum(num_tokens for _, num_tokens in plan.scheduled)
        self._stopwatch.lap("update_s")

    def _fail_batch(self, plan: Plan, error: Exception) -> None:
        log.exception("step failed")
        self._counters["failed_steps"] += 1
        for sequence, _ in plan.scheduled:
            self._scheduler.drop(sequence)
            self._events.append(Failed(sequence, HeadraceError(f"the model step failed: {error}")))

    def _take(self, sequence: Sequence, chosen: Chosen) -> None:
        """A new token: text, stop conditions, and the event."""
        if (token := chosen.token) is None:
            self._scheduler.drop(sequence)
            self._events.append(Failed(sequence, InvalidRequest("the request's own bans and masks leave no token that may come next")))
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
        request = submission.request
        sampling = request.sampling
        detokenizer = Detokenizer(self._tokenizer, request.prompt_tokens, sampling.stop, sampling.include_stop, sampling.min_tokens)
        detokenizer.push(list(request.output_tokens))
        salt = salt_of(self._salt, request.tenant)
        sequence = Sequence(submission, self._config.block_tokens, salt, detokenizer, self._arrivals, self._tokenizer.stop_token_ids)
        self._arrivals += 1
        most = min(sequence.num_prompt + request.sampling.max_tokens, self._config.max_context_tokens)
        if unsupported := unsupported_by_engine(request):
            self._events.append(Failed(sequence, InvalidRequest(f"{unsupported}: not supported yet", field=unsupported)))
        elif sequence.num_tokens >= self._config.max_context_tokens or sequence.blocks_for(most) > self._num_blocks:
            self._events.append(Failed(sequence, ContextTooLong(f"{most} tokens do not fit this worker", field="max_tokens")))
        elif sequence.key in self._scheduler:
            self._events.append(Failed(sequence, HeadraceError(f"request {sequence.key} is here already")))
        else:
            self._scheduler.add(sequence)

    def _abort(self, key: SequenceKey) -> None:
        sequence = self._scheduler.get(key)
        if sequence is not None:
            self._counters["aborted"] += 1
            self._scheduler.drop(sequence)
            self._events.append(Failed(sequence, Cancelled("aborted")))

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
            counters=dict(self._counters),
        )
        if self._events:
            events, self._events = self._events, []
            self._deliver(events)

    def _check_integrity(self) -> None:
        violations = self._scheduler.check_integrity(list(self._pinned.elements()))
        self._counters["integrity_violations"] += len(violations)
        for violation in violations:
            log.error("integrity: %s", violation)


def stage_of(sequence: Sequence) -> str:
    """Where a sequence was when it ended, in the words of the life-cycle."""
    phase = "prefill" if sequence.times.first_token == 0 and sequence.num_given == sequence.num_prompt else "decode"
    if not sequence.times.started:
        return f"{phase}_queued"
    return phase if sequence.times.kv_ready else "kv_loading"


def unsupported_by_engine(request: GenerationRequest) -> str:
    """The field of a request that this engine would have to ignore; empty where there is none."""
    return "grammar" if request.sampling.grammar is not None else "adapter" if request.adapter else ""


def choice_of(sequence: Sequence) -> Choice:
    request = sequence.request
    return Choice(request.sampling, sequence.num_tokens, request.sample, sequence.rules)


def score_prompts(plan: Plan, logits: torch.Tensor) -> None:
    """Take the prompt logprobs that this step computed; `logits`: the rows after those that are sampled from. Called before the sequences advance."""
    start = 0
    for sequence, num_tokens in plan.scheduled:
        positions = sequence.positions_to_score(num_tokens)
        rows = logits[start : start + len(positions)]
        following = sequence.tokens[positions.start + 1 : positions.stop + 1]
        sequence.prompt_logprobs += score(rows, following, sequence.request.sampling.prompt_logprobs or 0)
        start += len(positions)
