"""Jobs of the data plane without gRPC: one that cannot begin harms no other."""

import asyncio
from typing import Any

from engine.engine import Event
from protocol import headrace_pb2 as pb
from worker.data_plane import DataPlane, RouterStream


class Job:
    is_done = False

    def __init__(self, message: pb.Decode) -> None:
        self.key = (message.request.request_id, message.request.attempt)

    def handle(self, event: Event) -> None: ...

    def abort(self) -> None: ...


class Service:
    """Takes whatever has tokens."""

    def start(self, message: Any, emit: Any) -> Job:
        if not message.request.prompt_tokens:
            raise ValueError("nothing to begin with")
        return Job(message)


async def messages() -> Any:
    for request_id, prompt in (("good", [1]), ("bad", []), ("late", [2])):
        yield pb.RouterMessage(decode=pb.Decode(request=pb.Request(request_id=request_id, attempt=3, prompt_tokens=prompt)))


async def test_a_request_that_cannot_begin_gets_an_error_row_and_the_stream_goes_on() -> None:
    plane = DataPlane({"decode": Service()}, pb.WorkerHello(), pb.WorkerStatus, "token")
    stream = RouterStream()
    await plane._read(messages(), stream)
    assert plane.num_jobs == 2
    async with asyncio.timeout(5):
        (row,) = await stream.rows(1.0)
    assert (row.request_id, row.attempt, row.finish_reason, row.error_code) == ("bad", 3, "error", "internal_error")
