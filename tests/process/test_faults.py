"""Faults on real processes, the real model in fp32: whatever breaks, every request ends with the golden answer or a clear retryable error, /health tells
the truth throughout, and a repeat afterwards is disaggregated again.

One cluster for all; each test waits until it is whole before it breaks the next thing.
"""

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faults import Outcome, Stream, Witness, generation_of, judge, kill, under_fault, wait_whole
from serving import Answer, ask_all, differing, serving, sides, timeline
from stores import wait_settled

from cluster.local import Cluster

pytestmark = pytest.mark.timeout(300)
GOLDEN = {entry["name"]: entry for entry in json.loads((Path(__file__).parent.parent / "golden" / "golden.json").read_text())["answers"]}
FP32 = ("engine.dtype=float32", "engine.kv_cache_bytes=1073741824", "store.capacity_bytes=1073741824", "engine.check_integrity=true")
GONE_S = (2.0, 4.0)  # after a kill: /health has noticed, and no process starts so fast


def golden(*names: str) -> list[dict[str, Any]]:
    return [GOLDEN[name] for name in names]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with serving("local", *FP32) as running:
        yield running


@pytest.fixture(scope="module")
def witness(cluster: Cluster) -> Iterator[Witness]:
    with Witness(cluster) as watching:
        yield watching


@pytest.fixture(autouse=True)
def truthful(cluster: Cluster, witness: Witness) -> Iterator[None]:
    wait_whole(cluster)
    yield
    wait_whole(cluster)
    contradictions, witness.contradictions = witness.contradictions, []
    assert not contradictions, contradictions[:5]


def all_begun(num_tokens: int) -> Any:
    """Every stream that will has so many tokens."""
    return lambda streams: all(len(one.tokens) >= num_tokens or one.finish_reason for one in streams)


def several_begun(num_streams: int, num_tokens: int) -> Any:
    return lambda streams: sum(len(one.tokens) >= num_tokens and not one.finish_reason for one in streams) >= num_streams


def after(seconds: float) -> Any:
    started: list[float] = []

    def passed(streams: list[Stream]) -> bool:
        started.append(time.monotonic())
        return started[-1] - started[0] >= seconds

    return passed


def repeat_disaggregated(cluster: Cluster, *names: str) -> None:
    """The same prompts again: golden, their KV pushed, nothing computed twice."""
    entries = golden(*names)
    answers: list[Answer] = ask_all(cluster, [entry["prompt"] for entry in entries])
    for entry, answer in zip(entries, answers, strict=True):
        assert answer.status == 200, answer.body
        assert differing(entry, answer.tokens) in ("", "tie")
        body = timeline(cluster, answer.request_id)
        assert [(side["phase"], side["kv_pushed"]) for side in body["sides"]] == [("prefill", True), ("decode", False)], body
        (decode,) = sides(body, "decode")
        assert decode["recomputed_tokens"] == 0 and decode["computed_prompt_tokens"] <= 1, body


def all_answered(what: str, entries: list[dict[str, Any]], outcome: Outcome) -> None:
    counts = judge(what, entries, outcome)
    assert counts["equal"] + counts["tie"] == len(entries), counts


def stop_for(pid: int, seconds: float) -> None:
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(seconds, lambda: os.kill(pid, signal.SIGCONT)).start()


def test_prefill_worker_killed_during_prefill(cluster: Cluster, witness: Witness) -> None:
    pid, generation = cluster.pids()["worker:prefill-0"], generation_of(cluster, "prefill-0")
    entries = golden("long-question", "sql", "german", "chat-list")

    def fault() -> None:
        kill(pid)
        witness.absent("prefill-0", *GONE_S)

    outcome = under_fault(cluster, entries, fault, after(0.6))
    all_answered("prefill worker killed during prefill", entries, outcome)
    assert outcome.count("retries") >= 1
    first = outcome.timelines[0]["sides"][0]
    assert (first["phase"], first["outcome"], first["work"]) == ("prefill", "worker_lost", None), first
    print(f"prefill worker killed: whole again after {wait_whole(cluster, without=[generation]):.1f} s more")
    repeat_disaggregated(cluster, "long-question", "html")


def test_decode_worker_killed_during_decode(cluster: Cluster, witness: Witness) -> None:
    """Eight answers move to the only worker left, which finds their KV in the stores."""
    pid, generation = cluster.pids()["worker:decode-0"], generation_of(cluster, "decode-0")
    entries = golden("korean", "chat-pirate", "russian", "greek", "code-bug", "chinese", "emoji-family", "shell")

    def fault() -> None:
        kill(pid)
        witness.absent("decode-0", *GONE_S)

    outcome = under_fault(cluster, entries, fault, several_begun(5, 16))
    all_answered("decode worker killed during decode", entries, outcome)
    assert outcome.count("migrations") >= 1
    reused = sum(work["reused_store_tokens"] for work in outcome.resumed_work())
    computed = sum(work["computed_prompt_tokens"] for work in outcome.resumed_work())
    print(f"resumed answers: {reused} tokens from the stores, {computed} prompt tokens computed again")
    assert reused > 0
    served_by_one = ask_all(cluster, [GOLDEN["hindi"]["prompt"]])
    assert served_by_one[0].status == 200 and differing(GOLDEN["hindi"], served_by_one[0].tokens) in ("", "tie")
    print(f"decode worker killed: whole again after {wait_whole(cluster, without=[generation]):.1f} s more")
    repeat_disaggregated(cluster, "code-bug", "spanish")


STORE_LOAD = {"node-a": ("chat-explain", "code-rust", "python-class"), "node-b": ("chat-email", "chat-yes-no", "chat-turns")}


@pytest.mark.parametrize("node", STORE_LOAD)
def test_store_killed_under_load(cluster: Cluster, node: str) -> None:
    names = STORE_LOAD[node]
    pid, generation = cluster.pids()[f"store:{node}"], generation_of(cluster, node)
    entries, later = golden(*names[:2], "c-loop", "json"), golden(names[2], "python-fib")
    outcome = under_fault(cluster, entries, lambda: kill(pid), all_begun(2), later=later)
    all_answered(f"store of {node} killed", entries + later, outcome)
    print(f"store of {node} killed: whole again after {wait_whole(cluster, without=[generation]):.1f} s more")
    repeat_disaggregated(cluster, *names)


def stopped_worker(cluster: Cluster, witness: Witness, worker: str, seconds: float, entries: list[dict[str, Any]], when: Any) -> None:
    pid = cluster.pids()[f"worker:{worker}"]
    later = golden("chat-haiku", "portuguese", "japanese", "arabic")

    def fault() -> None:
        stop_for(pid, seconds)
        witness.absent(worker, 7.0, seconds)

    began = time.monotonic()
    outcome = under_fault(cluster, entries, fault, when, later=later)
    all_answered(f"{worker} stopped for {seconds:g} s", entries + later, outcome)
    moved = outcome.count("retries") + outcome.count("migrations")
    assert moved >= len(entries) - 1, "answers must not wait for the stopped worker to wake up"
    time.sleep(max(0.0, began + seconds + 1 - time.monotonic()))
    wait_whole(cluster)
    repeat_disaggregated(cluster, "portuguese", "newton")


def test_decode_worker_stopped_for_20_s(cluster: Cluster, witness: Witness) -> None:
    stopped_worker(cluster, witness, "decode-0", 20.0, golden("chat-system", "list", "once", "count"), all_begun(4))


@pytest.mark.slow
def test_prefill_worker_stopped_for_20_s(cluster: Cluster, witness: Witness) -> None:
    stopped_worker(cluster, witness, "prefill-0", 20.0, golden("long-chronicle", "list", "once", "count"), after(0.6))


@pytest.mark.slow
def test_store_stopped_for_10_s(cluster: Cluster) -> None:
    """A store that does not answer costs its blocks, not the request's time until the deadline: nobody waits for it to wake up."""
    pid = cluster.pids()["store:node-b"]
    entries, later = golden("chat-summary", "emoji-family", "list"), golden("chinese", "spanish")
    outcome = under_fault(cluster, entries, lambda: stop_for(pid, 10.0), all_begun(2), later=later)
    all_answered("store of node-b stopped for 10 s", entries + later, outcome)
    assert outcome.total("recomputed_tokens") > 0, "those that came while it was stopped went on without it"
    time.sleep(12)
    repeat_disaggregated(cluster, "chinese")


def test_redis_stopped_for_3_s(cluster: Cluster) -> None:
    pid = cluster.pids()["redis"]
    entries = golden("chat-summary", "whitespace", "recipe")
    later = golden("emoji-mood", "french", "capital", "chat-list", "greek", "german", "sql", "punctuation", "chat-capital", "one-word")
    outcome = under_fault(cluster, entries, lambda: stop_for(pid, 3.0), all_begun(2), later=later)
    time.sleep(1)
    all_answered("redis stopped for 3 s", entries + later, outcome)
    assert outcome.count("retries") + outcome.count("migrations") == 0


def test_redis_killed(cluster: Cluster) -> None:
    pid = cluster.pids()["redis"]
    entries, later = golden("chat-correct", "whitespace", "recipe"), golden("chat-multi-line", "french", "capital")
    outcome = under_fault(cluster, entries, lambda: kill(pid), all_begun(2), later=later)
    all_answered("redis killed", entries + later, outcome)
    assert outcome.count("retries") + outcome.count("migrations") == 0
    time.sleep(3)
    repeat_disaggregated(cluster, "chat-correct")


def test_no_worker_left(cluster: Cluster, witness: Witness) -> None:
    """Requests that have begun wait for a worker to come back; new ones are refused at once; /health says so."""
    pids = cluster.pids()
    generations = [generation_of(cluster, name) for name in ("prefill-0", "decode-0")]
    entries = golden("chat-table", "chat-sum", "alphabet")
    witness.expect_no_worker(True)
    refused = witness.counts["health 503"]

    def fault() -> None:
        for name in ("prefill-0", "decode-0"):
            kill(pids[f"worker:{name}"])
            witness.absent(name, *GONE_S)

    outcome = under_fault(cluster, entries, fault, all_begun(2))
    all_answered("both workers killed", entries, outcome)
    print(f"both workers killed: whole again after {wait_whole(cluster, without=generations):.1f} s more")
    witness.expect_no_worker(False)
    assert witness.counts["health 503"] > refused
    repeat_disaggregated(cluster, "chat-table")


def test_in_the_end_nothing_is_held(cluster: Cluster, witness: Witness) -> None:
    """Last of this module: after all these faults no worker holds a block or a job, no store a slot, and Redis knows what is where."""
    witness.stop()
    seconds = asyncio.run(wait_settled(cluster, 30, holds_may_wait=True))
    print(f"after all faults: settled after {seconds:.1f} s")
