"""The worker's end of the data plane: one stream per router, one message per engine step with all its rows. Owns the jobs that run for routers;
knows nothing of tensors or stores.

Invariants: a job belongs to the stream that started it and ends with it; an event finds its job by (request, attempt); a stream that is silent for
`heartbeat_s` carries a status without rows, so that progress can be seen.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import grpc

from engine.engine import Event
from engine.sequence import SequenceKey
from protocol import headrace_pb2 as pb
from protocol.channel import VERSION, require_token, version_accepted
from protocol.errors import HeadraceError

log = logging.getLogger(__name__)


class Job(Protocol):
    """What both phases' jobs are to the data plane."""

    @property
    def key(self) -> SequenceKey: ...

    @property
    def is_done(self) -> bool: ...

    def handle(self, event: Event) -> None: ...

    def abort(self) -> None: ...


class PhaseService(Protocol):
    def start(self, message: Any, emit: Callable[[pb.Row], None]) -> Job:
        """`message`: the phase's own, pb.Prefill or pb.Decode."""
        ...


class RouterStream:
    """One connected router and the rows that wait to be sent to it."""

    def __init__(self) -> None:
        self._rows: list[pb.Row] = []
        self._fresh = asyncio.Event()

    def add(self, row: pb.Row) -> None:
        self._rows.append(row)
        self._fresh.set()

    def wake(self) -> None:
        self._fresh.set()

    async def rows(self, timeout_s: float) -> list[pb.Row]:
        """The rows that are there, waiting for the first; none after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._fresh.wait()
        except TimeoutError:
            return []
        rows, self._rows = self._rows, []
        self._fresh.clear()
        return rows


class DataPlane:
    """gRPC servicer of `DataPlane`. `hello` says who we are; `status` is asked before each message."""

    def __init__(
        self, services: dict[str, PhaseService], hello: pb.WorkerHello, status: Callable[[], pb.WorkerStatus], token: str, heartbeat_s: float = 1.0
    ) -> None:
        self._services = services
        self._hello = hello
        self._status = status
        self._token = token
        self._heartbeat_s = heartbeat_s
        self._jobs: dict[SequenceKey, tuple[Job, RouterStream]] = {}
        self._closing = False

    @property
    def num_jobs(self) -> int:
        """May be asked from any thread."""
        return sum(not job.is_done for job, _ in list(self._jobs.values()))

    def close(self) -> None:
        """End the streams after their next message."""
        self._closing = True

    def handle_events(self, events: list[Event]) -> None:
        """Events of one engine step, on the event loop."""
        for event in events:
            owned = self._jobs.get(event.sequence.key)
            if owned is None:
                continue
            try:
                owned[0].handle(event)
            except Exception:  # the other jobs' events must not be lost with it
                log.exception("request %s: %s could not be handled", event.sequence.key, type(event).__name__)
                owned[0].abort()

    async def Connect(
        self, messages: AsyncIterator[pb.RouterMessage], context: grpc.aio.ServicerContext[pb.RouterMessage, pb.WorkerMessage]
    ) -> AsyncIterator[pb.WorkerMessage]:
        await require_token(context, self._token)
        first = await anext(messages, None)
        if first is None or not version_accepted(first.hello.version):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"message version {first.hello.version if first else None}, here {VERSION}")
            return
        stream = RouterStream()
        reader = asyncio.create_task(self._read(messages, stream))
        try:
            yield pb.WorkerMessage(hello=self._hello)
            while not reader.done() and not self._closing:
                rows = await stream.rows(self._heartbeat_s)
                self._drop_done()
                yield pb.WorkerMessage(step=pb.Step(rows=rows, status=self._status()))
        finally:
            reader.cancel()
            for job, owner in self._jobs.values():
                if owner is stream:
                    job.abort()

    async def _read(self, messages: AsyncIterator[pb.RouterMessage], stream: RouterStream) -> None:
        async for message in messages:
            kind = message.WhichOneof("body")
            if kind == "abort":
                owned = self._jobs.get((message.abort.request_id, message.abort.attempt))
                if owned is not None:
                    owned[0].abort()
            elif kind in self._services:
                self._start(self._services[kind], getattr(message, kind), stream)
        stream.wake()  # the writer sees that the reader is done

    def _start(self, service: PhaseService, message: pb.Prefill | pb.Decode, stream: RouterStream) -> None:
        key = (message.request.request_id, message.request.attempt)
        if key in self._jobs:
            log.warning("request %s is here already", key)
            return
        try:
            job = service.start(message, stream.add)
        except Exception as error:  # one request that cannot begin must not end the stream, and with it all others
            log.exception("request %s could not begin", key)
            words = f"the request could not begin: {type(error).__name__}"
            stream.add(pb.Row(request_id=key[0], attempt=key[1], finish_reason="error", error_code=HeadraceError.code, error_message=words))
            return
        self._jobs[job.key] = (job, stream)

    def _drop_done(self) -> None:
        for key in [key for key, (job, _) in self._jobs.items() if job.is_done]:
            del self._jobs[key]
