"""Requests with random aborts leave nothing behind: blocks, jobs, slots, reservations, leases, holds, hints, memory. On the real model in bf16, with pools
so small that eviction, preemption and refused credit happen all the time.
"""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from faults import Stream, stream
from serving import ask_all, look, serving
from stores import wait_settled

from cluster.local import Cluster

pytestmark = pytest.mark.timeout(600)
GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "golden.json").read_text())["answers"]
CLEAR = next(entry for entry in GOLDEN if entry["name"] == "count")  # its margins are far above what bf16 may change
BLOCK_BYTES = 30 * 3 * 64 * 2 * 32 * 2
AT_ONCE = 16
Leave = float | int | None  # the client goes after so many seconds, after so many tokens, or not
LONGEST_DEADLINE_S = 20.0
SETTINGS = (
    "engine.check_integrity=true",
    "engine.max_context_tokens=1024",
    f"engine.kv_cache_bytes={96 * BLOCK_BYTES}",
    f"store.capacity_bytes={96 * BLOCK_BYTES}",
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with serving("local", *SETTINGS) as running:
        yield running


class Clients:
    """Random requests, the same for the same seed: a third of them end because their client has gone, some because of their deadline."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.outcomes: Counter[str] = Counter()
        self._cluster = cluster
        self._random = random.Random(seed)
        self._prefixes = [[self._random.randrange(1000, 40000) for _ in range(self._random.randrange(30, 160))] for _ in range(8)]

    async def ask(self, count: int) -> None:
        gate = asyncio.Semaphore(AT_ONCE)
        async with httpx.AsyncClient(base_url=self._cluster.url) as client:

            async def one(work: dict[str, Any], leave: Leave) -> None:
                async with gate:
                    self.outcomes[await self._one(client, work, leave)] += 1

            await asyncio.gather(*(one(*self._draw()) for _ in range(count)))

    def _draw(self) -> tuple[dict[str, Any], Leave]:
        draw = self._random
        prefix = draw.choice(self._prefixes)[: draw.randrange(160)] if draw.random() < 0.5 else []
        prompt = prefix + [draw.randrange(1000, 40000) for _ in range(draw.randrange(1, 60))]
        work = {"prompt": prompt, "max_tokens": draw.randrange(1, 25), "stream": draw.random() < 0.6, "ignore_eos": draw.random() < 0.5}
        work["timeout_s"] = draw.uniform(0.01, 0.5) if draw.random() < 0.06 else LONGEST_DEADLINE_S
        return work, draw.choice((draw.uniform(0, 0.1), draw.uniform(0, 3), draw.randrange(1, 12))) if draw.random() < 0.4 else None

    async def _one(self, client: httpx.AsyncClient, work: dict[str, Any], leave: Leave) -> str:
        into = Stream()
        fields = dict(work)
        prompt, max_tokens, timeout_s = (fields.pop(name) for name in ("prompt", "max_tokens", "timeout_s"))
        task = asyncio.create_task(stream(client, into, self._cluster.config.model_name, prompt, max_tokens, timeout_s, **fields))
        if isinstance(leave, float):
            await asyncio.wait([task], timeout=leave)
        while isinstance(leave, int) and not task.done() and len(into.tokens) < leave:
            await asyncio.wait([task], timeout=0.005)
        if leave is not None and not task.done():
            task.cancel()
            await asyncio.wait([task])
            return "gone before a token" if not into.tokens else "gone after a token"
        await task
        return into.broken or (str(into.error["code"]) if into.error is not None else "answered")


def memory(cluster: Cluster) -> dict[str, int]:
    return {name: psutil.Process(pid).memory_info().rss for name, pid in cluster.pids().items()}


@pytest.mark.parametrize("count", [500, pytest.param(3000, marks=pytest.mark.soak)])
def test_aborted_requests_leave_nothing(cluster: Cluster, count: int) -> None:
    clients = Clients(cluster, seed=count)
    assert ask_all(cluster, [CLEAR["prompt"]])[0].tokens == tuple(CLEAR["answer"])
    asyncio.run(clients.ask(100))
    before = memory(cluster)
    asyncio.run(clients.ask(count - 100))
    settled_s = asyncio.run(wait_settled(cluster, LONGEST_DEADLINE_S + 5))
    growth = {name: size / before[name] - 1 for name, size in memory(cluster).items()}
    workers = {worker["name"]: worker["counters"] for worker in look(cluster)["workers"]}
    print(f"{count} requests: {dict(clients.outcomes)}; settled after {settled_s:.1f} s")
    print("growth of memory since the first 100: " + ", ".join(f"{name} {share:+.1%}" for name, share in growth.items()))
    print("evictions, aborts: " + ", ".join(f"{name} {c.get('evictions', 0):g}, {c.get('aborted', 0):g}" for name, c in workers.items()))
    assert set(clients.outcomes) <= {"answered", "gone before a token", "gone after a token", "deadline_exceeded"}, clients.outcomes
    assert min(clients.outcomes[kind] for kind in ("gone before a token", "gone after a token", "deadline_exceeded")) >= 3, clients.outcomes
    assert all(share <= 0.05 for share in growth.values()), growth
    assert all(c["evictions"] > 0 for c in workers.values()), "the pools were too large to fill"
    assert ask_all(cluster, [CLEAR["prompt"]])[0].tokens == tuple(CLEAR["answer"])


PROMPT = [504, 2644, 28]
BAD_COMPLETIONS: list[tuple[dict[str, Any], int, str, str]] = [
    ({"prompt": PROMPT * 400}, 400, "prompt", "context_length_exceeded"),
    ({"prompt": PROMPT * 300, "max_tokens": 500}, 400, "prompt", "context_length_exceeded"),
    ({"prompt": ""}, 400, "prompt", "invalid_request"),
    ({"prompt": []}, 400, "prompt", "invalid_request"),
    ({"prompt": 5}, 400, "prompt", "invalid_request"),
    ({"prompt": [10**6]}, 400, "prompt[0]", "invalid_request"),
    ({"model": "another"}, 404, "model", "model_not_found"),
    ({"max_tokens": 0}, 400, "max_tokens", "invalid_request"),
    ({"max_tokens": -3}, 400, "max_tokens", "invalid_request"),
    ({"max_tokens": "many"}, 400, "max_tokens", "invalid_request"),
    ({"temperature": "hot"}, 400, "temperature", "invalid_request"),
    ({"stream": "yes"}, 400, "stream", "invalid_request"),
    ({"stop": ["x"] * 17}, 400, "stop", "invalid_request"),
    ({"stop": ["x" * 300]}, 400, "stop", "invalid_request"),
    ({"max_token": 4}, 400, "max_token", "invalid_request"),
]
BAD_BODIES = [b"", b"{", b"[]", b'{"model": "m", "prompt": "\xff\xfe"}', b"[" * 100_000]


def refusal(reply: httpx.Response) -> tuple[int, str | None, str]:
    """Status, field, code of an error in OpenAI's shape."""
    error = reply.json()["error"]
    assert error["message"] and error["type"], error
    return reply.status_code, error["param"], error["code"]


def test_bad_input_is_refused_by_the_name_of_its_field(cluster: Cluster) -> None:
    asyncio.run(wait_settled(cluster, LONGEST_DEADLINE_S + 5))
    steps = {worker["name"]: worker["steps"] for worker in look(cluster)["workers"]}
    good = {"model": cluster.config.model_name, "prompt": PROMPT, "max_tokens": 4}
    with httpx.Client(base_url=cluster.url) as client:
        for fields, status, field, code in BAD_COMPLETIONS:
            assert refusal(client.post("/v1/completions", json=good | fields)) == (status, field, code)
            assert refusal(client.post("/v1/completions", json={"stream": True} | good | fields)) == (status, field, code)
        for body in BAD_BODIES:
            assert refusal(client.post("/v1/completions", content=body)) == (400, None, "invalid_request"), body[:40]
        lone = client.post("/v1/completions", content=json.dumps(good | {"prompt": "\ud800"}))
        assert lone.status_code in (200, 400), lone.text
        assert refusal(client.post("/v1/chat/completions", json={"model": good["model"], "messages": []}))[:2] == (400, "messages")
        late = client.post("/v1/completions", json=good, headers={"x-request-timeout-s": "soon"})
        assert refusal(late) == (400, "x-request-timeout-s", "invalid_request")
        assert {worker["name"]: worker["steps"] for worker in look(cluster)["workers"]} == steps, "a refused request reached an engine"
        reply = client.post("/v1/completions", json=good)
        assert reply.status_code == 200 and reply.json()["usage"]["completion_tokens"] == 4
    asyncio.run(wait_settled(cluster, 5))


def test_an_expired_deadline_names_the_stage(cluster: Cluster) -> None:
    with httpx.Client(base_url=cluster.url) as client:
        body = {"model": cluster.config.model_name, "prompt": PROMPT * 200, "max_tokens": 400, "ignore_eos": True}
        reply = client.post("/v1/completions", json=body, headers={"x-request-timeout-s": "0.6"})
        assert refusal(reply)[::2] == (504, "deadline_exceeded")
        assert reply.json()["error"]["stage"] in ("routed", "prefill_queued", "prefill_started", "first_token", "decode_queued", "kv_ready", "decode_started")
    asyncio.run(wait_settled(cluster, 5))
