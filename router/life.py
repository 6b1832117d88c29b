"""A request's life across workers: placed, prefilled, handed off, decoded; and again from where it stood when a worker fails.

Knows nothing of HTTP. Invariants: what was yielded is never yielded again; every dispatch has an attempt number of its own, and rows of an attempt
that is over reach nobody; when the life ends before the answer does, every worker that had a part is told to abort.
"""

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from functools import partial

from kvstore.hashing import BlockHash, block_hashes, request_salt
from protocol import headrace_pb2 as pb
from protocol.errors import DeadlineExceeded, HeadraceError, Overloaded, StoreLost, TransferFailed, Unavailable, WorkerLost, error_from_code
from protocol.instants import Instant
from protocol.logprobs import TokenLogprob
from protocol.request import GenerationRequest
from router.config import RouterConfig
from router.link import Dispatch, WorkerLink
from router.membership import Membership
from router.metrics import RouterMetrics
from router.placement import Placement, RoutingRequest
from router.policies import Policy
from router.prefix_index import PrefixIndex
from router.replies import Usage
from router.timeline import Side, Timeline
from router.view import ClusterView, WorkerKey, WorkerView

SAME_WORKER_PAUSE_S = 0.2  # before a worker that failed a request gets it again, because no other is left


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of the answer. `finish_reason`: "stop" or "length" with the last one. Logprobs where the request asks, the prompt's with the first piece."""

    text: str
    tokens: tuple[int, ...] = ()
    finish_reason: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    embedding: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Blocks:
    """How the workers name the blocks of a request's tokens: the same hashes as in their engines."""

    block_tokens: int
    salt: bytes

    @classmethod
    def of_cluster(cls, view: ClusterView, request: GenerationRequest) -> "Blocks":
        return cls(view.block_tokens, request_salt(view.salt, request.tenant, request.adapter, request.adapter_revision))

    def of(self, tokens: tuple[int, ...]) -> tuple[BlockHash, ...]:
        return tuple(block_hashes(tokens, self.block_tokens, self.salt))


@dataclass(frozen=True, slots=True)
class Spine:
    """What every life shares."""

    config: RouterConfig
    membership: Membership
    policy: Policy
    index: PrefixIndex
    metrics: RouterMetrics


class Life:
    def __init__(self, request: GenerationRequest, spine: Spine, timeline: Timeline) -> None:
        self.request = request
        self.timeline = timeline
        self.finish_reason = ""
        self._spine = spine
        self._blocks = Blocks.of_cluster(spine.membership.view(), request)
        self._prompt_blocks = self._blocks.of(request.prompt_tokens)
        self._output: tuple[int, ...] = ()
        self._attempt = 0
        self._failures = 0
        self._suspects: set[WorkerKey] = set()
        self._last_error: HeadraceError | None = None
        self._placement: Placement | None = None
        self._handoff = pb.Decode()  # attempt and tokens of a finished prefill, until its decode is sent
        self._handoff_broken = False
        self._dispatch: Dispatch | None = None
        self._side: Side | None = None
        self._dispatches: list[Dispatch] = []
        self._expected_at: WorkerLink | None = None  # where the decode will go when the prefill is done
        self._expired = False

    @property
    def usage(self) -> Usage:
        return Usage(len(self.request.prompt_tokens), len(self._output), self.timeline.cached_tokens)

    async def chunks(self) -> AsyncGenerator[Chunk, None]:
        """The whole answer. Raises DeadlineExceeded with the stage, an error of the request itself, or the last one after `max_attempts`."""
        expiry = asyncio.get_running_loop().call_later(max(self.request.deadline - time.time(), 0), self._expire)
        try:
            while not self.finish_reason:
                try:
                    dispatch = self._dispatch or await self._start()
                    chunk = self._take(await dispatch.row())
                except HeadraceError as error:
                    self._recover(error)
                    continue
                if chunk.tokens or chunk.text or chunk.finish_reason:
                    yield chunk
        finally:
            expiry.cancel()
            self._end()

    # ---- placing ---------------------------------------------------------------------------------------------------------

    async def _start(self) -> Dispatch:
        """Send the next phase to a worker: the decode that a prefill handed off, else whatever a new placement says."""
        if self._expired:
            raise self._deadline_exceeded()
        if self._handoff.handoff_attempt and self._placement is not None:
            return self._decode(self._placement.decode)
        self._placement = placement = await self._place()
        if placement.prefill is None:
            return self._decode(placement.decode)
        return self._prefill(placement.prefill, placement.decode)

    async def _place(self) -> Placement:
        patience = time.time() + (self._spine.config.wait_for_worker_s if self._attempt else 0)
        while True:
            try:
                return self._accept(self._spine.policy.choose(self._routing(), self._able()))
            except Unavailable:
                if self._suspects:
                    await self._forgive()
                    continue
                if not await self._spine.membership.changed(max(min(patience, self.request.deadline) - time.time(), 0)):
                    if self._expired or time.time() >= self.request.deadline:
                        raise self._deadline_exceeded() from None
                    raise

    def _able(self) -> ClusterView:
        """The workers that have the request's adapter."""
        return self._spine.membership.view().serving(self.request.adapter, self.request.adapter_revision)

    async def _forgive(self) -> None:
        """Nobody else is left: a worker that failed this request may get it again, but one that is full stays full."""
        if isinstance(self._last_error, Overloaded):
            raise self._last_error
        await asyncio.sleep(SAME_WORKER_PAUSE_S)
        self._suspects.clear()
        self._spine.metrics.last_resort("same_worker")

    def _routing(self) -> RoutingRequest:
        tokens = self.request.prompt_tokens + self._output
        hashes = self._blocks.of(tokens) if self._output else self._prompt_blocks
        return RoutingRequest(
            num_tokens=len(tokens),
            block_tokens=self._blocks.block_tokens,
            block_hashes=hashes,
            cached_blocks=self._spine.index.match(hashes),
            excluded=frozenset(self._suspects),
            priority=self.request.priority,
        )

    def _accept(self, placement: Placement) -> Placement:
        """A prefill makes sense once, for an answer not begun, and where its blocks have somewhere to go."""
        if placement.prefill is not None:
            if self.request.pooling:
                placement = replace(placement, prefill=None, decode=placement.prefill, reason="an embedding is a prompt alone")
            elif self._output:
                placement = replace(placement, prefill=None, reason="the answer has begun", last_resort="")
            elif self._handoff_broken:
                placement = replace(placement, prefill=None, reason="a hand-off failed", last_resort="handoff_failed")
            elif self._spine.membership.view().store_of(placement.decode.node) is None:
                placement = replace(placement, prefill=None, reason="the decode node has no store", last_resort="no_store")
        if placement.last_resort:
            self._spine.metrics.last_resort(placement.last_resort)
        self.timeline.add_placement(placement, self._attempt + 1)
        self.timeline.add(Instant.ROUTED, time.time(), self._attempt + 1)
        return placement

    # ---- dispatching -----------------------------------------------------------------------------------------------------

    def _prefill(self, worker: WorkerView, decode: WorkerView) -> Dispatch:
        store = self._spine.membership.view().store_of(decode.node)
        if store is None:
            raise StoreLost(f"the store of node {decode.node} is gone")
        self._expect(self._spine.membership.link(decode.key))
        destination = pb.StoreAddress(name=store.name, generation=store.generation, address=store.address)
        return self._send("prefill", worker, pb.Prefill(request=self._next_request(), destination=destination))

    def _decode(self, worker: WorkerView) -> Dispatch:
        self._expect(None)
        handoff, self._handoff = self._handoff, pb.Decode()
        handoff.request.CopyFrom(self._next_request())
        return self._send("decode", worker, handoff)

    def _expect(self, link: WorkerLink | None) -> None:
        """Count the decode to come where it will go, so that a burst does not see one idle worker many times."""
        if self._expected_at is not None:
            self._expected_at.expected -= 1
        if link is not None:
            link.expected += 1
        self._expected_at = link

    def _next_request(self) -> pb.Request:
        self._attempt += 1
        return self.request.resumed(self._attempt, self._output).to_message()

    def _send(self, phase: str, worker: WorkerView, message: pb.Prefill | pb.Decode) -> Dispatch:
        self._side = Side(phase, worker.name, worker.generation, worker.node, self._attempt)
        self.timeline.sides.append(self._side)
        link = self._spine.membership.link(worker.key)
        if link is None:
            raise WorkerLost(f"worker {worker.name} is gone")
        self._dispatch = link.dispatch(message)
        self._dispatches.append(self._dispatch)
        self._spine.index.record(worker.key, self._prompt_blocks)
        return self._dispatch

    # ---- rows ------------------------------------------------------------------------------------------------------------

    def _take(self, row: pb.Row) -> Chunk:
        side = self._side
        assert side is not None
        self.timeline.add_row(row, side)
        if row.finish_reason == "error":
            raise error_from_code(row.error_code, row.error_message, stage=row.error_stage or None, field=row.error_field or None)
        if row.tokens and not self._output:
            self._note_first_token(side)
        self._output += tuple(row.tokens)
        if row.HasField("work"):
            self._count_cached(row.work, side)
        if row.finish_reason != "handoff":
            self.finish_reason = row.finish_reason
        elif len(self._output) >= self.request.sampling.max_tokens:
            self.finish_reason = "length"
        else:
            self._hand_off(row, side)
        logprobs, prompt_logprobs = (tuple(map(TokenLogprob.from_message, some)) for some in (row.logprobs, row.prompt_logprobs))
        return Chunk(row.text, tuple(row.tokens), self.finish_reason, logprobs, prompt_logprobs, tuple(row.embedding))

    def _hand_off(self, row: pb.Row, side: Side) -> None:
        """The first token is out, the last blocks may still be on their way: decode at once, and let the prefill's report come when it comes."""
        self._handoff = pb.Decode(handoff_attempt=side.attempt, handoff_tokens=len(self.request.prompt_tokens))
        dispatch, self._dispatch = self._dispatch, None
        if dispatch is None or row.kv_pushed:
            self._close(dispatch)
        else:
            dispatch.follow(partial(self._take_report, dispatch, side), self.request.deadline - time.time())

    def _take_report(self, dispatch: Dispatch, side: Side, item: pb.Row | HeadraceError) -> None:
        """A prefill's row after its hand-off: what was pushed in the end. What is missing the decode side computes again."""
        dispatch.close()
        error = item if isinstance(item, HeadraceError) else None
        if error is None and isinstance(item, pb.Row):
            self.timeline.add_row(item, side)
            if item.HasField("work"):
                self._count_cached(item.work, side)
            if item.finish_reason == "error":
                error = error_from_code(item.error_code, item.error_message)
        if error is not None:
            self.timeline.add_failure(error, side, time.time())
        if not side.kv_pushed:
            self._spine.metrics.incomplete_handoff()

    def _note_first_token(self, side: Side) -> None:
        if not any(event.name == Instant.FIRST_TOKEN for event in self.timeline.events):
            self.timeline.add(Instant.FIRST_TOKEN, time.time(), side.attempt)

    def _count_cached(self, work: pb.Work, side: Side) -> None:
        """Only the first dispatch can tell what earlier requests left: later ones also find what this request itself computed."""
        if side.attempt == 1:
            self.timeline.cached_tokens = min(work.cached_tokens, len(self.request.prompt_tokens))

    # ---- failing ---------------------------------------------------------------------------------------------------------

    def _recover(self, error: HeadraceError) -> None:
        """Make the next turn place the request again, or raise."""
        self._expect(None)
        side = self._side
        if self._dispatch is not None:
            self._dispatch.close()
            self._dispatch.abort()
        self._handoff, self._placement, self._dispatch, self._side = pb.Decode(), None, None, None
        self._failures += 1
        self._last_error = error
        if isinstance(error, DeadlineExceeded) and error.stage is None:
            error.stage = self.timeline.stage
        self.timeline.add_failure(error, side, time.time())
        if not error.retryable or side is None or isinstance(error, DeadlineExceeded) or self._failures >= self._spine.config.max_attempts:
            raise error
        if side.phase == "prefill" and isinstance(error, TransferFailed | StoreLost):
            self._handoff_broken = True  # not the worker's fault: the blocks have nowhere to go
        else:
            self._suspects.add((side.worker, side.generation))
        self._count_recovery(error)

    def _count_recovery(self, error: HeadraceError) -> None:
        if self._output:
            self.timeline.migrations += 1
            self._spine.metrics.migration(error.code)
        else:
            self.timeline.retries += 1
            self._spine.metrics.retry(error.code)

    def _expire(self) -> None:
        self._expired = True
        if self._dispatch is not None:
            self._dispatch.put(self._deadline_exceeded())

    def _deadline_exceeded(self) -> DeadlineExceeded:
        stage = self.timeline.stage
        where = f", in {self._side.phase} on worker {self._side.worker}" if self._side is not None else ""
        return DeadlineExceeded(f"the deadline passed after '{stage}'{where}", stage=stage)

    def _close(self, dispatch: Dispatch | None) -> None:
        if dispatch is not None:
            dispatch.close()

    def _end(self) -> None:
        self._expect(None)
        self._close(self._dispatch)
        if not self.finish_reason:
            for dispatch in self._dispatches:
                dispatch.close()
                dispatch.abort()
        elif self._side is not None:
            tokens = self.request.prompt_tokens + self._output
            self._spine.index.record((self._side.worker, self._side.generation), self._blocks.of(tokens))
        self.timeline.output_tokens = len(self._output)
        self.timeline.finish_reason = self.finish_reason
        self.timeline.add(Instant.FINISHED, time.time(), self._attempt)
