"""A session's calls alone, against a stream that answers when the test says so: grants that nobody takes are given back."""

import asyncio
import time
from typing import Any

import pytest

from kvstore.hashing import BlockHash
from kvstore.session import StoreSession
from kvstore.store import Key
from protocol import headrace_pb2 as pb
from protocol.errors import DeadlineExceeded

KEYS = [Key(BlockHash(b"a" * 16), 8)]


class Stream:
    def __init__(self) -> None:
        self.replies: asyncio.Queue[pb.StoreReply] = asyncio.Queue()
        self.requests: list[pb.StoreRequest] = []

    async def write(self, request: pb.StoreRequest) -> None:
        self.requests.append(request)

    async def read(self) -> pb.StoreReply:
        return await self.replies.get()

    def grant(self) -> None:
        grant = pb.Grant(mover=pb.Grant.PUSH, reservation=7)
        self.replies.put_nowait(pb.StoreReply(call=1, attach=pb.AttachReply(grants=[grant])))

    @property
    def abandoned(self) -> list[int]:
        return [number for request in self.requests for number in request.abandon.reservations]


class Nothing:
    async def close(self) -> None: ...
    def disconnect(self, peer: str) -> None: ...


async def attaching(deadline: float) -> tuple[Stream, "asyncio.Task[Any]"]:
    stream, nothing = Stream(), Nothing()
    session = StoreSession(nothing, stream, pb.StoreWelcome(), nothing, "")  # type: ignore[arg-type]
    task = asyncio.create_task(session.attach("r", 1, KEYS, deadline))
    while not stream.requests:  # noqa: ASYNC110 (the sender is the session's)
        await asyncio.sleep(0)
    return stream, task


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_an_answer_in_the_very_moment_of_the_deadline_is_used() -> None:
    stream, task = await attaching(time.time() + 0.05)
    stream.grant()
    time.sleep(0.1)  # noqa: ASYNC251 (now the answer and the timer come in one turn of the loop)
    assert [grant.reservation for grant in await task] == [7]


async def test_an_answer_after_the_deadline_is_given_back() -> None:
    stream, task = await attaching(time.time() + 0.01)
    with pytest.raises(DeadlineExceeded):
        await task
    stream.grant()
    await settle()
    assert stream.abandoned == [7]


@pytest.mark.parametrize("turns", range(4))
async def test_a_cancelled_caller_takes_the_grant_or_it_is_given_back(turns: int) -> None:
    stream, task = await attaching(time.time() + 10)
    stream.grant()
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    await settle()
    assert (stream.abandoned == [7]) == task.cancelled()
