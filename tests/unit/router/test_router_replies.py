"""Logprobs, echo and several answers in OpenAI's shapes, through the official client; streamed and whole say the same."""

import asyncio
import json
from typing import Any

import openai
import pytest
from fakes.cluster import MODEL, FakeCluster, cluster, served
from fakes.tokenizer import ByteTokenizer
from fakes.worker import FakeWorker, Faults, answer_text, answer_token
from test_router_app import CHAT, CHAT_TOKENS, PROMPT, TOKENS, client, pair, web

from protocol.logprobs import TokenLogprob
from router.choices import Choice, whole
from router.life import Chunk
from router.logprobs import CompletionLogprobs, token_text
from router.openai import parse


def texts(tokens: list[int]) -> list[str]:
    return [token_text(ByteTokenizer(), token) for token in tokens]


async def test_chat_logprobs_whole_and_streamed() -> None:
    tokens = [answer_token(CHAT_TOKENS, position) for position in range(5)]
    async with cluster(pair()) as made, served(made) as url, client(url) as ai:
        asked: dict[str, Any] = {"model": MODEL, "messages": CHAT, "max_tokens": 5, "logprobs": True, "top_logprobs": 3}
        answer = await ai.chat.completions.create(**asked)
        chunks = [chunk async for chunk in await ai.chat.completions.create(**asked, stream=True)]
        bare = await ai.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=1, logprobs=True)
        without = await ai.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=1)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert [one.token for one in logprobs.content] == texts(tokens)
    assert [one.bytes for one in logprobs.content] == [[token] for token in tokens]
    assert [one.logprob for one in logprobs.content] == [-1.0] * 5
    assert [[top.token for top in one.top_logprobs] for one in logprobs.content] == [texts([token + 1, token, token + 2]) for token in tokens]
    assert [one.logprob for one in logprobs.content[0].top_logprobs] == [-0.5, -1.0, -1.5]
    streamed = [one for chunk in chunks if chunk.choices[0].logprobs for one in chunk.choices[0].logprobs.content or []]
    assert streamed == logprobs.content
    assert bare.choices[0].logprobs is not None and bare.choices[0].logprobs.content is not None
    assert bare.choices[0].logprobs.content[0].top_logprobs == []
    assert without.choices[0].logprobs is None


async def test_completion_logprobs_and_echo() -> None:
    tokens = [answer_token(TOKENS, position) for position in range(3)]
    async with cluster(pair()) as made, served(made) as url, client(url) as ai:
        asked: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 3, "logprobs": 2, "echo": True}
        answer = await ai.completions.create(**asked)
        chunks = [chunk async for chunk in await ai.completions.create(**asked, stream=True)]
        plain = await ai.completions.create(**(asked | {"echo": False, "logprobs": 0}))
        only = await ai.completions.create(**(asked | {"max_tokens": 0}))
        ids = await ai.completions.create(model=MODEL, prompt=TOKENS, max_tokens=1, echo=True)
    choice, logprobs = answer.choices[0], answer.choices[0].logprobs
    assert choice.text == PROMPT + answer_text(TOKENS, 3) and logprobs is not None
    assert logprobs.tokens == ["<s>", *PROMPT, *texts(tokens)]
    assert logprobs.token_logprobs == [None, *[-1.0] * (len(PROMPT) + 3)]
    assert logprobs.top_logprobs is not None and logprobs.top_logprobs[0] is None
    assert logprobs.top_logprobs[1] == {"I": -0.5, "H": -1.0}
    assert logprobs.text_offset is not None and logprobs.text_offset[: len(PROMPT) + 2] == [0, *range(len(PROMPT) + 1)]
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
    parts = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs is not None]
    assert [token for part in parts for token in part.tokens or []] == logprobs.tokens
    assert [offset for part in parts for offset in part.text_offset or []] == logprobs.text_offset
    assert plain.choices[0].logprobs is not None and plain.choices[0].logprobs.top_logprobs == [{text: -1.0} for text in texts(tokens)]
    assert plain.choices[0].logprobs.text_offset is not None and plain.choices[0].logprobs.text_offset[0] == 0
    assert (only.choices[0].text, only.choices[0].finish_reason) == (PROMPT, "length")
    assert only.usage is not None and only.usage.completion_tokens == 0
    assert only.choices[0].logprobs is not None and only.choices[0].logprobs.tokens == ["<s>", *PROMPT]
    assert ids.choices[0].text == PROMPT + answer_text(TOKENS, 1) and ids.choices[0].logprobs is None


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
async def test_prompt_logprobs(path: str) -> None:
    async with cluster(pair()) as made, served(made) as url, web() as http:
        fields = {"messages": CHAT} if path.startswith("chat") else {"prompt": PROMPT}
        body = (await http.post(f"{url}/v1/{path}", json={"model": MODEL, "max_tokens": 2, "prompt_logprobs": 1, **fields})).json()
    positions = body["prompt_logprobs"] if path.startswith("chat") else body["choices"][0]["prompt_logprobs"]
    prompt = CHAT_TOKENS if path.startswith("chat") else TOKENS
    assert positions[0] is None and len(positions) == len(prompt)
    assert positions[1] == {
        str(prompt[1] + 1): {"logprob": -0.5, "rank": 1, "decoded_token": chr(prompt[1] + 1)},
        str(prompt[1]): {"logprob": -1.0, "rank": 2, "decoded_token": chr(prompt[1])},
    }


async def test_several_answers_whole_and_streamed() -> None:
    async with cluster(pair(token_s=0.001)) as made, served(made) as url, client(url) as ai, web() as http:
        answer = await ai.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=4, n=3)
        stream = await ai.completions.create(model=MODEL, prompt=PROMPT, max_tokens=4, n=3, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        await made.until_quiet()
        timelines = [(await http.get(f"{url}/v1/requests/{answer.id}{suffix}/timeline")).json() for suffix in ("", ".1", ".2")]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.message.content for choice in answer.choices] == [answer_text(CHAT_TOKENS, 4, sample) for sample in range(3)]
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(CHAT_TOKENS), 12)
    for index in range(3):
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices and chunk.choices[0].index == index]
        assert "".join(choice.text for choice in mine) == answer_text(TOKENS, 4, index)
        assert [choice.finish_reason for choice in mine] == [None] * 3 + ["length"]
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 12
    ids = {prefill.request.request_id for prefill in made.workers["p0"].prefills}
    assert len(ids) == 6 and {prefill.request.sample for prefill in made.workers["p0"].prefills} == {0, 1, 2}
    assert len({prefill.request.sampling.seed for prefill in made.workers["p0"].prefills}) == 2
    assert [timeline["output_tokens"] for timeline in timelines] == [4, 4, 4]


async def quiet(made: FakeCluster) -> None:
    await made.until_quiet()
    assert made.service.running == 0


async def test_one_answer_that_fails_ends_them_all() -> None:
    async with cluster(pair(faults=Faults(error="internal_error", error_after=2, times=1), token_s=0.005)) as made, served(made) as url, client(url) as ai:
        with pytest.raises(openai.InternalServerError, match="as told"):
            await ai.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=200, n=3)
        await quiet(made)
        assert len(made.workers["d0"].aborts) >= 2


async def test_a_client_that_goes_ends_all_its_answers() -> None:
    async with cluster(pair(token_s=0.01)) as made, served(made) as url, web() as http:
        asked = asyncio.create_task(http.post(f"{url}/v1/completions", json={"model": MODEL, "prompt": PROMPT, "max_tokens": 3000, "n": 4}))
        while made.workers["d0"].running < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert made.service.running == 4
        asked.cancel()
        await quiet(made)
        assert len(made.workers["d0"].aborts) == 4


async def test_many_answers_count_as_many_requests() -> None:
    async with cluster(pair(token_s=0.01), max_requests=4) as made, served(made) as url, client(url) as ai:
        many = asyncio.create_task(ai.completions.create(model=MODEL, prompt=PROMPT, max_tokens=30, n=6))  # alone it is let in
        while made.service.running < 6:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        with pytest.raises(openai.RateLimitError):
            await ai.completions.create(model=MODEL, prompt=PROMPT)
        assert len((await many).choices) == 6
        one = asyncio.create_task(ai.completions.create(model=MODEL, prompt=PROMPT, max_tokens=30))
        while made.service.running < 1:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        with pytest.raises(openai.RateLimitError):
            await ai.completions.create(model=MODEL, prompt=PROMPT, n=4)
        await one


async def test_a_migration_loses_no_logprob() -> None:
    workers = [*pair(faults=Faults(die_after=3)), FakeWorker("d1", "decode", "n1")]
    async with cluster(workers) as made, served(made) as url, client(url) as ai:
        for _ in range(3):
            answer = await ai.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=8, logprobs=True)
            logprobs = answer.choices[0].logprobs
            assert logprobs is not None and logprobs.content is not None
            assert [one.bytes for one in logprobs.content] == [[answer_token(CHAT_TOKENS, position)] for position in range(8)]
        assert made.metric("headrace_migrations_total") == 1


def test_offsets_count_shown_characters() -> None:
    it = CompletionLogprobs(ByteTokenizer(), 0)
    body = it.body([TokenLogprob(token, -1.0, 1) for token in (256, *"é".encode(), 97, 256, 98)])
    assert body["tokens"] == ["<s>", "bytes:\\xc3", "bytes:\\xa9", "a", "<s>", "b"]
    assert body["text_offset"] == [0, 0, 0, 1, 2, 2]


def test_no_logprob_is_infinite() -> None:
    body = CompletionLogprobs(ByteTokenizer(), 1).body([TokenLogprob(97, float("-inf"), 9, ((98, -0.0),))])
    assert json.loads(json.dumps(body, allow_nan=False))["token_logprobs"] == [-9999.0]


@pytest.mark.parametrize("fields", [{}, {"logprobs": 1}, {"echo": True}, {"echo": True, "logprobs": 2}, {"echo": True, "max_tokens": 0, "logprobs": 0}])
def test_pieces_joined_are_the_whole(fields: dict[str, Any]) -> None:
    inquiry = parse(json.dumps({"model": "m", "prompt": "né", "return_token_ids": True} | fields).encode(), "completion")
    prompt = ByteTokenizer().encode("né")
    scored = tuple(TokenLogprob(token, -2.0, 1, ((1, -1.0), (2, -1.5))) for token in prompt[1:])
    chunks = [
        Chunk(chr(97 + index), (97 + index,), "length" if index == 3 else "", (TokenLogprob(97 + index, -1.0, 1, ((5, -0.1), (6, -0.2))),))
        for index in range(4)
    ]
    chunks[0] = Chunk("a", (97,), "", chunks[0].logprobs, scored)
    one, many = (Choice(inquiry, prompt, ByteTokenizer()) for _ in range(2))
    pieces, complete = [one.piece(chunk) for chunk in chunks], many.piece(whole(chunks))
    assert "".join(piece.text for piece in pieces) == complete.text
    assert [token for piece in pieces for token in piece.tokens or ()] == list(complete.tokens or ())
    assert pieces[-1].finish_reason == complete.finish_reason == "length"
    if complete.logprobs is not None:
        for name, values in complete.logprobs.items():
            assert [value for piece in pieces for value in (piece.logprobs or {})[name]] == values
