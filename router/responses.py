"""What HTTP needs around a reply's body: JSON, errors, event streams, clients that go away. Knows nothing of what is replied."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable
from typing import TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from protocol.errors import BodyTooLarge, Cancelled, HeadraceError
from router.replies import error_body

READ_GRACE_S = 5.0  # after the deadline, for the client to read that it has passed
T = TypeVar("T")


def json_response(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def error_response(error: HeadraceError, public_id: str) -> Response:
    headers = {"x-request-id": public_id}
    if error.status in (429, 503):
        headers["retry-after"] = "1"
    if isinstance(error, BodyTooLarge):
        headers["connection"] = "close"  # the rest of the body will not be read
    return json_response(error_body(error), error.status, headers)


class EventStream(Response):
    """Server-sent events until they or the client end, or the client has not read them a little after `deadline` (unix seconds); the source is closed then."""

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None], headers: dict[str, str], deadline: float) -> None:
        super().__init__(headers={**headers, "content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._rest = rest
        self._deadline = deadline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(max(self._deadline + READ_GRACE_S - time.time(), 0)):
                await until_disconnect(receive, self._send_all(send))
        except (Cancelled, OSError, TimeoutError):
            pass  # the client has gone or does not read; nobody is left to tell
        finally:
            await self._rest.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for piece in self._rest:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def until_disconnect(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, unless the client goes first: then `work` is cancelled, its clean-up awaited, and Cancelled raised."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Cancelled("the client closed the connection")
        return task.result()
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
