"""For tests that break things: streams whose tokens can be watched, a witness of /health, waiting until a cluster is whole again."""

import asyncio
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from serving import differing, look

from cluster.local import Cluster

RETRYABLE = (429, 503, 504)
HEALTH_S = 0.1  # between two looks at /health
TINY = [504, 2644, 28]  # a prompt without a full block: leaves nothing in a store


@dataclass
class Stream:
    """One streamed answer as far as it has come. `error`: the body's error object, in the reply or in the stream."""

    status: int = 0
    tokens: list[int] = field(default_factory=list)
    finish_reason: str = ""
    error: dict[str, Any] | None = None
    broken: str = ""  # the connection broke: the one thing that must never happen
    request_id: str = ""
    seconds: float = 0.0
    timeout_s: float = 0.0

    @property
    def complete(self) -> bool:
        return self.finish_reason in ("stop", "length") and self.error is None and not self.broken

    @property
    def clear_error(self) -> bool:
        return self.error is not None and bool(self.error.get("code")) and bool(self.error.get("message")) and self.status in (200, *RETRYABLE)


async def stream(client: httpx.AsyncClient, into: Stream, model: str, prompt: Sequence[int], max_tokens: int, timeout_s: float, **fields: Any) -> Stream:
    body = {"model": model, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True, "stream": True} | fields
    started = time.monotonic()
    try:
        async with client.stream("POST", "/v1/completions", json=body, headers={"x-request-timeout-s": str(timeout_s)}, timeout=timeout_s + 10) as reply:
            into.status, into.request_id = reply.status_code, reply.headers.get("x-request-id", "")
            if reply.status_code != 200:
                into.error = json.loads(await reply.aread())["error"]
            else:
                async for line in reply.aiter_lines():
                    _take(into, line)
    except httpx.HTTPError as error:
        into.broken = f"{type(error).__name__}: {error}"
    into.seconds, into.timeout_s = time.monotonic() - started, timeout_s
    return into


def _take(into: Stream, line: str) -> None:
    if not line.startswith("data: {"):
        return
    body = json.loads(line.removeprefix("data: "))
    if "error" in body:
        into.error = body["error"]
        return
    for choice in body["choices"]:
        into.tokens += choice.get("token_ids") or []
        into.finish_reason = choice.get("finish_reason") or into.finish_reason


@dataclass(frozen=True)
class Outcome:
    """What a group of requests came to. `works`: all sides' work; `last`: of the dispatch that ended each answer."""

    streams: list[Stream]
    timelines: list[dict[str, Any]]

    def total(self, field_name: str, phase: str = "") -> int:
        sides = [side for body in self.timelines for side in body["sides"] if side["work"] and phase in ("", side["phase"])]
        return sum(side["work"][field_name] for side in sides)

    def count(self, field_name: str) -> int:
        return sum(body[field_name] for body in self.timelines)

    def resumed_work(self) -> list[dict[str, Any]]:
        """Of decodes that took over an answer already begun."""
        works = []
        for body in self.timelines:
            last = body["sides"][-1]
            if body["migrations"] and last["phase"] == "decode" and last["work"]:
                works.append(last["work"])
        return works


async def timelines_of(client: httpx.AsyncClient, streams: Sequence[Stream]) -> list[dict[str, Any]]:
    replies = [await client.get(f"/v1/requests/{one.request_id}/timeline") for one in streams if one.request_id]
    return [reply.json() for reply in replies if reply.status_code == 200]


def under_fault(
    cluster: Cluster,
    entries: Sequence[dict[str, Any]],
    fault: Callable[[], None],
    when: Callable[[list[Stream]], bool],
    *,
    later: Sequence[dict[str, Any]] = (),
    timeout_s: float = 60.0,
) -> Outcome:
    """Stream golden prompts all at once, break something as soon as `when(streams)` holds, then ask those of `later` one after the other."""

    async def run() -> Outcome:
        async with httpx.AsyncClient(base_url=cluster.url) as client:
            streams = [Stream() for _ in entries]

            def begin(entry: dict[str, Any], into: Stream) -> "asyncio.Task[Stream]":
                return asyncio.create_task(stream(client, into, cluster.config.model_name, entry["prompt"], 32, timeout_s))

            tasks = [begin(entry, into) for entry, into in zip(entries, streams, strict=True)]
            while not when(streams) and not all(task.done() for task in tasks):  # noqa: ASYNC110 (made of what several streams bring)
                await asyncio.sleep(0.005)
            assert not all(task.done() for task in tasks), "the fault came too late to hit anything"
            await asyncio.to_thread(fault)
            for entry in later:
                streams.append(Stream())
                tasks.append(begin(entry, streams[-1]))
                await asyncio.sleep(0.3)
            await asyncio.gather(*tasks)
            return Outcome(streams, await timelines_of(client, streams))

    return asyncio.run(run())


def judge(what: str, entries: Sequence[dict[str, Any]], outcome: Outcome) -> Counter[str]:
    """Every stream is the golden answer, parts at a tie, or ends in a clear retryable error. Prints and returns the counts."""
    counts: Counter[str] = Counter()
    wrong = []
    for entry, one in zip(entries, outcome.streams, strict=True):
        if one.complete:
            part = differing(entry, one.tokens)
            counts["tie" if part == "tie" else "wrong" if part else "equal"] += 1
            wrong += [(entry["name"], part)] if part not in ("", "tie") else []
        elif one.clear_error and not one.broken:
            assert one.error is not None
            counts[f"error {one.error['code']}"] += 1
        else:
            wrong.append((entry["name"], repr(one)))
    recomputed, slowest = outcome.total("recomputed_tokens"), max(one.seconds for one in outcome.streams)
    figures = f"retries {outcome.count('retries')}, migrations {outcome.count('migrations')}, recomputed tokens {recomputed}, slowest {slowest:.1f} s"
    print(f"{what}: {dict(counts)}; {figures}")
    late = [entry["name"] for entry, one in zip(entries, outcome.streams, strict=True) if one.seconds > one.timeout_s + 1]
    assert not late, f"past their deadline: {late}"
    assert not wrong, wrong
    return counts


class Witness:
    """Looks at /health every 100 ms, with a tiny request beside each second look, in a thread of its own."""

    def __init__(self, cluster: Cluster) -> None:
        self.contradictions: list[str] = []
        self.counts: Counter[str] = Counter()
        self._url = cluster.url
        self._model = cluster.config.model_name
        self._absent: list[tuple[str, float, float]] = []  # worker, from, until: must not be called healthy
        self._may_be_unhealthy = False
        self._ending = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def __enter__(self) -> "Witness":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        print(f"witness: {dict(self.counts)}, {len(self.contradictions)} contradictions")

    def stop(self) -> None:
        """After its last request; may come again."""
        self._ending.set()
        self._thread.join(90)

    def absent(self, worker: str, after_s: float, until_s: float) -> None:
        """From `after_s` to `until_s` from now /health must not call `worker` healthy."""
        now = time.monotonic()
        self._absent.append((worker, now + after_s, now + until_s))

    def expect_no_worker(self, maybe: bool) -> None:
        """Whether /health may say 503 from now on."""
        self._may_be_unhealthy = maybe

    async def _run(self) -> None:
        tasks: set[asyncio.Task[None]] = set()
        async with httpx.AsyncClient(base_url=self._url, limits=httpx.Limits(max_connections=None)) as client:
            looks = 0
            while not self._ending.is_set():
                before = time.monotonic()
                healthy = await self._look(client)
                looks += 1
                if looks % 2 == 0:
                    tasks.add(task := asyncio.create_task(self._try(client, healthy, self._may_be_unhealthy)))
                    task.add_done_callback(tasks.discard)
                await asyncio.sleep(max(0.0, HEALTH_S - (time.monotonic() - before)))
            await asyncio.gather(*tasks)

    async def _look(self, client: httpx.AsyncClient) -> bool:
        before = time.monotonic()
        try:
            reply = await client.get("/health", timeout=10)
        except httpx.HTTPError as error:
            self.contradictions.append(f"/health did not answer: {error!r}")
            return False
        body, at = reply.json(), time.monotonic()
        self.counts[f"health {reply.status_code}"] += 1
        if (reply.status_code == 200) != bool(body["healthy_workers"]):
            self.contradictions.append(f"/health says {reply.status_code} with {body}")
        for worker, since, until in self._absent:
            if worker in body["healthy_workers"] and since < before and at < until:
                self.contradictions.append(f"{worker} is called healthy {before - since:.1f} s too late")
        if reply.status_code != 200 and not self._may_be_unhealthy:
            self.contradictions.append(f"/health says {reply.status_code} while a worker lives: {body}")
        return reply.status_code == 200

    async def _try(self, client: httpx.AsyncClient, healthy: bool, may_end: bool) -> None:
        one = await stream(client, Stream(), self._model, TINY, 2, 60.0)
        self.counts["tiny answered" if one.complete else "tiny refused"] += 1
        if healthy and not one.complete and not (may_end or self._may_be_unhealthy):
            self.contradictions.append(f"/health said 200, a request started then came to {one}")
        if not one.complete and (one.broken or not one.clear_error):
            self.contradictions.append(f"neither an answer nor a clear error: {one}")


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def wait_whole(cluster: Cluster, *, without: Sequence[int] = (), timeout_s: float = 60.0) -> float:
    """Until every worker is healthy and every node has a store, all of other generations than `without`. Returns the seconds it took."""
    names = {worker.name for node in cluster.config.nodes for worker in node.workers}
    nodes = {node.name for node in cluster.config.nodes}
    started = time.monotonic()
    while True:
        body = look(cluster)
        members = [*body["workers"], *body["stores"]]
        workers = {worker["name"] for worker in body["workers"] if worker["healthy"]}
        connected = all(worker["counters"].get("store_connected") for worker in body["workers"])
        complete = connected and workers == names and len(body["workers"]) == len(names) and {store["node"] for store in body["stores"]} == nodes
        if complete and not {member["generation"] for member in members} & set(without):
            return time.monotonic() - started
        assert time.monotonic() - started < timeout_s, f"not whole after {timeout_s} s: {body}"
        time.sleep(0.1)


def generation_of(cluster: Cluster, name: str) -> int:
    body = look(cluster)
    return max(member["generation"] for member in [*body["workers"], *body["stores"]] if member["name"] == name)
