"""The client's side of a store node's control stream. Knows the messages; nothing of blocks' bytes or of why they move.

Invariants: a call ends by its deadline or when the stream ends, whichever is first. A grant or lease that comes after its caller gave up is given back.
A new stream to a store opens only when no write that began on the last one is still running: so opening it proves to the store that those are over.
"""

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple, TypeAlias

import grpc

from kvstore.hashing import BlockHash
from kvstore.layout import BlockLayout
from kvstore.store import Grant, Key, Mover
from protocol import headrace_pb2 as pb
from protocol.channel import VERSION, credentials, open_channel, version_accepted
from protocol.errors import DeadlineExceeded, HeadraceError, StoreLost, TransferFailed, error_from_code
from protocol.headrace_pb2_grpc import StoreControlStub
from transport.endpoint import Endpoint
from transport.process import identify

Stream: TypeAlias = "grpc.aio.StreamStreamCall[pb.StoreRequest, pb.StoreReply]"

ANSWER_S = 5.0  # for what a store answers at once
TRANSFER_S = 10.0  # at most, for one transfer, whatever time the request has left: a peer that has stopped must not keep a thread


class StoreAddress(NamedTuple):
    """`generation` 0 takes any that listens there."""

    name: str
    generation: int
    address: str


class StoreSession:
    """One live stream. `peer` is the store's name in `endpoint`. Made by StoreSessions; every method raises StoreLost once the stream is over,
    DeadlineExceeded at its deadline (unix seconds; None: ANSWER_S from now), or the error that the store answered."""

    def __init__(self, channel: grpc.aio.Channel, stream: Stream, welcome: pb.StoreWelcome, endpoint: Endpoint, peer: str) -> None:
        self.name = welcome.name
        self.generation = welcome.generation
        self.transport = welcome.transport
        self.peer = peer
        self._endpoint = endpoint
        self._channel = channel
        self._stream = stream
        self._lost: StoreLost | None = None
        self._closing = False
        self._last_call = 0
        self._waiting: dict[int, asyncio.Future[pb.StoreReply]] = {}
        self._outgoing: asyncio.Queue[pb.StoreRequest] = asyncio.Queue()
        self._writes = 0
        self._no_writes = asyncio.Event()
        self._no_writes.set()
        self._task = asyncio.create_task(self._run())

    @classmethod
    async def connect(cls, address: StoreAddress, *, token: str, endpoint: Endpoint, generation: int, layout: BlockLayout, deadline: float) -> "StoreSession":
        """Raises StoreLost, LayoutMismatch, TransferFailed or DeadlineExceeded."""
        process = identify(os.getpid())
        hello = pb.StoreHello(
            version=VERSION,
            client=endpoint.name,
            generation=generation,
            layout=layout.fingerprint,
            pid=process.pid,
            namespace=process.namespace,
            start_ticks=process.start_ticks,
        )
        channel = open_channel(address.address)
        try:
            async with asyncio.timeout(deadline - time.time()):
                stream: Stream = StoreControlStub(channel).Session(metadata=credentials(token))
                welcome = await _greet(stream, hello, address)
                peer = await asyncio.to_thread(endpoint.connect, welcome.transport_metadata)
        except BaseException as error:
            await channel.close()
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(f"store {address.name} at {address.address} did not answer", stage="store_connect") from None
            if isinstance(error, grpc.RpcError):
                raise StoreLost(f"store {address.name} at {address.address}: {error.code().name}: {error.details()}") from None
            raise
        return cls(channel, stream, welcome, endpoint, peer)

    @property
    def lost(self) -> bool:
        return self._lost is not None

    # ---- calls --------------------------------------------------------------------------------------------------------------------

    async def attach(self, request_id: str, attempt: int, keys: Sequence[Key], deadline: float, *, allow_pull: bool = False, until: float = 0.0) -> list[Grant]:
        """One grant for each key, valid until `until` (default: `deadline`, by which the answer must be here)."""
        blocks = [pb.BlockKey(hash=key.hash, length=key.length, private=key.private) for key in keys]
        message = pb.Attach(request_id=request_id, attempt=attempt, blocks=blocks, deadline=until or deadline, allow_pull=allow_pull)
        reply = await self._call(pb.StoreRequest(attach=message), deadline)
        return [Grant(Mover(grant.mover), grant.reservation, grant.offset) for grant in reply.attach.grants]

    async def commit(self, request_id: str, attempt: int, blocks: Sequence[pb.CommitBlock], deadline: float) -> pb.CommitReply:
        return (await self._call(pb.StoreRequest(commit=pb.Commit(request_id=request_id, attempt=attempt, blocks=blocks)), deadline)).commit

    async def abandon(self, reservations: Sequence[int], deadline: float | None = None) -> None:
        await self._call(pb.StoreRequest(abandon=pb.Abandon(reservations=reservations)), deadline)

    async def acquire(
        self,
        request_id: str,
        hashes: Sequence[BlockHash],
        *,
        wait_until: float,
        lease_until: float,
        fidelity: str,
        deadline: float,
        expect: bool = False,
        allow_pull: bool = False,
    ) -> pb.AcquireReply:
        message = pb.Acquire(
            request_id=request_id, hashes=hashes, wait_until=wait_until, lease_until=lease_until, fidelity=fidelity, allow_pull=allow_pull, expect=expect
        )
        return (await self._call(pb.StoreRequest(acquire=message), deadline)).acquire

    async def release(self, lease: int, deadline: float | None = None, corrupt: Sequence[BlockHash] = ()) -> None:
        await self._call(pb.StoreRequest(release=pb.Release(lease=lease, corrupt=corrupt)), deadline)

    async def forget(self, request_id: str, deadline: float | None = None) -> None:
        """The request is over everywhere: only who ends it may say so."""
        await self._call(pb.StoreRequest(forget=pb.Forget(request_id=request_id)), deadline)

    async def status(self, deadline: float | None = None, *, check_integrity: bool = False, list_hashes: bool = False) -> pb.StoreStatus:
        message = pb.StoreStatusRequest(check_integrity=check_integrity, list_hashes=list_hashes)
        return (await self._call(pb.StoreRequest(status=message), deadline)).status

    def post(self, request: pb.StoreRequest) -> None:
        """Send without waiting for the answer: for what needs none (abandon, release, forget)."""
        self._last_call += 1
        request.call = self._last_call
        self._outgoing.put_nowait(request)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Around every one-sided write to the store. Raises StoreLost rather than begin one without a stream."""
        self._raise_if_lost()
        if self._closing:
            raise StoreLost(f"store {self.name}: the session is closing")
        self._writes += 1
        self._no_writes.clear()
        try:
            yield
        finally:
            self._writes -= 1
            if not self._writes:
                self._no_writes.set()

    async def close(self) -> None:
        """End the stream, after the writes that run; the peer is disconnected then."""
        self._closing = True
        await self._no_writes.wait()
        if not self.lost:
            with suppress(HeadraceError):
                await self.abandon([])  # tells the store that nothing will be written any more
        self._fail("closed by this side")
        self._stream.cancel()
        await self.ended()

    async def ended(self) -> None:
        await asyncio.wait([self._task])

    # ---- the stream ---------------------------------------------------------------------------------------------------------------

    async def _call(self, request: pb.StoreRequest, deadline: float | None) -> pb.StoreReply:
        self._raise_if_lost()
        self.post(request)
        future: asyncio.Future[pb.StoreReply] = asyncio.get_running_loop().create_future()
        self._waiting[request.call] = future
        try:
            await asyncio.wait([future], timeout=max(0.0, ANSWER_S if deadline is None else deadline - time.time()))
        except asyncio.CancelledError:
            if future.done() and future.exception() is None:
                self._give_back(future.result())
            future.cancel()
            raise
        if not future.done():
            future.cancel()  # _receive gives back what comes now
            raise DeadlineExceeded(f"store {self.name} did not answer {request.WhichOneof('body')}", stage="store")
        reply = future.result()
        if reply.WhichOneof("body") == "failure":
            raise error_from_code(reply.failure.code, reply.failure.message, stage="store")
        return reply

    def _raise_if_lost(self) -> None:
        if self._lost is not None:
            raise StoreLost(self._lost.message)

    async def _run(self) -> None:
        sender = asyncio.create_task(self._send())
        try:
            reason = await self._receive()
        finally:
            sender.cancel()
        self._fail(reason)
        await asyncio.wait([sender])
        await self._channel.close()
        await self._no_writes.wait()
        await asyncio.to_thread(self._endpoint.disconnect, self.peer)

    async def _send(self) -> None:
        while True:
            request = await self._outgoing.get()
            try:
                await self._stream.write(request)
            except (grpc.RpcError, asyncio.InvalidStateError):
                return  # _receive tells why

    async def _receive(self) -> str:
        try:
            while isinstance(reply := await self._stream.read(), pb.StoreReply):
                future = self._waiting.pop(reply.call, None)
                if future is not None and not future.done():
                    future.set_result(reply)
                elif future is not None:
                    self._give_back(reply)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
        except asyncio.CancelledError:
            if not self._stream.cancelled():
                raise
        return "the stream ended"

    def _give_back(self, reply: pb.StoreReply) -> None:
        reservations = [grant.reservation for grant in reply.attach.grants if grant.mover == pb.Grant.PUSH]
        if reservations:
            self.post(pb.StoreRequest(abandon=pb.Abandon(reservations=reservations)))
        if reply.acquire.lease:
            self.post(pb.StoreRequest(release=pb.Release(lease=reply.acquire.lease)))

    def _fail(self, reason: str) -> None:
        if self._lost is None:
            self._lost = StoreLost(f"store {self.name}: {reason}")
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(StoreLost(self._lost.message))
        self._waiting.clear()


async def _greet(stream: Stream, hello: pb.StoreHello, address: StoreAddress) -> pb.StoreWelcome:
    await stream.write(pb.StoreRequest(hello=hello))
    reply = await stream.read()
    if not isinstance(reply, pb.StoreReply):
        raise StoreLost(f"store {address.name} at {address.address} refused the session: {await stream.details()}")
    if reply.WhichOneof("body") == "failure":
        raise error_from_code(reply.failure.code, reply.failure.message)
    welcome: pb.StoreWelcome = reply.welcome
    if not version_accepted(welcome.version):
        raise StoreLost(f"store {address.name} speaks version {welcome.version}, this process {VERSION}")
    if address.generation and welcome.generation != address.generation:
        raise StoreLost(f"{address.address} is {welcome.name} of generation {welcome.generation}, not {address.name} of {address.generation}")
    return welcome


class StoreSessions:
    """This process's sessions, one a store. Concurrent callers share a connection attempt; a lost session is replaced at the next call."""

    def __init__(self, endpoint: Endpoint, generation: int, layout: BlockLayout, token: str, connect_s: float = ANSWER_S) -> None:
        self._token = token
        self._endpoint = endpoint
        self._generation = generation
        self._layout = layout
        self._connect_s = connect_s
        self._tasks: dict[str, asyncio.Task[StoreSession]] = {}

    async def get(self, address: StoreAddress, deadline: float | None = None) -> StoreSession:
        """Raises StoreLost, LayoutMismatch, TransferFailed or DeadlineExceeded."""
        task = self._tasks.get(address.address)
        if task is None or (task.done() and not self._usable(task, address)):
            task = asyncio.create_task(self._connect(address, task))
            self._tasks[address.address] = task
        try:
            async with asyncio.timeout(self._connect_s if deadline is None else deadline - time.time()):
                return await asyncio.shield(task)
        except TimeoutError:
            raise DeadlineExceeded(f"store {address.name} at {address.address} did not answer", stage="store_connect") from None

    async def close(self) -> None:
        tasks, self._tasks = list(self._tasks.values()), {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(task.result().close() for task in tasks if _connected(task)))

    async def _connect(self, address: StoreAddress, last: "asyncio.Task[StoreSession] | None") -> StoreSession:
        if last is not None and _connected(last):
            await last.result().close()
        try:
            return await StoreSession.connect(
                address,
                token=self._token,
                endpoint=self._endpoint,
                generation=self._generation,
                layout=self._layout,
                deadline=time.time() + self._connect_s,
            )
        except (HeadraceError, OSError) as error:
            raise error if isinstance(error, HeadraceError) else TransferFailed(str(error)) from error

    def _usable(self, task: "asyncio.Task[StoreSession]", address: StoreAddress) -> bool:
        return _connected(task) and not task.result().lost and address.generation in (0, task.result().generation)


def _connected(task: "asyncio.Task[StoreSession]") -> bool:
    return task.done() and not task.cancelled() and task.exception() is None
