"""A worker without a model: a real gRPC data plane whose tokens are a pure function of the prompt and the position, with faults to switch on."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from protocol import headrace_pb2 as pb
from protocol.channel import VERSION, new_server, require_token
from protocol.headrace_pb2_grpc import add_DataPlaneServicer_to_server
from protocol.membership import Member

TOKEN = "secret"


def answer_token(prompt: list[int], position: int, sample: int = 0) -> int:
    return (sum(prompt) * 31 + position * 17 + sample * 7) % 251


def answer_text(prompt: list[int], num_tokens: int, sample: int = 0) -> str:
    return "".join(f"t{answer_token(prompt, position, sample)} " for position in range(num_tokens))


def logprob(token: int, num_top: int) -> pb.TokenLogprob:
    """The token is the second of the likeliest."""
    top = [(token + 1) % 251, token, *((token + more) % 251 for more in range(2, 30))][:num_top]
    return pb.TokenLogprob(token=token, logprob=-1.0, rank=2, top_tokens=top, top_logprobs=[-0.5 * (index + 1) for index in range(len(top))])


def revision_of(path: str) -> str:
    return f"r{len(path)}"


def embedding_of(prompt: list[int]) -> list[float]:
    """Four values of length 1."""
    values = [sum(prompt) + index * len(prompt) for index in range(4)]
    return [value / sum(other * other for other in values) ** 0.5 for value in values]


@dataclass
class Faults:
    """`die_after`: the process ends after so many tokens. `freeze_after`: nothing is said any more, heartbeats included. `wedge_after`: heartbeats go on,
    steps do not. `error`: code of the error that answers a dispatch after `error_after` tokens. `times`: how many dispatches a fault hits."""

    die_after: int | None = None
    freeze_after: int | None = None
    wedge_after: int | None = None
    error: str | None = None
    error_after: int = 0
    times: int = 1_000_000


@dataclass
class FakeWorker:
    name: str
    role: str = "both"
    node: str = "n0"
    generation: int = 1
    faults: Faults = field(default_factory=Faults)
    token_s: float = 0.0
    heartbeat_s: float = 0.05
    version: int = VERSION
    draining: bool = False
    eos_after: int | None = None
    late_report: bool = True
    kv_pushed: bool = True
    cached_tokens: int = 0
    prefills: list[pb.Prefill] = field(default_factory=list)
    decodes: list[pb.Decode] = field(default_factory=list)
    aborts: list[pb.Abort] = field(default_factory=list)
    address: str = ""
    adapters: dict[str, str] = field(default_factory=dict)  # name -> path; the revision is made of the path
    refuses_adapters: str = ""  # the code of the error that answers a load
    adapter_calls: list[str] = field(default_factory=list)
    steps: int = 0
    frozen: bool = False
    wedged: bool = False

    def __post_init__(self) -> None:
        self._server: grpc.aio.Server | None = None
        self._jobs: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._outboxes: set[asyncio.Queue[pb.WorkerMessage]] = set()
        self._ending: list[asyncio.Task[None]] = []

    @property
    def running(self) -> int:
        return len(self._jobs)

    @property
    def member(self) -> Member:
        attributes = {"role": self.role, "pid": "1", "block_tokens": "64", "salt": "rev/layout"}
        return Member("worker", self.name, self.generation, self.address, self.node, attributes)

    async def start(self, port: int = 0) -> "FakeWorker":
        self._server = new_server()
        add_DataPlaneServicer_to_server(self, self._server)  # type: ignore[arg-type]
        port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        await self._server.start()
        self.address = f"127.0.0.1:{port}"
        return self

    async def stop(self) -> None:
        for job in list(self._jobs.values()):
            job.cancel()
        server, self._server = self._server, None
        if server is not None:
            await server.stop(0)

    # ---- data plane ------------------------------------------------------------------------------------------------------

    async def Connect(self, messages: AsyncIterator[pb.RouterMessage], context: Any) -> AsyncIterator[pb.WorkerMessage]:
        await require_token(context, TOKEN)
        assert (await anext(messages)).HasField("hello")
        outbox: asyncio.Queue[pb.WorkerMessage] = asyncio.Queue()
        self._outboxes.add(outbox)
        reader = asyncio.create_task(self._read(messages, outbox))
        try:
            yield pb.WorkerMessage(
                hello=pb.WorkerHello(version=self.version, name=self.name, generation=self.generation, role=self.role, node=self.node, revision="r")
            )
            while True:
                message = await self._next(outbox)
                while self.frozen:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
                yield message
        finally:
            reader.cancel()
            self._outboxes.discard(outbox)
            for job in list(self._jobs.values()):
                job.cancel()

    async def _next(self, outbox: "asyncio.Queue[pb.WorkerMessage]") -> pb.WorkerMessage:
        try:
            async with asyncio.timeout(self.heartbeat_s):
                return await outbox.get()
        except TimeoutError:
            return pb.WorkerMessage(step=pb.Step(status=self.status()))

    def status(self) -> pb.WorkerStatus:
        return pb.WorkerStatus(
            steps=self.steps,
            running=self.running,
            blocks_total=100,
            blocks_free=100 - self.running,
            draining=self.draining,
            adapters=[pb.Adapter(name=name, path=path, revision=revision_of(path)) for name, path in self.adapters.items()],
            counters={"steps": self.steps, "Not A Name!": 1},
        )

    async def _read(self, messages: AsyncIterator[pb.RouterMessage], outbox: "asyncio.Queue[pb.WorkerMessage]") -> None:
        async for message in messages:
            kind = message.WhichOneof("body")
            if kind == "abort":
                self.aborts.append(message.abort)
                job = self._jobs.pop((message.abort.request_id, message.abort.attempt), None)
                if job is not None:
                    job.cancel()
            elif kind in ("load_adapter", "unload_adapter"):
                outbox.put_nowait(pb.WorkerMessage(step=pb.Step(adapter_replies=[self._adapter(kind, getattr(message, kind))], status=self.status())))
            elif kind == "prefill":
                self.prefills.append(message.prefill)
                self._spawn(message.prefill.request, outbox, self._prefill(message.prefill, outbox))
            elif kind == "decode":
                self.decodes.append(message.decode)
                self._spawn(message.decode.request, outbox, self._decode(message.decode, outbox))

    def _adapter(self, kind: str, message: Any) -> pb.AdapterReply:
        self.adapter_calls.append(f"{kind} {message.name}")
        if kind == "load_adapter" and self.refuses_adapters:
            return pb.AdapterReply(call=message.call, error_code=self.refuses_adapters, error_message="as told")
        if kind == "load_adapter":
            self.adapters[message.name] = message.path
        elif self.adapters.pop(message.name, None) is None:
            return pb.AdapterReply(call=message.call, error_code="model_not_found", error_message="not here")
        return pb.AdapterReply(call=message.call)

    def _spawn(self, request: pb.Request, outbox: "asyncio.Queue[pb.WorkerMessage]", work: Any) -> None:
        key = (request.request_id, request.attempt)
        self._jobs[key] = asyncio.create_task(work)
        self._jobs[key].add_done_callback(lambda _: self._jobs.pop(key, None))

    # ---- the two phases --------------------------------------------------------------------------------------------------

    async def _prefill(self, message: pb.Prefill, outbox: "asyncio.Queue[pb.WorkerMessage]") -> None:
        request = message.request
        if await self._fault(request, 0, outbox):
            return
        prompt = list(request.prompt_tokens)
        ends = "length" if request.sampling.max_tokens == 1 else "stop" if self.eos_after == 1 else "handoff"
        row = self._token_row(request, 0, ends)
        row.work.CopyFrom(pb.Work(computed_tokens=len(prompt), cached_tokens=self.cached_tokens))
        row.instants.add(name="prefill_started", at=request.deadline - 100)
        row.kv_pushed = self.kv_pushed and not self.late_report
        self._say(outbox, row)
        if ends == "handoff" and self.late_report:
            await asyncio.sleep(0.01)
            work = pb.Work(computed_tokens=len(prompt), cached_tokens=self.cached_tokens, pushed_blocks=2, pushed_bytes=2000, pushed_s=0.001, codec="raw")
            self._say(outbox, pb.Row(request_id=request.request_id, attempt=request.attempt, work=work, kv_pushed=self.kv_pushed))

    async def _decode(self, message: pb.Decode, outbox: "asyncio.Queue[pb.WorkerMessage]") -> None:
        request = message.request
        start = len(request.output_tokens)
        if request.pooling:
            row = pb.Row(request_id=request.request_id, attempt=request.attempt, finish_reason="stop", embedding=embedding_of(list(request.prompt_tokens)))
            if not await self._fault(request, 0, outbox):
                self._say(outbox, row)
            return
        last = min(request.sampling.max_tokens, self.eos_after or 1_000_000)
        for position in range(start, last):
            if await self._fault(request, position, outbox):
                return
            ends = "" if position + 1 < last else "stop" if self.eos_after == last else "length"
            row = self._token_row(request, position, ends)
            if ends:
                handed = len(request.prompt_tokens) if message.handoff_attempt else 0
                row.work.CopyFrom(pb.Work(reused_store_tokens=handed, handoff_tokens=handed, cached_tokens=0 if handed else self.cached_tokens))
            self._say(outbox, row)
            await asyncio.sleep(self.token_s)

    def _token_row(self, request: pb.Request, position: int, ends: str) -> pb.Row:
        prompt, sampling = list(request.prompt_tokens), request.sampling
        token = answer_token(prompt, position, request.sample)
        row = pb.Row(request_id=request.request_id, attempt=request.attempt, tokens=[token], text=f"t{token} ", finish_reason=ends)
        if request.adapter:
            assert request.adapter_revision == revision_of(self.adapters[request.adapter])
            row.text = f"{request.adapter}:{row.text}"
        if sampling.HasField("logprobs"):
            row.logprobs.append(logprob(token, sampling.logprobs))
        if sampling.HasField("prompt_logprobs") and position == 0:
            row.prompt_logprobs.extend(logprob(token, sampling.prompt_logprobs) for token in prompt[1:])
        return row

    def _say(self, outbox: "asyncio.Queue[pb.WorkerMessage]", row: pb.Row) -> None:
        self.steps += 1
        outbox.put_nowait(pb.WorkerMessage(step=pb.Step(rows=[row], status=self.status())))

    async def _fault(self, request: pb.Request, position: int, outbox: "asyncio.Queue[pb.WorkerMessage]") -> bool:
        faults = self.faults
        if faults.times <= 0:
            return False
        if faults.die_after is not None and position >= faults.die_after:
            await asyncio.sleep(0.02)  # what was said is on the wire
            self._ending.append(asyncio.create_task(self.stop()))
            return True
        if faults.freeze_after is not None and position >= faults.freeze_after:
            self.frozen = True
        if faults.wedge_after is not None and position >= faults.wedge_after:
            self.wedged = True
        if faults.error is not None and position >= faults.error_after:
            faults.times -= 1
            row = pb.Row(request_id=request.request_id, attempt=request.attempt, finish_reason="error", error_code=faults.error, error_message="as told")
            self._say(outbox, row)
            return True
        while self.frozen or self.wedged:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        return False
