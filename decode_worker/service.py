"""The decode phase: wait for the prompt's KV in this node's store, load it, generate, write finished blocks back. The same for a hand-off, a colocated
start, a migration and a resume: only how much KV is found differs.

Knows nothing of the prefill phase, HTTP or Ray. Invariants:
- Every Load is answered once; every exported block is unpinned once, when no transfer touches it any more.
- KV that is missing or bad at the deadline of its load is computed again and counted: never wrong tokens, never a hang.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

from engine.engine import Engine
from engine.events import Admitted, Chunk, Event, Exported, Failed, Load
from engine.rows import chunk_row, error_row, tell
from engine.scheduler import LoadItem
from engine.sequence import Export, Sequence, SequenceKey, Submission, Tally
from kvstore.hashing import hold_name, private_hash
from kvstore.loader import PREFIX_WAIT_S, NodeLoader
from kvstore.mover import PoolBlock
from protocol import headrace_pb2 as pb
from protocol.instants import Instant
from protocol.request import GenerationRequest

Emit = Callable[[pb.Row], None]


class DecodeService:
    """`handoff_wait_s`: how long a hand-off's blocks are waited for before they are computed again."""

    def __init__(self, engine: Engine, loader: NodeLoader, block_tokens: int, handoff_wait_s: float) -> None:
        self.engine = engine
        self.loader = loader
        self.block_tokens = block_tokens
        self.handoff_wait_s = handoff_wait_s

    def start(self, message: pb.Decode, emit: Emit) -> "DecodeJob":
        """Begin or go on with a request; rows come through `emit`, on this event loop."""
        job = DecodeJob(self, message, emit)
        self.engine.submit(job.submission)
        return job


class DecodeJob:
    def __init__(self, service: DecodeService, message: pb.Decode, emit: Emit) -> None:
        self._service = service
        self._request = GenerationRequest.from_message(message.request)
        self._emit = emit
        self._is_handoff = message.handoff_tokens > 0
        self._resumes = bool(self._request.output_tokens)
        self._hold = hold_name(self._request.request_id, message.handoff_attempt if self._is_handoff else self._request.attempt)
        self._work = pb.Work(codec=service.loader.mover.codec, transport=service.loader.mover.transport)
        self._first_row = True
        self._over = False
        self._held = self._is_handoff  # the store holds blocks for this attempt
        self._tasks: set[asyncio.Task[None]] = set()
        tokens = message.handoff_tokens
        private = private_hash(self._request.request_id, message.handoff_attempt, tokens) if tokens % service.block_tokens else None
        self.submission = Submission(self._request, load=True, export=Export.COMPUTED, handoff_tokens=tokens, private_block=private)

    @property
    def key(self) -> SequenceKey:
        return self._request.key

    @property
    def is_done(self) -> bool:
        return self._over and not self._tasks

    def abort(self) -> None:
        self._service.engine.abort(self.key)

    def handle(self, event: Event) -> None:
        match event:
            case Admitted():
                pass
            case Load():
                self._spawn(self._load(event.items, is_handoff=self._is_handoff and not event.sequence.tally.preemptions))
            case Exported():
                self._spawn(self._write_back(event.items))
            case Chunk():
                self._over = bool(event.finish_reason)
                self._emit(self._row(event))
            case Failed():
                self._over = True
                self._emit(error_row(event, self._tally(event.tally)))
        if self._over and self._held:  # nothing was loaded: all was here, or the request ended in the queue
            self._spawn(self._forget())

    def _row(self, chunk: Chunk) -> pb.Row:
        instants: dict[str, float] = {}
        if self._first_row:
            instants |= self._first_instants(chunk.sequence)
            self._first_row = False
        if chunk.finish_reason:
            instants[Instant.FINISHED] = chunk.sequence.times.finished
        row = chunk_row(chunk, instants)
        if chunk.finish_reason:
            row.work.CopyFrom(self._tally(chunk.sequence.tally))
        return row

    def _first_instants(self, sequence: Sequence) -> dict[str, float]:
        times = sequence.times
        if self._resumes:
            return {Instant.DECODE_QUEUED: times.queued, Instant.KV_READY: times.kv_ready, Instant.DECODE_STARTED: times.kv_ready}
        return {
            Instant.PREFILL_QUEUED: times.queued,
            Instant.PREFILL_STARTED: times.kv_ready,
            Instant.FIRST_TOKEN: times.first_token,
            Instant.DECODE_STARTED: times.first_token,
        }

    def _tally(self, tally: Tally) -> pb.Work:
        tell(tally, self._work)
        if self._is_handoff:
            self._work.handoff_tokens = min(tally.reused_store_tokens, self.submission.handoff_tokens)
        return self._work

    async def _load(self, items: list[LoadItem], is_handoff: bool) -> None:
        """Bring the wanted blocks from this node's store into the pool. What was pushed for this request is waited for and held; what a preempted sequence
        wrote back is there or not."""
        good = 0
        self._held = False
        hold, wait_s = (self._hold, self._service.handoff_wait_s) if is_handoff else (hold_name(*self.key), PREFIX_WAIT_S)
        try:
            blocks = [PoolBlock(item.hash, item.block, item.num_tokens, item.private) for item in items]
            until, deadline = time.time() + wait_s, self._request.deadline
            good = await self._service.loader.load(hold, blocks, self._work, wait_until=until, deadline=deadline, expect=is_handoff)
        finally:
            self._service.engine.loaded(self.key, good)
        if is_handoff:
            await self._service.loader.forget(hold)

    async def _forget(self) -> None:
        self._held = False
        await self._service.loader.forget(self._hold)

    async def _write_back(self, items: list[LoadItem]) -> None:
        try:
            blocks = [PoolBlock(item.hash, item.block, item.num_tokens) for item in items]
            await self._service.loader.put(hold_name(*self.key), blocks, self._request.deadline)
        finally:
            self._service.engine.unpin([item.block for item in items])

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
