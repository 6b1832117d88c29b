"""The HTTP face: endpoints, admission, streaming, health. Owns the translation between HTTP and a Life; knows nothing of streams to workers.

Invariant: whatever ends a request early (the client, an error, the deadline) closes its Life, which aborts it on every worker.
"""

import asyncio
import logging
import re
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ExceptionHandler, Receive, Scope, Send

from protocol.errors import BodyTooLarge, Cancelled, HeadraceError, Overloaded, Unavailable, UnknownModel
from protocol.instants import Instant
from protocol.request import GenerationRequest
from router.life import Chunk, Life, Spine
from router.metrics import CONTENT_TYPE
from router.openai import Endpoint, Inquiry, PromptTokenizer, parse, timeout_of
from router.replies import DONE, ChatReply, CompletionReply, Reply, error_body, event
from router.timeline import Timeline, TimelineStore

log = logging.getLogger(__name__)
T = TypeVar("T")

TIMEOUT_HEADERS = ("x-request-timeout-s", "x-headrace-deadline-s")
LONG_PROMPT_CHARACTERS = 16_384  # from here on tokenising leaves the event loop
_REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_REPLIES: dict[Endpoint, type[ChatReply] | type[CompletionReply]] = {"chat": ChatReply, "completion": CompletionReply}


@dataclass(slots=True)
class Service:
    """What the endpoints share. `draining`: no new request; running ones go on."""

    spine: Spine
    tokenizer: PromptTokenizer
    model_name: str
    max_context_tokens: int
    timelines: TimelineStore
    started_at: int
    running: int = 0
    draining: bool = False
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    def enter(self) -> None:
        self.running += 1
        self.idle.clear()

    def leave(self) -> None:
        self.running -= 1
        if not self.running:
            self.idle.set()


def build_app(service: Service) -> Starlette:
    endpoints = Endpoints(service)
    routes = [
        Route("/v1/chat/completions", endpoints.chat, methods=["POST"]),
        Route("/v1/completions", endpoints.completion, methods=["POST"]),
        Route("/v1/models", endpoints.models),
        Route("/v1/models/{model:path}", endpoints.model),
        Route("/v1/requests/{request_id}/timeline", endpoints.timeline),
        Route("/cluster", endpoints.cluster),
        Route("/live", endpoints.live),
        Route("/health", endpoints.health),
        Route("/metrics", endpoints.metrics),
    ]
    handlers: dict[Any, ExceptionHandler] = {
        HeadraceError: _on_error,
        HTTPException: _on_http_error,
        ClientDisconnect: _on_disconnect,
        Exception: _on_crash,
    }
    return Starlette(routes=routes, exception_handlers=handlers)


class Endpoints:
    def __init__(self, service: Service) -> None:
        self._service = service

    # ---- generation ------------------------------------------------------------------------------------------------------

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, "chat")

    async def completion(self, request: Request) -> Response:
        return await self._generate(request, "completion")

    async def _generate(self, request: Request, endpoint: Endpoint) -> Response:
        public_id = _public_id(request)
        try:
            self._admit()
            inquiry, life = await self._prepare(request, endpoint, public_id)
        except HeadraceError as error:
            self._service.spine.metrics.refused(error.code)
            return _error_response(error, public_id)
        reply = _REPLIES[endpoint](public_id, self._service.model_name, int(time.time()), inquiry.include_usage)
        answer = Answer(self._service, life, reply, inquiry)
        return await (answer.stream(request, public_id) if inquiry.stream else answer.whole(request, public_id))

    def _admit(self) -> None:
        if self._service.draining:
            raise Unavailable("this router is shutting down")
        if self._service.running >= self._service.spine.config.max_requests:
            raise Overloaded(f"{self._service.running} requests are running, the most that this router takes")

    async def _prepare(self, request: Request, endpoint: Endpoint, public_id: str) -> tuple[Inquiry, Life]:
        received = time.time()
        service = self._service
        deadline = received + _timeout(request, service)
        inquiry = parse(await _body(request, service.spine.config.max_body_bytes), endpoint)
        inquiry.check_model(service.model_name)
        tokens = await self._tokenize(inquiry)
        unique_id = f"{public_id}.{secrets.token_hex(4)}"  # clients may reuse theirs; workers must never meet one twice
        generation = inquiry.generation(unique_id, tokens, deadline, service.max_context_tokens, service.tokenizer.vocab_size)
        return inquiry, Life(generation, service.spine, self._new_timeline(public_id, generation, received))

    async def _tokenize(self, inquiry: Inquiry) -> tuple[int, ...]:
        if inquiry.prompt_characters < LONG_PROMPT_CHARACTERS:
            return inquiry.tokenize(self._service.tokenizer)
        return await asyncio.to_thread(inquiry.tokenize, self._service.tokenizer)

    def _new_timeline(self, public_id: str, generation: GenerationRequest, received: float) -> Timeline:
        timeline = Timeline(public_id, prompt_tokens=len(generation.prompt_tokens))
        timeline.add(Instant.RECEIVED, received)
        self._service.timelines.add(public_id, timeline)
        return timeline

    # ---- looking in ------------------------------------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._model_body()]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        if name != self._service.model_name:
            raise UnknownModel(f"the model {name!r} does not exist", field="model")
        return _json(self._model_body())

    def _model_body(self) -> dict[str, Any]:
        service = self._service
        return {
            "id": service.model_name,
            "object": "model",
            "created": service.started_at,
            "owned_by": "headrace",
            "max_model_len": service.max_context_tokens,
        }

    async def timeline(self, request: Request) -> Response:
        timeline = self._service.timelines.get(request.path_params["request_id"])
        if timeline is None:
            return _not_found("no such request, or it is too long ago")
        return _json(timeline.body())

    async def live(self, request: Request) -> Response:
        return _json({"status": "live"})

    async def health(self, request: Request) -> Response:
        """200 when a request could succeed now: any healthy worker can run both phases."""
        workers = self._service.spine.membership.view().workers
        healthy = [worker.name for worker in workers if worker.healthy]
        reason = "this router is shutting down" if self._service.draining else "" if healthy else "no healthy worker"
        body = {
            "status": "unavailable" if reason else "ok",
            "reason": reason or None,
            "healthy_workers": healthy,
            "troubles": {worker.name: worker.trouble for worker in workers if not worker.healthy},
        }
        return _json(body, 503 if reason else 200, {"retry-after": "1"} if reason else None)

    async def metrics(self, request: Request) -> Response:
        return Response(self._service.spine.metrics.text(), headers={"content-type": CONTENT_TYPE})

    async def cluster(self, request: Request) -> Response:
        service = self._service
        view = service.spine.membership.view()
        body = {
            "model": service.model_name,
            "policy": service.spine.config.policy,
            "running_requests": service.running,
            "draining": service.draining,
            "registry": {"lost": service.spine.membership.registry_lost, "failures": service.spine.membership.registry_failures},
            "workers": [{**msgspec.to_builtins(worker), "healthy": worker.healthy} for worker in view.workers],
            "stores": [msgspec.to_builtins(store) for store in view.stores],
        }
        return _json(body)


class Answer:
    """One running request on its way to its client. Counts and measures it."""

    def __init__(self, service: Service, life: Life, reply: Reply, inquiry: Inquiry) -> None:
        self._service = service
        self._life = life
        self._reply = reply
        self._include_usage = inquiry.include_usage
        self._include_tokens = inquiry.return_token_ids
        self._metrics = service.spine.metrics
        self._started = self._last = time.perf_counter()
        self._begun = False

    async def whole(self, request: Request, public_id: str) -> Response:
        try:
            return await _until_disconnect(request.receive, self._whole(public_id))
        except HeadraceError as error:
            return _error_response(error, public_id)

    async def stream(self, request: Request, public_id: str) -> Response:
        """The head goes out with the first chunk, so that an error before it keeps its status."""
        events = self._events()
        try:
            first = await _until_disconnect(request.receive, anext(events))
        except HeadraceError as error:
            return _error_response(error, public_id)
        finally:
            if not self._begun:
                await events.aclose()
        return EventStream(first, events, {"x-request-id": public_id})

    async def _whole(self, public_id: str) -> Response:
        texts: list[str] = []
        tokens: list[int] = []
        async with aclosing(self._chunks()) as chunks:
            async for chunk in chunks:
                texts.append(chunk.text)
                tokens += chunk.tokens
        body = self._reply.whole("".join(texts), self._life.finish_reason, self._life.usage, tokens if self._include_tokens else None)
        return _json(body, headers={"x-request-id": public_id})

    async def _events(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._chunks()) as chunks:
            try:
                async for chunk in chunks:
                    head = b"" if self._begun else b"".join(event(body) for body in self._reply.opening())
                    self._begun = True
                    yield head + event(self._reply.delta(chunk.text, chunk.finish_reason, chunk.tokens if self._include_tokens else None))
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
        yield (event(self._reply.usage(self._life.usage)) if self._include_usage else b"") + DONE

    async def _chunks(self) -> AsyncGenerator[Chunk, None]:
        """The life's chunks, counted."""
        self._service.enter()
        self._metrics.started()
        outcome = Cancelled.code
        try:
            async with aclosing(self._life.chunks()) as chunks:
                async for chunk in chunks:
                    self._measure(chunk)
                    yield chunk
            outcome = "ok"
            self._metrics.finished(self._life.finish_reason, self._life.usage, time.perf_counter() - self._started)
        except HeadraceError as error:
            outcome = error.code
            raise
        except Exception:
            outcome = HeadraceError.code
            raise
        finally:
            self._service.leave()
            self._metrics.ended(outcome)

    def _measure(self, chunk: Chunk) -> None:
        if not chunk.tokens:
            return
        now = time.perf_counter()
        if self._last == self._started:
            self._metrics.first_token(now - self._started)
        else:
            self._metrics.next_tokens(now - self._last, len(chunk.tokens))
        self._last = now
        self._metrics.generated(len(chunk.tokens))


class EventStream(Response):
    """Server-sent events until they or the client end; either way the source is closed."""

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None], headers: dict[str, str]) -> None:
        super().__init__(headers={**headers, "content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _until_disconnect(receive, self._send_all(send))
        except (Cancelled, OSError):
            pass  # the client has gone; nobody is left to tell
        finally:
            await self._rest.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for piece in self._rest:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _until_disconnect(receive: Receive, work: Awaitable[T]) -> T:
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


# ---- HTTP's small parts -------------------------------------------------------------------------------------------------------------


async def _body(request: Request, limit: int) -> bytes:
    """The whole body, never more than `limit` bytes in memory."""
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise BodyTooLarge(f"the body is larger than {limit} bytes")
        parts.append(part)
    return b"".join(parts)


def _public_id(request: Request) -> str:
    given = request.headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)


def _timeout(request: Request, service: Service) -> float:
    config = service.spine.config
    for header in TIMEOUT_HEADERS:
        if header in request.headers:
            return timeout_of(request.headers[header], header, config.default_deadline_s, config.max_deadline_s)
    return config.default_deadline_s


def _json(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def _error_response(error: HeadraceError, public_id: str) -> Response:
    headers = {"x-request-id": public_id}
    if error.status in (429, 503):
        headers["retry-after"] = "1"
    if isinstance(error, BodyTooLarge):
        headers["connection"] = "close"  # the rest of the body will not be read
    return _json(error_body(error), error.status, headers)


def _not_found(words: str, status: int = 404) -> Response:
    return _json({"error": {"message": words, "type": "not_found_error" if status == 404 else "invalid_request_error", "param": None, "code": None}}, status)


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HeadraceError)
    return _error_response(error, _public_id(request))


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _not_found(f"{request.method} {request.url.path}: {error.detail}", error.status_code)


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=Cancelled.status)


async def _on_crash(request: Request, error: Exception) -> Response:
    """The log has the exception; the client learns that it was ours."""
    return _error_response(HeadraceError("internal error"), _public_id(request))
