"""/v1/embeddings through the official client: shapes, orders, refusals, retries."""

import asyncio
import base64
import copy
import json
from array import array
from typing import Any

import httpx
import openai
import pytest
from fakes.cluster import MODEL, cluster, served, until
from fakes.worker import FakeWorker, Faults, embedding_of

from protocol.errors import InvalidRequest
from router.embeddings import parse_embedding, shortened


def client(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=20, http_client=httpx.AsyncClient(timeout=20, verify=False))


def pair(**fields: Any) -> list[FakeWorker]:
    return [FakeWorker(name, role, node, **copy.deepcopy(fields)) for name, role, node in (("p0", "prefill", "n0"), ("d0", "decode", "n1"))]


def tokens_of(text: str) -> list[int]:
    return [256, *text.encode()]


INPUTS: list[tuple[Any, list[list[int]]]] = [
    ("one text", [tokens_of("one text")]),
    (["first", "second", "third"], [tokens_of("first"), tokens_of("second"), tokens_of("third")]),
    ([1, 2, 3], [[1, 2, 3]]),
    ([[1, 2, 3], [4, 5]], [[1, 2, 3], [4, 5]]),
]


@pytest.mark.parametrize("given,prompts", INPUTS)
async def test_inputs_and_formats(given: Any, prompts: list[list[int]]) -> None:
    p0, d0 = workers = pair()
    async with cluster(workers) as made, served(made) as url, client(url) as ai:
        by_default = await ai.embeddings.create(model=MODEL, input=given)  # the client asks for base64 and decodes it
        as_floats = await ai.embeddings.create(model=MODEL, input=given, encoding_format="float")
        as_text = await ai.embeddings.create(model=MODEL, input=given, encoding_format="base64")
    for reply in (by_default, as_floats):
        assert [one.index for one in reply.data] == list(range(len(prompts))) and reply.object == "list" and reply.model == MODEL
        for one, prompt in zip(reply.data, prompts, strict=True):
            assert one.embedding == pytest.approx(embedding_of(prompt), abs=1e-6)
        assert reply.usage.prompt_tokens == reply.usage.total_tokens == sum(map(len, prompts))
    decoded = [list(array("f", base64.b64decode(one.embedding))) for one in as_text.data]  # type: ignore[arg-type]
    assert decoded == [one.embedding for one in by_default.data]
    assert len(p0.decodes) == 3 * len(prompts) and not d0.decodes and not p0.prefills  # where prompts are computed, and no hand-off
    assert {one.request.pooling for one in p0.decodes} == {"last"}


async def test_pooling_and_adapter_travel() -> None:
    workers = pair(adapters={"sql": "/a"})
    async with cluster(workers, pooling="mean") as made, served(made) as url, client(url) as ai:  # type: ignore[arg-type]
        reply = await ai.embeddings.create(model="sql", input="x")
        await ai.embeddings.create(model=MODEL, input="x", extra_body={"pooling": "last"})
    assert reply.model == "sql"
    assert [(one.request.pooling, one.request.adapter) for one in workers[0].decodes] == [("mean", "sql"), ("last", "")]


async def test_dimensions() -> None:
    async with cluster(pair()) as made, served(made) as url, client(url) as ai:
        whole = (await ai.embeddings.create(model=MODEL, input="x")).data[0].embedding
        short = (await ai.embeddings.create(model=MODEL, input="x", dimensions=2)).data[0].embedding
        assert short == pytest.approx([value / (whole[0] ** 2 + whole[1] ** 2) ** 0.5 for value in whole[:2]], abs=1e-6)
        with pytest.raises(openai.BadRequestError, match="have 4"):
            await ai.embeddings.create(model=MODEL, input="x", dimensions=5)
    assert shortened([0.0, 1.0], 1) == [0.0]


async def test_a_failing_worker_is_replaced() -> None:
    p0, d0 = pair()
    p0.faults = Faults(error="worker_lost", times=2)
    async with cluster([p0, d0]) as made, served(made) as url, client(url) as ai:
        reply = await ai.embeddings.create(model=MODEL, input=["a", "b", "c"], encoding_format="float")
        assert [one.embedding for one in reply.data] == [pytest.approx(embedding_of(tokens_of(text)), abs=1e-6) for text in "abc"]
        assert made.metric("headrace_retries_total") == 2


async def test_an_error_of_one_input_ends_all() -> None:
    workers = pair(faults=Faults(error="invalid_request"))
    async with cluster(workers) as made, served(made) as url, client(url) as ai:
        with pytest.raises(openai.BadRequestError, match="as told"):
            await ai.embeddings.create(model=MODEL, input=["a", "b"])
        await made.until_quiet()
        assert made.service.running == 0


async def test_a_client_that_goes_aborts_its_inputs() -> None:
    workers = pair()
    async with cluster(workers, stall_s=30) as made, served(made) as url:
        for worker in workers:
            worker.wedged = True
            worker.faults = Faults(wedge_after=0)
        asking = asyncio.create_task(httpx.AsyncClient(verify=False).post(f"{url}/v1/embeddings", json={"model": MODEL, "input": ["a"] * 40}))
        await until(lambda: workers[0].running == 32)  # of the forty
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await made.until_quiet()
        assert len(workers[0].aborts) == 32 and made.service.running == 0


@pytest.mark.parametrize(
    "fields,field",
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": [[1], []]}, "input[1]"),
        ({"input": ["a", 1]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": 5}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "pooling": "max"}, "pooling"),
        ({"input": "a", "normalize": False}, "normalize"),
        ({"input": "a", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"input": "a", "task": "x"}, "task"),
    ],
)
def test_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_embedding(json.dumps({"model": MODEL} | fields).encode())
    assert caught.value.field == field


async def test_what_only_the_model_can_refuse() -> None:
    async with cluster(pair(), max_context_tokens=8) as made, served(made) as url, client(url) as ai:
        for given, words in ((["ok", "much too long"], r"input\[1\]"), ([[1, 300]], r"input\[0\]\[1\]")):
            with pytest.raises(openai.BadRequestError, match=words):
                await ai.embeddings.create(model=MODEL, input=given)
        with pytest.raises(openai.NotFoundError):
            await ai.embeddings.create(model="other", input="x")
