"""One persistent stream to one worker: dispatches out, rows in. Owns the connection and the last status; knows nothing of what a request wants.

Invariant: a row reaches the one Dispatch of its (request, attempt) or nobody; when the stream ends, every open Dispatch gets WorkerLost.
"""

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable

import grpc

from protocol import headrace_pb2 as pb
from protocol.channel import VERSION, credentials, open_channel, version_accepted
from protocol.errors import DeadlineExceeded, HeadraceError, WorkerLost, error_from_code
from protocol.headrace_pb2_grpc import DataPlaneStub
from protocol.membership import Member
from router.view import AdapterView, WorkerKey, WorkerView

HELLO_S = 5.0
CALL_GRACE_S = 2.0  # the worker answers at the deadline itself
CLOSED = "closed"
FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.2, 2.0

log = logging.getLogger(__name__)


class Dispatch:
    """One attempt of one request at one worker. Its owner reads rows until the last one, then closes it."""

    def __init__(self, link: "WorkerLink", request_id: str, attempt: int) -> None:
        self.link = link
        self.request_id = request_id
        self.attempt = attempt
        self._rows: asyncio.Queue[pb.Row | HeadraceError] = asyncio.Queue()
        self._listener: Callable[[pb.Row | HeadraceError], None] | None = None
        self._limit: asyncio.TimerHandle | None = None

    @property
    def key(self) -> tuple[str, int]:
        return self.request_id, self.attempt

    async def row(self) -> pb.Row:
        """The next row; raises what ended the dispatch."""
        item = await self._rows.get()
        if isinstance(item, HeadraceError):
            raise item
        return item

    def put(self, item: pb.Row | HeadraceError) -> None:
        if self._listener is not None:
            self._listener(item)
        else:
            self._rows.put_nowait(item)

    def follow(self, listener: Callable[[pb.Row | HeadraceError], None], limit_s: float) -> None:
        """From now on `listener` gets what comes, until it closes the dispatch or `limit_s` have passed."""
        self._listener = listener
        self._limit = asyncio.get_running_loop().call_later(max(limit_s, 0), self.close)
        while not self._rows.empty():
            listener(self._rows.get_nowait())

    def close(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
        self.link.forget(self)

    def abort(self) -> None:
        """Tell the worker to stop; harmless when it has."""
        self.link.send(pb.RouterMessage(abort=pb.Abort(request_id=self.request_id, attempt=self.attempt)))


class WorkerLink:
    def __init__(self, member: Member, router: str, token: str, stall_s: float, on_change: Callable[[], None]) -> None:
        self.member = member
        self.connected = False
        self.trouble = "not connected yet"
        self.status: pb.WorkerStatus | None = None
        self.sessions = 0
        self.expected = 0  # decodes placed here whose prefill still runs elsewhere
        self._router = router
        self._token = token
        self._stall_s = stall_s
        self._on_change = on_change
        self._outgoing: asyncio.Queue[pb.RouterMessage | None] = asyncio.Queue()
        self._dispatches: dict[tuple[str, int], Dispatch] = {}
        self._calls: dict[int, asyncio.Future[pb.AdapterReply]] = {}
        self._num_calls = 0
        self._heard_at = self._moved_at = 0.0
        self._sent_tokens = self._sent_sequences = 0
        self._task: asyncio.Task[None] | None = None

    @property
    def key(self) -> WorkerKey:
        return self.member.name, self.member.generation

    # ---- life ------------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"link-{self.member.name}")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def check(self, now: float) -> None:
        """Take the running requests away from a worker that has stalled."""
        if self._dispatches and self.stalled(now):
            self._fail_all(WorkerLost(f"worker {self.member.name} makes no progress"))

    # ---- requests --------------------------------------------------------------------------------------------------------

    def dispatch(self, message: pb.Prefill | pb.Decode) -> Dispatch:
        """Raises WorkerLost when the stream is down."""
        if not self.connected:
            raise WorkerLost(f"worker {self.member.name} is not connected: {self.trouble}")
        request = message.request
        dispatch = Dispatch(self, request.request_id, request.attempt)
        self._dispatches[dispatch.key] = dispatch
        self._sent_sequences += 1
        handed = message.handoff_tokens if isinstance(message, pb.Decode) else 0
        self._sent_tokens += max(len(request.prompt_tokens) + len(request.output_tokens) - handed, 1)
        is_prefill = isinstance(message, pb.Prefill)
        self.send(pb.RouterMessage(prefill=message) if is_prefill else pb.RouterMessage(decode=message))  # type: ignore[arg-type]
        return dispatch

    def send(self, message: pb.RouterMessage) -> None:
        if self.connected:
            self._outgoing.put_nowait(message)

    def forget(self, dispatch: Dispatch) -> None:
        self._dispatches.pop(dispatch.key, None)

    async def call(self, message: pb.LoadAdapter | pb.UnloadAdapter) -> None:
        """Have the worker load or unload an adapter. Raises what it answers, WorkerLost, or DeadlineExceeded a little after the message's deadline."""
        if not self.connected:
            raise WorkerLost(f"worker {self.member.name} is not connected: {self.trouble}")
        self._num_calls += 1
        message.call = self._num_calls
        reply = self._calls[message.call] = asyncio.get_running_loop().create_future()
        self.send(pb.RouterMessage(load_adapter=message) if isinstance(message, pb.LoadAdapter) else pb.RouterMessage(unload_adapter=message))
        try:
            async with asyncio.timeout(max(message.deadline - time.time(), 0) + CALL_GRACE_S):
                answer = await reply
        except TimeoutError:
            raise DeadlineExceeded(f"worker {self.member.name} does not answer") from None
        finally:
            self._calls.pop(message.call, None)
        if answer.error_code:
            raise error_from_code(answer.error_code, answer.error_message)

    @property
    def num_dispatches(self) -> int:
        return len(self._dispatches)

    # ---- health ----------------------------------------------------------------------------------------------------------

    def stalled(self, now: float) -> bool:
        """Connected, but the status is old, or work is there and the steps stand still. Sequences that wait for KV need no step for a while."""
        if not self.connected or self.status is None:
            return False
        patience = self._stall_s if self.status.running else 2 * self._stall_s
        has_work = self.status.running + self.status.waiting > 0
        return now - self._heard_at > self._stall_s or (has_work and now - self._moved_at > patience)

    def view(self, now: float) -> WorkerView:
        status = self.status or pb.WorkerStatus()
        return WorkerView(
            name=self.member.name,
            generation=self.member.generation,
            role=self.member.attributes.get("role", "both"),
            node=self.member.node,
            trouble=self._trouble(now),
            sequences=max(status.running + status.waiting + self._sent_sequences, len(self._dispatches)) + self.expected,
            waiting_tokens=status.waiting_tokens + self._sent_tokens,
            steps=status.steps,
            blocks_total=status.blocks_total,
            blocks_free=status.blocks_free,
            blocks_cached=status.blocks_cached,
            draining=status.draining,
            counters=dict(status.counters),
            attributes=dict(self.member.attributes),
            adapters=tuple(AdapterView(one.name, one.revision, one.path) for one in status.adapters),
        )

    def _trouble(self, now: float) -> str:
        if not self.connected:
            return f"not connected: {self.trouble}"
        if self.status is None:
            return "no status yet"
        if self.stalled(now):
            return "stalled: no status or no progress"
        return "draining" if self.status.draining else ""

    # ---- the stream ------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        backoff = FIRST_BACKOFF_S
        try:
            while True:
                sessions = self.sessions
                trouble = await self._session()
                self._lose(trouble)
                backoff = FIRST_BACKOFF_S if self.sessions > sessions else min(2 * backoff, LAST_BACKOFF_S)
                await asyncio.sleep(backoff * random.uniform(0.8, 1.2))
        finally:
            self._lose(CLOSED)

    async def _session(self) -> str:
        """One stream from hello to its end; answers why it ended."""
        outgoing: asyncio.Queue[pb.RouterMessage | None] = asyncio.Queue()
        try:
            async with open_channel(self.member.address) as channel:
                outgoing.put_nowait(pb.RouterMessage(hello=pb.RouterHello(version=VERSION, router=self._router)))
                call = DataPlaneStub(channel).Connect(_messages(outgoing), metadata=credentials(self._token))
                async with asyncio.timeout(HELLO_S):
                    self._greet(await call.read())
                self._open(outgoing)
                while isinstance(message := await call.read(), pb.WorkerMessage):
                    self._receive(message)
                return "the worker ended the stream"
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        except TimeoutError:
            return f"no hello within {HELLO_S:g} s"
        except HeadraceError as error:
            return error.message
        except Exception as error:  # a link must outlive every fault of one session
            log.exception("the stream to worker %s ended by a fault of ours", self.member.name)
            return f"{type(error).__name__}: {error}"
        finally:
            outgoing.put_nowait(None)  # gRPC's own reader of the queue ends with the stream

    def _greet(self, message: object) -> None:
        if not isinstance(message, pb.WorkerMessage) or not message.HasField("hello"):
            raise WorkerLost("the worker's first message is no hello")
        hello = message.hello
        if not version_accepted(hello.version):
            raise WorkerLost(f"the worker speaks protocol version {hello.version}, this router {VERSION}")
        if (hello.name, hello.generation) != self.key:
            raise WorkerLost(f"{self.member.address} is now {hello.name} of generation {hello.generation}")

    def _open(self, outgoing: "asyncio.Queue[pb.RouterMessage | None]") -> None:
        self._outgoing = outgoing
        self.connected = True
        self.sessions += 1
        self.trouble = ""
        self._heard_at = self._moved_at = time.monotonic()
        log.info("connected to worker %s, generation %d", *self.key)
        self._on_change()

    def _receive(self, message: pb.WorkerMessage) -> None:
        step = message.step
        if step.HasField("status"):
            self._take_status(step.status)
        for reply in step.adapter_replies:
            if (call := self._calls.get(reply.call)) is not None and not call.done():
                call.set_result(reply)
        for row in step.rows:
            if dispatch := self._dispatches.get((row.request_id, row.attempt)):
                dispatch.put(row)
        self._heard_at = time.monotonic()

    def _take_status(self, status: pb.WorkerStatus) -> None:
        self._heard_at = time.monotonic()
        previous, self.status = self.status, status
        self._sent_tokens = self._sent_sequences = 0
        if previous is None or previous.steps != status.steps or previous.running + previous.waiting == 0:
            self._moved_at = self._heard_at
        if previous is None or previous.draining != status.draining or previous.adapters != status.adapters:
            self._on_change()

    def _lose(self, trouble: str) -> None:
        if trouble != CLOSED and trouble != self.trouble:
            log.warning("worker %s, generation %d: %s", *self.key, trouble)
        was_connected, self.connected = self.connected, False
        self.trouble = trouble
        self.status = None
        self._sent_tokens = self._sent_sequences = 0
        lost = WorkerLost(f"the stream to worker {self.member.name} broke: {trouble}")
        self._fail_all(lost)
        self._fail_calls(lost)
        if was_connected:
            self._on_change()

    def _fail_all(self, error: WorkerLost) -> None:
        dispatches, self._dispatches = self._dispatches, {}
        for dispatch in dispatches.values():
            dispatch.put(error)

    def _fail_calls(self, error: WorkerLost) -> None:
        for call in self._calls.values():
            if not call.done():
                call.set_exception(error)


async def _messages(queue: "asyncio.Queue[pb.RouterMessage | None]") -> AsyncIterator[pb.RouterMessage]:
    while (message := await queue.get()) is not None:
        yield message
