"""The HTTP face on a loopback port, asked through the official client where it can ask."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from fakes.cluster import MODEL, cluster, served, until
from fakes.worker import FakeWorker, Faults, answer_text

PROMPT = "Hello there, this is a prompt."
TOKENS = [256, *PROMPT.encode()]
CHAT = [{"role": "user", "content": PROMPT}]
CHAT_TOKENS = [256, *f"user: {PROMPT}\n".encode()]


def client(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=20, http_client=web())


def web(timeout: float | httpx.Timeout = 20) -> httpx.AsyncClient:
    """Without reading the machine's certificates, which takes longer than most of these tests."""
    return httpx.AsyncClient(timeout=timeout, verify=False)


def pair(**decode: Any) -> list[FakeWorker]:
    return [FakeWorker("p0", "prefill", "n0", cached_tokens=8), FakeWorker("d0", "decode", "n1", **decode)]


async def test_chat_whole() -> None:
    async with cluster(pair()) as made, served(made) as url, client(url) as ai:
        answer = await ai.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=6)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", answer_text(CHAT_TOKENS, 6), "length")
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-") and answer.model == MODEL
    usage = answer.usage
    assert usage is not None and usage.prompt_tokens_details is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (len(CHAT_TOKENS), 6, len(CHAT_TOKENS) + 6)
    assert usage.prompt_tokens_details.cached_tokens == 8


async def test_chat_stream() -> None:
    async with cluster(pair(eos_after=6)) as made, served(made) as url, client(url) as ai:
        stream = await ai.chat.completions.create(model=MODEL, messages=CHAT, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == answer_text(CHAT_TOKENS, 6)
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * 6 + ["stop"]
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 6
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


async def test_completion_whole_and_stream() -> None:
    async with cluster(pair()) as made, served(made) as url, client(url) as ai:
        whole = await ai.completions.create(model=MODEL, prompt=PROMPT)
        stream = await ai.completions.create(model=MODEL, prompt=TOKENS, stream=True, temperature=0)
        chunks = [chunk async for chunk in stream]
    assert whole.choices[0].text == answer_text(TOKENS, 16) == "".join(chunk.choices[0].text for chunk in chunks)
    assert whole.id.startswith("cmpl-") and whole.object == "text_completion"
    assert chunks[-1].choices[0].finish_reason == "length"


async def test_the_wire_form_of_a_stream() -> None:
    async with cluster(pair()) as made, served(made) as url, web() as http:
        reply = await http.post(
            f"{url}/v1/completions", json={"model": MODEL, "prompt": PROMPT, "max_tokens": 2, "stream": True}, headers={"x-request-id": "my-id"}
        )
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.headers["x-request-id"] == "my-id"
    events = reply.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(json.loads(line.removeprefix("data: "))["id"] == "cmpl-my-id" for line in events[:-2])


@pytest.mark.parametrize(
    "path,content,status,param,code",
    [
        ("chat/completions", {"model": MODEL, "messages": CHAT, "max_tokens": 0}, 400, "max_tokens", "invalid_request"),
        ("chat/completions", {"model": "other", "messages": CHAT}, 404, "model", "model_not_found"),
        ("completions", {"model": MODEL, "prompt": "a" * 5000}, 400, "prompt", "context_length_exceeded"),
        ("completions", {"model": MODEL, "prompt": "x", "best_of": 2}, 400, "best_of", "invalid_request"),
        ("completions", b"{", 400, None, "invalid_request"),
        ("completions", b'{"model": "\xff"}', 400, None, "invalid_request"),
        ("completions", b" " * 200_000, 413, None, "body_too_large"),
        ("nothing", {}, 404, None, None),
    ],
)
async def test_refusals(path: str, content: Any, status: int, param: str | None, code: str | None) -> None:
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    async with cluster(pair(), max_body_bytes=100_000) as made, served(made) as url, web() as http:
        reply = await http.post(f"{url}/v1/{path}", content=raw)
        after = await http.get(f"{url}/health")
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["code"]) == (status, param, code)
    assert error["message"] and error["type"]
    assert after.status_code == 200
    assert not made.workers["p0"].prefills


async def test_the_client_library_understands_errors() -> None:
    async with cluster(pair()) as made, served(made) as url, client(url) as ai:
        with pytest.raises(openai.BadRequestError) as bad:
            await ai.chat.completions.create(model=MODEL, messages=CHAT, top_p=7)
        with pytest.raises(openai.NotFoundError):
            await ai.chat.completions.create(model="other", messages=CHAT)
        with pytest.raises(openai.NotFoundError):
            await ai.models.retrieve("other")
        assert [model.id async for model in ai.models.list()] == [MODEL]
        assert (await ai.models.retrieve(MODEL)).owned_by == "headrace"
    assert bad.value.param == "top_p" and bad.value.code == "invalid_request"


async def test_an_error_within_a_stream_is_an_event_and_no_done() -> None:
    async with cluster(pair(faults=Faults(error="internal_error", error_after=3))) as made, served(made) as url, client(url) as ai:
        stream = await ai.completions.create(model=MODEL, prompt=PROMPT, stream=True)
        got: list[str] = []
        with pytest.raises(openai.APIError, match="as told"):
            async for chunk in stream:
                got.append(chunk.choices[0].text)
        assert "".join(got) == answer_text(TOKENS, 3)
        async with web() as http:
            reply = await http.post(f"{url}/v1/completions", json={"model": MODEL, "prompt": PROMPT, "stream": True})
    assert reply.status_code == 200 and "event: error\n" in reply.text and "[DONE]" not in reply.text


async def test_an_error_before_the_first_token_keeps_its_status() -> None:
    workers = [FakeWorker("w0", faults=Faults(error="overloaded"))]
    async with cluster(workers) as made, served(made) as url, web() as http:
        for stream in (True, False):
            reply = await http.post(f"{url}/v1/completions", json={"model": MODEL, "prompt": PROMPT, "stream": stream})
            assert (reply.status_code, reply.json()["error"]["code"], reply.headers["retry-after"]) == (429, "overloaded", "1")


@pytest.mark.parametrize("header", ["x-request-timeout-s", "x-headrace-deadline-s"])
@pytest.mark.parametrize("stream", [True, False])
async def test_deadline_is_504_with_the_stage(header: str, stream: bool) -> None:
    workers = [FakeWorker("p0", "prefill", "n0", faults=Faults(wedge_after=0)), FakeWorker("d0", "decode", "n1")]
    async with cluster(workers, stall_s=30) as made, served(made) as url, web() as http:
        reply = await http.post(
            f"{url}/v1/completions", json={"model": MODEL, "prompt": PROMPT, "stream": stream}, headers={header: "0.3", "x-request-id": "late"}
        )
        timeline = (await http.get(f"{url}/v1/requests/late/timeline")).json()
    assert (reply.status_code, reply.json()["error"]["code"], reply.json()["error"]["stage"]) == (504, "deadline_exceeded", "routed")
    assert timeline["failures"][0]["code"] == "deadline_exceeded"


async def test_bad_deadline_header() -> None:
    async with cluster(pair()) as made, served(made) as url, web() as http:
        reply = await http.post(f"{url}/v1/completions", json={"model": MODEL, "prompt": PROMPT}, headers={"x-request-timeout-s": "soon"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "x-request-timeout-s")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("hangs", ["prefill", "decode"])
async def test_a_disconnect_aborts_on_every_worker(stream: bool, hangs: str) -> None:
    p0, d0 = pair(faults=Faults(wedge_after=3 if hangs == "decode" else None))
    p0.faults = Faults(wedge_after=0 if hangs == "prefill" else None)
    async with cluster([p0, d0], stall_s=30) as made, served(made) as url:
        with pytest.raises(httpx.ReadTimeout):
            async with web(httpx.Timeout(5, read=0.3)) as http:
                await http.post(f"{url}/v1/completions", json={"model": MODEL, "prompt": PROMPT, "stream": stream})
        await made.until_quiet()
        assert len(p0.aborts) == 1
        assert len(d0.aborts) == (1 if hangs == "decode" else 0)
        assert made.service.running == 0
        assert made.metric("headrace_requests_total") == made.metric("vllm:num_requests_running") + 1
        assert 'headrace_requests_total{outcome="cancelled"} 1.0' in made.service.spine.metrics.text().decode()


async def test_migration_within_a_stream_is_invisible() -> None:
    workers = [*pair(faults=Faults(die_after=4)), FakeWorker("d1", "decode", "n0")]
    workers[2].faults = Faults()
    async with cluster(workers) as made, served(made) as url, client(url) as ai:
        texts = []
        for _ in range(3):
            stream = await ai.completions.create(model=MODEL, prompt=PROMPT, max_tokens=30, stream=True)
            texts.append("".join([chunk.choices[0].text async for chunk in stream]))
        assert texts == [answer_text(TOKENS, 30)] * 3
        assert made.metric("headrace_migrations_total") == 1


async def test_more_than_max_requests_is_429() -> None:
    async with cluster(pair(token_s=0.02), max_requests=2) as made, served(made) as url, client(url) as ai:
        running = [asyncio.create_task(ai.completions.create(model=MODEL, prompt=PROMPT)) for _ in range(2)]
        await until(lambda: made.service.running == 2)
        with pytest.raises(openai.RateLimitError) as caught:
            await ai.completions.create(model=MODEL, prompt=PROMPT)
        assert caught.value.response.headers["retry-after"] == "1"
        assert {answer.choices[0].text for answer in await asyncio.gather(*running)} == {answer_text(TOKENS, 16)}


async def test_health_tells_the_truth() -> None:
    p0, d0 = pair()
    async with cluster([p0, d0]) as made, served(made) as url, web() as http:
        assert (await http.get(f"{url}/health")).json()["healthy_workers"] == ["d0", "p0"]
        await d0.stop()
        p0.draining = True
        await made.until_healthy(0)
        reply = await http.get(f"{url}/health")
        assert reply.status_code == 503
        assert reply.json()["troubles"]["p0"] == "draining" and "not connected" in reply.json()["troubles"]["d0"]
        assert (await http.get(f"{url}/live")).status_code == 200
        refused = await http.post(f"{url}/v1/completions", json={"model": MODEL, "prompt": PROMPT})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
        p0.draining = False
        await made.until_healthy(1)
        made.service.draining = True
        assert (await http.get(f"{url}/health")).json()["reason"] == "this router is shutting down"
        assert (await http.post(f"{url}/v1/completions", json={"model": MODEL, "prompt": PROMPT})).status_code == 503


async def test_looking_in() -> None:
    async with cluster(pair()) as made, served(made) as url, web() as http:
        before = time.time()
        reply = await http.post(f"{url}/v1/completions", json={"model": MODEL, "prompt": PROMPT}, headers={"x-request-id": "look"})
        await made.until_quiet()
        timeline = (await http.get(f"{url}/v1/requests/{reply.json()['id']}/timeline")).json()
        state = (await http.get(f"{url}/cluster")).json()
        metrics = (await http.get(f"{url}/metrics")).text
        unknown = await http.get(f"{url}/v1/requests/nobody/timeline")
    routed = next(instant for instant in timeline["instants"] if instant["name"] == "routed")
    assert routed["at"] >= before and routed["since_received_s"] >= 0
    assert timeline["request_id"] == "look" and timeline["cached_tokens"] == 8 and timeline["output_tokens"] == 16
    prefill, decode = timeline["sides"]
    assert (prefill["worker"], decode["worker"], decode["outcome"]) == ("p0", "d0", "length")
    assert prefill["work"]["pushed_gb_per_s"] == pytest.approx(0.002) and prefill["work"]["codec"] == "raw"
    assert [(w["name"], w["role"], w["generation"], w["healthy"]) for w in state["workers"]] == [("d0", "decode", 1, True), ("p0", "prefill", 1, True)]
    assert state["stores"][0]["attributes"] == {"codec": "raw"}
    assert 'vllm:request_success_total{finished_reason="length",model_name="fake-model"} 1.0' in metrics
    assert "vllm:time_to_first_token_seconds_count" in metrics and 'headrace_worker_total{counter="steps"' in metrics
    assert "Not A Name" not in metrics
    assert unknown.status_code == 404


@pytest.mark.parametrize("given,kept", [("abc-1", True), ("a b", False), ("x" * 129, False), ("", False)])
async def test_request_ids(given: str, kept: bool) -> None:
    async with cluster(pair()) as made, served(made) as url, web() as http:
        reply = await http.post(f"{url}/v1/completions", json={"model": MODEL, "prompt": PROMPT}, headers={"x-request-id": given})
    assert (reply.headers["x-request-id"] == given) is kept


async def test_one_request_id_for_two_requests_at_once() -> None:
    async with cluster(pair(token_s=0.01)) as made, served(made) as url, web() as http:
        posts = [http.post(f"{url}/v1/completions", json={"model": MODEL, "prompt": text}, headers={"x-request-id": "same"}) for text in ("one", "two")]
        texts = [reply.json()["choices"][0]["text"] for reply in await asyncio.gather(*posts)]
    assert texts == [answer_text([256, *text.encode()], 16) for text in ("one", "two")]


async def test_a_long_prompt_is_tokenised_beside_the_event_loop() -> None:
    async with cluster(pair(), max_context_tokens=50_000) as made, served(made) as url, client(url) as ai:
        answer = await ai.completions.create(model=MODEL, prompt="x" * 40_000, max_tokens=2)
    assert answer.usage is not None and answer.usage.prompt_tokens == 40_001


async def test_a_body_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.app.BODY_S", 0.05)

    async def half() -> AsyncIterator[bytes]:
        yield b'{"model": '
        await asyncio.sleep(5)

    async with cluster(pair()) as made, served(made) as url, web() as http:
        reply = await http.post(f"{url}/v1/completions", content=half())
        assert (reply.status_code, reply.json()["error"]["code"], reply.json()["error"]["stage"]) == (504, "deadline_exceeded", "received")
