"""Event streams and the clients that do not read them."""

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

from router.responses import READ_GRACE_S, EventStream


async def never(*_: Any) -> Any:
    await asyncio.Event().wait()


async def test_a_client_that_reads_nothing_is_left_after_the_deadline() -> None:
    closed = asyncio.Event()

    async def pieces() -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield b"data: x"
        finally:
            closed.set()

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            await never()

    source = pieces()
    stream = EventStream(await anext(source), source, {}, deadline=time.time() - READ_GRACE_S)
    async with asyncio.timeout(5):
        await stream({}, never, send)  # type: ignore[arg-type]
    assert closed.is_set()
