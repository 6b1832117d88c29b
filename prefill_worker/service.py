"""The prefill phase: compute a prompt's KV, push its blocks to the decode node's store as they are finished, answer with the first token.

Knows nothing of the decode phase, HTTP or Ray. Invariants:
- Every exported block is unpinned exactly once, when no transfer reads it any more.
- Every wait ends at the request's deadline; a push that fails costs the decode worker a recomputation, never the request.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from engine.engine import Engine
from engine.events import Admitted, Chunk, Event, Exported, Failed, Load
from engine.rows import chunk_row, error_row, tell
from engine.scheduler import LoadItem
from engine.sequence import Export, SequenceKey, Submission
from kvstore.hashing import BlockHash, hold_name, private_hash
from kvstore.loader import PREFIX_WAIT_S, NodeLoader
from kvstore.mover import PoolBlock
from kvstore.session import StoreAddress, StoreSession, StoreSessions
from protocol import headrace_pb2 as pb
from protocol.errors import HeadraceError
from protocol.instants import Instant
from protocol.request import GenerationRequest

log = logging.getLogger(__name__)
CREDIT_WAIT_S = 2.0  # for the destination to take blocks that it has no room for now; then the decode side computes them
CREDIT_PAUSE_S = 0.02
Emit = Callable[[pb.Row], None]


class PrefillService:
    def __init__(self, engine: Engine, loader: NodeLoader, sessions: StoreSessions, block_tokens: int) -> None:
        self.engine = engine
        self.loader = loader
        self.mover = loader.mover
        self.sessions = sessions
        self.block_tokens = block_tokens

    def start(self, message: pb.Prefill, emit: Emit) -> "PrefillJob":
        """Begin the phase; rows come through `emit`, on this event loop."""
        job = PrefillJob(self, message, emit)
        self.engine.submit(job.submission)
        return job


class PrefillJob:
    def __init__(self, service: PrefillService, message: pb.Prefill, emit: Emit) -> None:
        self._service = service
        self._request = GenerationRequest.from_message(message.request)
        self._destination = StoreAddress(message.destination.name, message.destination.generation, message.destination.address)
        self._emit = emit
        self._exports: asyncio.Queue[list[LoadItem] | None] = asyncio.Queue()  # None: no more will come
        self._over = False  # the engine is through with the request
        self._pushing = False
        self._abandoned = False  # nobody will ask for the blocks: the answer ended here, or failed
        self._tasks: set[asyncio.Task[None]] = set()
        self._pushed = pb.Work(codec=service.mover.codec, transport=service.mover.transport)
        given = len(self._request.prompt_tokens) + len(self._request.output_tokens)
        self._given = given
        self._hold = hold_name(*self._request.key)
        self._private = private_hash(*self._request.key, given) if given % service.block_tokens else None
        self.submission = Submission(self._request, one_token=True, load=True, export=Export.ALL, private_block=self._private)

    @property
    def key(self) -> SequenceKey:
        return self._request.key

    @property
    def is_done(self) -> bool:
        return self._over and not self._tasks

    def abort(self) -> None:
        self._abandoned = True
        self._service.engine.abort(self.key)

    def handle(self, event: Event) -> None:
        match event:
            case Admitted() if not self._pushing:  # a preempted sequence is admitted again
                self._pushing = True
                self._spawn(self._push(self._given // self._service.block_tokens + (self._private is not None)))
            case Admitted():
                pass
            case Load():
                self._spawn(self._load(event.items))
            case Exported():
                self._exports.put_nowait(event.items)
            case Chunk():
                self._answer(event)
            case Failed():
                self._end(keep_pushing=False)
                self._emit(error_row(event, tell(event.tally, self._pushed)))

    def _answer(self, chunk: Chunk) -> None:
        times = chunk.sequence.times
        instants: dict[str, float] = {Instant.PREFILL_QUEUED: times.queued, Instant.PREFILL_STARTED: times.started, Instant.FIRST_TOKEN: times.first_token}
        if chunk.finish_reason != "handoff":
            instants[Instant.FINISHED] = times.finished
        self._end(keep_pushing=chunk.finish_reason == "handoff")
        row = chunk_row(chunk, instants)
        row.work.CopyFrom(tell(chunk.sequence.tally, self._pushed))
        self._emit(row)

    def _end(self, keep_pushing: bool) -> None:
        self._over = True
        self._abandoned = self._abandoned or not keep_pushing
        self._exports.put_nowait(None)

    async def _load(self, items: list[LoadItem]) -> None:
        """Prefix blocks that this node's store has, or can pull from another node's."""
        good = 0
        try:
            blocks = [PoolBlock(item.hash, item.block, item.num_tokens) for item in items]
            until, deadline = time.time() + PREFIX_WAIT_S, self._request.deadline
            good = await self._service.loader.load(self._hold, blocks, self._pushed, wait_until=until, deadline=deadline)
        finally:
            self._service.engine.loaded(self.key, good)

    async def _push(self, num_blocks: int) -> None:
        """Push blocks as they come until no more will; then tell the router what moved."""
        committed: set[BlockHash] = set()
        session: StoreSession | None = None
        try:
            session = await self._service.sessions.get(self._destination, self._request.deadline)
        except HeadraceError as error:
            log.warning("cannot push to %s: %s", self._destination.name, error.code)
        except Exception:  # the blocks still to come must be unpinned whatever it was
            log.exception("cannot push to %s", self._destination.name)
        while (items := await self._next_exports()) is not None:
            await self._push_blocks(session, items, committed)
        if self._abandoned:
            await self._forget()
        else:
            self._report(complete=len(committed) == num_blocks)

    async def _forget(self) -> None:
        try:
            session = await self._service.sessions.get(self._destination, self._request.deadline)
            session.post(pb.StoreRequest(forget=pb.Forget(request_id=self._hold)))
        except HeadraceError as error:
            log.info("the destination will forget by itself: %s", error.code)

    async def _next_exports(self) -> list[LoadItem] | None:
        items = await self._exports.get()
        while items is not None and not self._exports.empty():
            more = self._exports.get_nowait()
            if more is None:
                self._exports.put_nowait(None)
                break
            items = items + more
        return items

    async def _push_blocks(self, session: StoreSession | None, items: list[LoadItem], committed: set[BlockHash]) -> None:
        """Ask for grants for blocks that are ready, so that the destination's credit is held for the time of a write alone; without credit, ask again."""
        left = {item.hash: item for item in items if item.hash not in committed}
        until, pause_s = min(self._request.deadline, time.time() + CREDIT_WAIT_S), CREDIT_PAUSE_S
        try:
            while session is not None and left and not self._abandoned:
                asks_again = await self._push_once(session, left, committed)
                left = {name: item for name, item in left.items() if name not in committed}
                if not asks_again or time.time() >= until:
                    return
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, 10 * CREDIT_PAUSE_S)
        except HeadraceError as error:
            log.warning("push to %s failed: %s", self._destination.name, error.code)
        except Exception:  # a fault of ours costs a recomputation; the blocks still to come must be unpinned too
            log.exception("push to %s failed", self._destination.name)
        finally:
            self._service.engine.unpin([item.block for item in items])

    async def _push_once(self, session: StoreSession, wanted: dict[BlockHash, LoadItem], committed: set[BlockHash]) -> bool:
        """Attach, write, commit; True when some blocks got no credit."""
        keys = [pb.BlockKey(hash=item.hash, length=self._service.mover.block_bytes, private=item.private) for item in wanted.values()]
        plan = await self._service.mover.attach(session, self._hold, self.key[1], keys, self._request.deadline)
        try:
            blocks = [PoolBlock(item.hash, item.block, item.num_tokens, item.private) for item in wanted.values()]
            report = await plan.push(blocks, self._request.deadline)
        finally:
            await plan.close()
        committed.update(report.present)
        self._pushed.pushed_blocks += report.num_blocks
        self._pushed.pushed_bytes += report.bytes
        self._pushed.pushed_s += report.seconds
        return plan.num_refused > 0

    def _report(self, complete: bool) -> None:
        now = [pb.Instant(name=Instant.KV_PUSHED, at=time.time())] if complete else []
        self._emit(pb.Row(request_id=self.key[0], attempt=self.key[1], instants=now, work=self._pushed, kv_pushed=complete))

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
