"""The store node's control service: sessions of clients, their requests and answers. Knows the messages; decides nothing that NodeStore decides.

Invariants: a session's requests begin in order, and only those that wait (Attach with pull, Acquire) end out of order. When a session ends its leases
end; slots it may still be writing stay quarantined until it is certain that it cannot: its process has ended, or it (or a newer generation of it)
opened another session.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from kvstore.hashing import BlockHash
from kvstore.node import StoreNode
from kvstore.pull import Puller
from kvstore.store import Grant, Key, Mover
from protocol import headrace_pb2 as pb
from protocol.channel import VERSION, require_token, version_accepted
from protocol.errors import HeadraceError, InvalidRequest, LayoutMismatch, PeerGone
from transport.process import ProcessIdentity, watch

log = logging.getLogger(__name__)

CHECK_S = 0.25  # how often a process is looked at whose stream broke while it was writing
DRAIN_S = 0.5  # after it ended: what it had sent may still be on its way into the arena


@dataclass(eq=False)
class Client:
    """One session. `id` is what NodeStore knows it by; `name` its endpoint's, up to the generation."""

    id: str
    name: str
    generation: int
    process: ProcessIdentity
    replies: "asyncio.Queue[pb.StoreReply | None]" = field(default_factory=asyncio.Queue)
    tasks: "set[asyncio.Task[None]]" = field(default_factory=set)
    superseded: asyncio.Event = field(default_factory=asyncio.Event)

    def answer(self, call: int, reply: pb.StoreReply) -> None:
        reply.call = call
        self.replies.put_nowait(reply)

    def refuse(self, call: int, error: HeadraceError) -> None:
        self.answer(call, _failure(error))


class StoreService:
    def __init__(self, node: StoreNode, puller: Puller, welcome: pb.StoreWelcome, token: str) -> None:
        self.draining = False
        self._node = node
        self._puller = puller
        self._welcome = welcome
        self._token = token
        self._clients: set[Client] = set()  # connected, or lost with writes that may still land
        self._background: set[asyncio.Task[None]] = set()
        self._last_client = 0

    async def Session(
        self, request_iterator: AsyncIterator[pb.StoreRequest], context: "grpc.aio.ServicerContext[pb.StoreRequest, pb.StoreReply]"
    ) -> AsyncIterator[pb.StoreReply]:
        requests = aiter(request_iterator)
        try:
            first = await anext(requests)
            await require_token(context, self._token)  # after the first read: an abort in the middle of the client's write would hide its reason
            client = self._admit(first)
        except StopAsyncIteration:
            return
        except HeadraceError as error:
            log.warning("a session was refused: %s", error.message)
            yield _failure(error)
            return
        yield pb.StoreReply(call=first.call, welcome=self._welcome)
        reader = asyncio.create_task(self._read(client, requests))
        try:
            while (reply := await client.replies.get()) is not None:
                yield reply
        finally:
            reader.cancel()
            self._leave(client)

    async def close(self) -> None:
        for task in self._background:
            task.cancel()
        if self._background:
            await asyncio.wait(self._background)

    # ---- sessions -----------------------------------------------------------------------------------------------------------------

    def _admit(self, request: pb.StoreRequest) -> Client:
        hello = request.hello
        if request.WhichOneof("body") != "hello" or not version_accepted(hello.version):
            raise InvalidRequest(f"a session opens with a hello of version {VERSION}", field="version")
        if hello.layout != self._welcome.layout:
            raise LayoutMismatch(f"store {self._welcome.name} holds {self._welcome.layout}, client {hello.client} has {hello.layout}")
        self._last_client += 1
        process = ProcessIdentity(namespace=hello.namespace, pid=hello.pid, start_ticks=hello.start_ticks)
        client = Client(f"{hello.client}/{self._last_client}", hello.client.rpartition("#")[0] or hello.client, hello.generation, process)
        for other in self._clients:
            if other.name == client.name and other.generation <= client.generation:
                other.superseded.set()
        self._clients.add(client)
        return client

    async def _read(self, client: Client, requests: AsyncIterator[pb.StoreRequest]) -> None:
        try:
            async for request in requests:
                self._begin(client, request)
        except grpc.RpcError as error:
            log.info("session of %s: %s", client.id, error)
        finally:
            client.replies.put_nowait(None)

    def _leave(self, client: Client) -> None:
        for task in client.tasks:
            task.cancel()
        with self._node.changing() as store:
            store.client_lost(client.id)
            if client.superseded.is_set() or not store.reservations(client.id):
                self._end(client)
                return
        log.warning("session of %s broke while it may write; its slots are quarantined until it is over", client.id)
        task = asyncio.create_task(self._outlive(client))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _outlive(self, client: Client) -> None:
        superseded = asyncio.ensure_future(client.superseded.wait())
        try:
            process = watch(client.process)
            try:
                while not client.superseded.is_set() and (process is None or process.is_alive()):
                    await asyncio.wait([superseded], timeout=None if process is None else CHECK_S)
            finally:
                if process is not None:
                    process.close()
        except PeerGone:
            log.info("the process of %s has ended", client.id)
        finally:
            superseded.cancel()
        if not client.superseded.is_set():
            await asyncio.sleep(DRAIN_S)
        self._end(client)

    def _end(self, client: Client) -> None:
        self._clients.discard(client)
        with self._node.changing() as store:
            store.client_gone(client.id)

    # ---- requests -----------------------------------------------------------------------------------------------------------------

    def _begin(self, client: Client, request: pb.StoreRequest) -> None:
        kind = request.WhichOneof("body")
        if kind == "acquire":
            self._later(client, request.call, self._acquire(client, request))
        elif kind == "attach" and request.attach.allow_pull:
            self._later(client, request.call, self._attach_or_pull(client, request))
        else:
            try:
                client.answer(request.call, self._answers[kind or ""](self, client, request))
            except HeadraceError as error:
                client.refuse(request.call, error)
            except KeyError:
                client.refuse(request.call, InvalidRequest(f"unknown request {kind}", field="body"))

    def _later(self, client: Client, call: int, work: Coroutine[Any, Any, None]) -> None:
        async def guarded() -> None:
            try:
                await work
            except HeadraceError as error:
                client.refuse(call, error)
            except Exception as error:
                log.exception("request %d of %s failed", call, client.id)
                client.refuse(call, HeadraceError(str(error)))

        task = asyncio.create_task(guarded())
        client.tasks.add(task)
        task.add_done_callback(client.tasks.discard)

    def _attach(self, client: Client, request: pb.StoreRequest) -> pb.StoreReply:
        return _grants(self._granted(client, request.attach, _keys(request.attach)))

    def _granted(self, client: Client, attach: pb.Attach, keys: Sequence[Key]) -> list[Grant]:
        if self.draining:
            return [Grant(Mover.HAVE if self._node.store.has(key.hash) else Mover.NO_CREDIT) for key in keys]
        with self._node.changing() as store:
            return store.attach(client.id, attach.request_id, attach.attempt, keys, attach.deadline, self._node.now())

    async def _attach_or_pull(self, client: Client, request: pb.StoreRequest) -> None:
        attach, keys = request.attach, _keys(request.attach)
        places = await self._puller.places([key.hash for key in keys if not key.private])
        pulled = {} if self.draining else self._puller.start(attach.request_id, attach.attempt, places, attach.deadline)
        granted = iter(self._granted(client, attach, [key for key in keys if key.hash not in pulled]))
        client.answer(request.call, _grants([pulled[key.hash] if key.hash in pulled else next(granted) for key in keys]))

    def _commit(self, client: Client, request: pb.StoreRequest) -> pb.StoreReply:
        with self._node.changing() as store:
            done = [store.commit(client.id, b.reservation, b.length, b.checksum, b.fidelity, b.num_tokens, self._node.now()) for b in request.commit.blocks]
        return pb.StoreReply(commit=pb.CommitReply(accepted=[c.accepted for c in done], present=[c.present for c in done]))

    def _abandon(self, client: Client, request: pb.StoreRequest) -> pb.StoreReply:
        with self._node.changing() as store:
            store.abandon(client.id, request.abandon.reservations or store.reservations(client.id))
        return pb.StoreReply(done=pb.Done())

    async def _acquire(self, client: Client, request: pb.StoreRequest) -> None:
        acquire = request.acquire
        hashes = [BlockHash(name) for name in acquire.hashes]
        if acquire.allow_pull and acquire.wait_until > self._node.now():
            places = await self._puller.places(hashes)
            self._puller.start(acquire.request_id, 0, places, acquire.lease_until)
        acquired = await self._node.acquire(
            client.id,
            acquire.request_id,
            hashes,
            wait_until=acquire.wait_until,
            lease_until=acquire.lease_until,
            fidelity=acquire.fidelity,
            expect=acquire.expect,
        )
        blocks = [
            pb.LeasedBlock(offset=self._node.store.offset(b.slot), length=b.length, checksum=b.checksum, fidelity=b.fidelity, num_tokens=b.num_tokens)
            for b in acquired.blocks
        ]
        client.answer(request.call, pb.StoreReply(acquire=pb.AcquireReply(lease=acquired.lease, blocks=blocks)))

    def _release(self, client: Client, request: pb.StoreRequest) -> pb.StoreReply:
        self._node.drop_corrupt([BlockHash(name) for name in request.release.corrupt])
        with self._node.changing() as store:
            store.release(client.id, request.release.lease)
        return pb.StoreReply(done=pb.Done())

    def _forget(self, client: Client, request: pb.StoreRequest) -> pb.StoreReply:
        with self._node.changing() as store:
            store.forget(request.forget.request_id)
        return pb.StoreReply(done=pb.Done())

    def _status(self, client: Client, request: pb.StoreRequest) -> pb.StoreReply:
        now, asked = self._node.now(), request.status
        counts: dict[str, Any] = {**self._node.store.status(now)}
        status = pb.StoreStatus(**counts, counters=self.counters())
        if asked.check_integrity:
            status.violations.extend(self._node.store.check_integrity(now))
        if asked.list_hashes:
            status.hashes.extend(self._node.store.hashes())
        return pb.StoreReply(status=status)

    def counters(self) -> dict[str, int]:
        return {**self._node.store.counters, **self._node.hints.counters, **self._puller.counters, "clients": len(self._clients)}

    _answers: "dict[str, Callable[[StoreService, Client, pb.StoreRequest], pb.StoreReply]]" = {  # noqa: RUF012 (never changed)
        "attach": _attach,
        "commit": _commit,
        "abandon": _abandon,
        "release": _release,
        "forget": _forget,
        "status": _status,
    }


def _keys(attach: pb.Attach) -> list[Key]:
    return [Key(BlockHash(key.hash), key.length, key.private) for key in attach.blocks]


def _grants(grants: Sequence[Grant]) -> pb.StoreReply:
    rows = [pb.Grant(mover=pb.Grant.Mover.ValueType(grant.mover), reservation=grant.reservation, offset=grant.offset) for grant in grants]
    return pb.StoreReply(attach=pb.AttachReply(grants=rows))


def _failure(error: HeadraceError) -> pb.StoreReply:
    return pb.StoreReply(failure=pb.Failure(code=error.code, message=error.message))
