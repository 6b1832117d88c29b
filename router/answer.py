"""A running request on its way to its client: one life for each of its n answers, merged. Owns counting and measuring; knows nothing of shapes or workers.

Invariant: when the answer ends, however it ends, so have all its lives.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response

from protocol.errors import Cancelled, HeadraceError
from router.choices import Choice, whole
from router.life import Chunk, Life
from router.metrics import RouterMetrics
from router.replies import DONE, Reply, Usage, error_body, event
from router.responses import EventStream, error_response, json_response, until_disconnect

log = logging.getLogger(__name__)


class Running(Protocol):
    """Counts the answers under way."""

    def enter(self, count: int) -> None: ...
    def leave(self, count: int) -> None: ...


class Answer:
    """`lives` and `choices`: one of each for each of the n answers. `shows_answer` False: an echoed prompt is all that the client gets and pays."""

    def __init__(
        self,
        running: Running,
        metrics: RouterMetrics,
        lives: Sequence[Life],
        choices: Sequence[Choice],
        reply: Reply,
        include_usage: bool,
        shows_answer: bool,
    ) -> None:
        self._running = running
        self._lives = lives
        self._choices = choices
        self._reply = reply
        self._metrics = metrics
        self._include_usage = include_usage
        self._shows_answer = shows_answer
        self._started = time.perf_counter()
        self._last = [self._started] * len(lives)
        self._begun = False

    @property
    def usage(self) -> Usage:
        """The prompt counts once; only what every answer found cached was there before the request."""
        usages = [life.usage for life in self._lives]
        completion = sum(usage.completion_tokens for usage in usages) if self._shows_answer else 0
        return Usage(usages[0].prompt_tokens, completion, min(usage.cached_tokens for usage in usages))

    async def whole(self, request: Request, public_id: str) -> Response:
        try:
            return await until_disconnect(request.receive, self._whole(public_id))
        except HeadraceError as error:
            return error_response(error, public_id)

    async def stream(self, request: Request, public_id: str) -> Response:
        """The head goes out with the first chunk, so that an error before it keeps its status."""
        events = self._events()
        try:
            first = await until_disconnect(request.receive, anext(events))
        except HeadraceError as error:
            return error_response(error, public_id)
        finally:
            if not self._begun:
                await events.aclose()
        return EventStream(first, events, {"x-request-id": public_id}, self._lives[0].request.deadline)

    async def _whole(self, public_id: str) -> Response:
        taken: list[list[Chunk]] = [[] for _ in self._lives]
        async with aclosing(self._chunks()) as chunks:
            async for index, chunk in chunks:
                taken[index].append(chunk)
        pieces = [choice.piece(whole(some)) for choice, some in zip(self._choices, taken, strict=True)]
        return json_response(self._reply.whole(pieces, self.usage), headers={"x-request-id": public_id})

    async def _events(self) -> AsyncGenerator[bytes, None]:
        opened: set[int] = set()
        async with aclosing(self._chunks()) as chunks:
            try:
                async for index, chunk in chunks:
                    head = b"" if index in opened else b"".join(event(body) for body in self._reply.opening(index))
                    opened.add(index)
                    self._begun = True
                    yield head + event(self._reply.delta(index, self._choices[index].piece(chunk)))
            except HeadraceError as error:
                if not self._begun:
                    raise
                yield event(error_body(error), "error")
                return
            except Exception:
                if not self._begun:
                    raise
                log.exception("a stream broke")
                yield event(error_body(HeadraceError("internal error")), "error")
                return
        yield (event(self._reply.usage(self.usage)) if self._include_usage else b"") + DONE

    async def _chunks(self) -> AsyncGenerator[tuple[int, Chunk], None]:
        """The lives' chunks as they come, counted, each with its answer's index."""
        self._running.enter(len(self._lives))
        self._metrics.started()
        outcome = Cancelled.code
        try:
            async with aclosing(merged(self._lives)) as chunks:
                async for index, chunk in chunks:
                    self._measure(index, chunk)
                    yield index, chunk
            outcome = "ok"
            self._metrics.finished(self._lives[0].finish_reason, self.usage, time.perf_counter() - self._started)
        except HeadraceError as error:
            outcome = error.code
            raise
        except Exception:
            outcome = HeadraceError.code
            raise
        finally:
            self._running.leave(len(self._lives))
            self._metrics.ended(outcome)

    def _measure(self, index: int, chunk: Chunk) -> None:
        if not chunk.tokens:
            return
        now, last = time.perf_counter(), self._last[index]
        if last != self._started:
            self._metrics.next_tokens(now - last, len(chunk.tokens))
        elif max(self._last) == self._started:
            self._metrics.first_token(now - self._started)
        self._last[index] = now
        self._metrics.generated(len(chunk.tokens))


async def merged(lives: Sequence[Life]) -> AsyncGenerator[tuple[int, Chunk], None]:
    """All lives at once; the first error of one ends them all."""
    if len(lives) == 1:
        async with aclosing(lives[0].chunks()) as chunks:
            async for chunk in chunks:
                yield 0, chunk
        return
    queue: asyncio.Queue[tuple[int, Chunk] | BaseException | None] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(index, life, queue)) for index, life in enumerate(lives)]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(index: int, life: Life, queue: "asyncio.Queue[tuple[int, Chunk] | BaseException | None]") -> None:
    try:
        async with aclosing(life.chunks()) as chunks:
            async for chunk in chunks:
                queue.put_nowait((index, chunk))
        queue.put_nowait(None)
    except Exception as error:
        queue.put_nowait(error)
