"""The HTTP face: endpoints, admission, streaming, health. Owns the translation between HTTP and a Life; knows nothing of streams to workers.

Invariant: whatever ends a request early (the client, an error, the deadline) closes its Life, which aborts it on every worker.
"""

import asyncio
import re
import secrets
import time
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ExceptionHandler

from protocol.errors import BodyTooLarge, Cancelled, DeadlineExceeded, HeadraceError, Overloaded, Unavailable
from protocol.instants import Instant
from protocol.request import GenerationRequest
from router.adapters import AdapterControl
from router.answer import Answer
from router.choices import Choice
from router.embeddings import Embedding, EmbeddingInquiry, parse_embedding
from router.fields import Endpoint
from router.life import Life, Spine
from router.metrics import CONTENT_TYPE
from router.openai import Inquiry, PromptTokenizer, convert, decode, known, parse, timeout_of
from router.replies import ChatReply, CompletionReply
from router.responses import error_response, json_response, until_disconnect
from router.timeline import Timeline, TimelineStore
from router.view import AdapterView

TIMEOUT_HEADERS = ("x-request-timeout-s", "x-headrace-deadline-s")
BODY_S = 30.0  # for a client to send its whole request
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
    adapters: AdapterControl
    running: int = 0
    draining: bool = False
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    def enter(self, count: int) -> None:
        self.running += count
        self.idle.clear()

    def leave(self, count: int) -> None:
        self.running -= count
        if not self.running:
            self.idle.set()


@dataclass(frozen=True, slots=True)
class Use:
    """Counts requests under way, and those of an adapter as its users."""

    service: Service
    adapter: str

    def enter(self, count: int) -> None:
        self.service.enter(count)
        self.service.adapters.enter(self.adapter, count)

    def leave(self, count: int) -> None:
        self.service.leave(count)
        self.service.adapters.leave(self.adapter, count)


def build_app(service: Service) -> Starlette:
    endpoints = Endpoints(service)
    routes = [
        Route("/v1/chat/completions", endpoints.chat, methods=["POST"]),
        Route("/v1/completions", endpoints.completion, methods=["POST"]),
        Route("/v1/embeddings", endpoints.embeddings, methods=["POST"]),
        Route("/v1/load_lora_adapter", endpoints.load_adapter, methods=["POST"]),
        Route("/v1/unload_lora_adapter", endpoints.unload_adapter, methods=["POST"]),
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
            self._admit(1)
            inquiry, lives = await self._prepare(request, endpoint, public_id)
        except HeadraceError as error:
            self._service.spine.metrics.refused(error.code)
            return error_response(error, public_id)
        answer = self._answer(inquiry, lives, public_id)
        return await (answer.stream(request, public_id) if inquiry.stream else answer.whole(request, public_id))

    def _admit(self, count: int) -> None:
        """Room for `count` more answers; a request for many alone is let in."""
        service = self._service
        if service.draining:
            raise Unavailable("this router is shutting down")
        if service.running and service.running + count > service.spine.config.max_requests:
            raise Overloaded(f"{service.running} requests are running; this router takes {service.spine.config.max_requests}")

    async def _prepare(self, request: Request, endpoint: Endpoint, public_id: str) -> tuple[Inquiry, list[Life]]:
        received = time.time()
        service = self._service
        deadline = received + _timeout(request, service)
        inquiry = parse(await _body(request, service.spine.config.max_body_bytes), endpoint)
        adapter = service.adapters.of_model(inquiry.model)
        self._admit(inquiry.n)
        tokens = await self._tokenize(inquiry)
        unique_id = f"{public_id}.{secrets.token_hex(4)}"  # clients may reuse theirs; workers must never meet one twice
        generation = inquiry.generation(unique_id, tokens, deadline, service.max_context_tokens, service.tokenizer)
        generation = _with_adapter(generation, adapter)
        return inquiry, [Life(one, service.spine, self._new_timeline(public_id, one, received)) for one in generation.samples(inquiry.n)]

    def _answer(self, inquiry: Inquiry, lives: list[Life], public_id: str) -> Answer:
        service = self._service
        reply = _REPLIES[inquiry.endpoint](public_id, inquiry.model, int(time.time()), inquiry.include_usage)
        choices = [Choice(inquiry, life.request.prompt_tokens, service.tokenizer) for life in lives]
        return Answer(Use(service, lives[0].request.adapter), service.spine.metrics, lives, choices, reply, inquiry.include_usage, inquiry.shows_answer)

    async def _tokenize(self, inquiry: Inquiry) -> tuple[int, ...]:
        if inquiry.prompt_characters < LONG_PROMPT_CHARACTERS:
            return inquiry.tokenize(self._service.tokenizer)
        return await asyncio.to_thread(inquiry.tokenize, self._service.tokenizer)

    # ---- embeddings ------------------------------------------------------------------------------------------------------

    async def embeddings(self, request: Request) -> Response:
        public_id = _public_id(request)
        try:
            self._admit(1)
            inquiry, running = await self._prepare_embedding(request, public_id)
        except HeadraceError as error:
            self._service.spine.metrics.refused(error.code)
            return error_response(error, public_id)
        try:
            vectors = await until_disconnect(request.receive, running.vectors())
            return json_response(inquiry.body(vectors, running.usage), headers={"x-request-id": public_id})
        except HeadraceError as error:
            return error_response(error, public_id)

    async def _prepare_embedding(self, request: Request, public_id: str) -> tuple[EmbeddingInquiry, Embedding]:
        received = time.time()
        service, config = self._service, self._service.spine.config
        deadline = received + _timeout(request, service)
        inquiry = parse_embedding(await _body(request, config.max_body_bytes))
        adapter = service.adapters.of_model(inquiry.fields.model)
        self._admit(len(inquiry.inputs))
        is_long = inquiry.characters >= LONG_PROMPT_CHARACTERS
        prompts = await asyncio.to_thread(inquiry.tokenize, service.tokenizer) if is_long else inquiry.tokenize(service.tokenizer)
        unique_id = f"{public_id}.{secrets.token_hex(4)}"
        lives = [
            Life(one, service.spine, self._new_timeline(public_id, one, received, index))
            for index, one in enumerate(
                _with_adapter(one, adapter) for one in inquiry.requests(unique_id, prompts, deadline, service.max_context_tokens, config.pooling)
            )
        ]
        return inquiry, Embedding(Use(service, lives[0].request.adapter), service.spine.metrics, lives)

    def _new_timeline(self, public_id: str, generation: GenerationRequest, received: float, index: int = 0) -> Timeline:
        """Of the first of n answers or inputs by the request's id, of the others by `id.1`, `id.2`, ..."""
        index = index or generation.sample
        name = f"{public_id}.{index}" if index else public_id
        timeline = Timeline(name, prompt_tokens=len(generation.prompt_tokens))
        timeline.add(Instant.RECEIVED, received)
        self._service.timelines.add(name, timeline)
        return timeline

    # ---- adapters --------------------------------------------------------------------------------------------------------

    async def load_adapter(self, request: Request) -> Response:
        service = self._service
        self._check_changes()
        fields = convert(known(decode(await _body(request, 65536)), {"lora_name", "lora_path"}, {"load_inplace": (False,)}, {"base_model_name"}), LoadFields)
        await service.adapters.load(fields.lora_name, fields.lora_path, time.time() + _timeout(request, service))
        return Response(f"Success: LoRA adapter '{fields.lora_name}' added successfully.", media_type="text/plain")

    async def unload_adapter(self, request: Request) -> Response:
        service = self._service
        self._check_changes()
        fields = convert(known(decode(await _body(request, 65536)), {"lora_name"}, {}, {"lora_int_id"}), UnloadFields)
        await service.adapters.unload(fields.lora_name, time.time() + _timeout(request, service))
        return Response(f"Success: LoRA adapter '{fields.lora_name}' removed successfully.", media_type="text/plain")

    def _check_changes(self) -> None:
        if not self._service.spine.config.adapter_changes:
            raise HTTPException(404, "switched off; router.adapter_changes allows it")

    # ---- looking in ------------------------------------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        adapters = self._service.adapters.served()
        return json_response({"object": "list", "data": [self._model_body(), *(self._adapter_body(adapters[name]) for name in sorted(adapters))]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        adapter = self._service.adapters.of_model(name)
        return json_response(self._model_body() if adapter is None else self._adapter_body(adapter))

    def _adapter_body(self, adapter: AdapterView) -> dict[str, Any]:
        return self._model_body() | {"id": adapter.name, "parent": self._service.model_name, "root": adapter.path, "revision": adapter.revision}

    def _model_body(self) -> dict[str, Any]:
        service = self._service
        return {
            "id": service.model_name,
            "object": "model",
            "created": service.started_at,
            "owned_by": "headrace",
            "parent": None,
            "max_model_len": service.max_context_tokens,
        }

    async def timeline(self, request: Request) -> Response:
        timeline = self._service.timelines.get(request.path_params["request_id"])
        if timeline is None:
            return _not_found("no such request, or it is too long ago")
        return json_response(timeline.body())

    async def live(self, request: Request) -> Response:
        return json_response({"status": "live"})

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
        return json_response(body, 503 if reason else 200, {"retry-after": "1"} if reason else None)

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
        return json_response(body)


class LoadFields(msgspec.Struct, frozen=True):
    lora_name: str
    lora_path: str


class UnloadFields(msgspec.Struct, frozen=True):
    lora_name: str


def _with_adapter(request: GenerationRequest, adapter: AdapterView | None) -> GenerationRequest:
    return request if adapter is None else replace(request, adapter=adapter.name, adapter_revision=adapter.revision)


# ---- HTTP's small parts -------------------------------------------------------------------------------------------------------------


async def _body(request: Request, limit: int) -> bytes:
    """The whole body, never more than `limit` bytes in memory, within BODY_S."""
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise BodyTooLarge(f"the body is larger than {limit} bytes")
                parts.append(part)
    except TimeoutError:
        raise DeadlineExceeded(f"the body did not come within {BODY_S:g} s", stage=Instant.RECEIVED) from None
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


def _not_found(words: str, status: int = 404) -> Response:
    return json_response(
        {"error": {"message": words, "type": "not_found_error" if status == 404 else "invalid_request_error", "param": None, "code": None}}, status
    )


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HeadraceError)
    return error_response(error, _public_id(request))


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _not_found(f"{request.method} {request.url.path}: {error.detail}", error.status_code)


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=Cancelled.status)


async def _on_crash(request: Request, error: Exception) -> Response:
    """The log has the exception; the client learns that it was ours."""
    return error_response(HeadraceError("internal error"), _public_id(request))
