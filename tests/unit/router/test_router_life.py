"""A request's life over fake workers: hand-off, retries, migration, stalls, deadlines, aborts."""

import asyncio
import time

import pytest
from fakes.cluster import FakeCluster, cluster, store
from fakes.worker import FakeWorker, Faults, answer_text

from kvstore.hashing import block_hashes, salt_of
from protocol import headrace_pb2 as pb
from protocol.errors import DeadlineExceeded, InvalidRequest, Overloaded, Unavailable, WorkerLost
from protocol.request import GenerationRequest, Sampling
from router.life import Life
from router.timeline import Timeline

PROMPT = list(range(1, 101))


def life(made: FakeCluster, max_tokens: int = 12, deadline_s: float = 20.0, request_id: str = "r1") -> Life:
    request = GenerationRequest(request_id, tuple(PROMPT), Sampling(max_tokens=max_tokens), time.time() + deadline_s)
    return Life(request, made.service.spine, Timeline(request_id, prompt_tokens=len(PROMPT)))


async def text_of(running: Life) -> str:
    return "".join([chunk.text async for chunk in running.chunks()])


def pair(prefill: Faults | None = None, decode: Faults | None = None) -> list[FakeWorker]:
    return [
        FakeWorker("p0", "prefill", "n0", faults=prefill or Faults(), token_s=0.005),
        FakeWorker("d0", "decode", "n1", faults=decode or Faults(), token_s=0.005),
    ]


async def test_prefill_hands_off_to_decode() -> None:
    p0, d0 = workers = pair()
    p0.cached_tokens = 32
    async with cluster(workers) as made:
        running = life(made)
        assert await text_of(running) == answer_text(PROMPT, 12)
        await made.until_quiet()
    assert (len(p0.prefills), len(p0.decodes), len(d0.prefills), len(d0.decodes)) == (1, 0, 0, 1)
    assert p0.prefills[0].destination.name == "store-n1"
    decode = d0.decodes[0]
    assert (decode.handoff_attempt, decode.handoff_tokens, decode.request.attempt) == (1, len(PROMPT), 2)
    assert len(decode.request.output_tokens) == 1
    assert not p0.aborts and not d0.aborts
    body = running.timeline.body()
    assert body["sides"][0]["work"]["pushed_bytes"] == 2000 and body["sides"][0]["kv_pushed"]
    assert running.usage.cached_tokens == 32  # the prefill side's; the 100 handed over do not count
    assert {"routed", "first_token", "finished", "prefill_started"} <= {instant["name"] for instant in body["instants"]}


@pytest.mark.parametrize("late_report", [True, False])
async def test_incomplete_push_is_counted(late_report: bool) -> None:
    p0, d0 = pair()
    p0.late_report, p0.kv_pushed = late_report, False
    async with cluster([p0, d0]) as made:
        assert await text_of(life(made)) == answer_text(PROMPT, 12)
        if late_report:
            await made.until_quiet()
            assert made.metric("headrace_incomplete_handoffs_total") == 1


@pytest.mark.parametrize("eos_after,max_tokens,reason", [(None, 1, "length"), (1, 8, "stop")])
async def test_an_answer_of_one_token_needs_no_decode(eos_after: int | None, max_tokens: int, reason: str) -> None:
    p0, d0 = pair()
    p0.eos_after = eos_after
    async with cluster([p0, d0]) as made:
        running = life(made, max_tokens)
        assert await text_of(running) == answer_text(PROMPT, 1)
        assert running.finish_reason == reason
    assert not d0.decodes


async def test_colocated_is_one_decode() -> None:
    worker = FakeWorker("w0", cached_tokens=64)
    async with cluster([worker], policy="least_loaded") as made:
        running = life(made)
        assert await text_of(running) == answer_text(PROMPT, 12)
        assert running.usage.cached_tokens == 64
    assert worker.decodes[0].handoff_attempt == 0 and not worker.prefills


@pytest.mark.parametrize(
    "prefill,decode,counter",
    [
        (Faults(die_after=0), None, "retries"),
        (Faults(freeze_after=0), None, "retries"),
        (Faults(wedge_after=0), None, "retries"),
        (Faults(error="unavailable"), None, "retries"),
        (None, Faults(die_after=5), "migrations"),
        (None, Faults(freeze_after=5), "migrations"),
        (None, Faults(wedge_after=5), "migrations"),
        (None, Faults(error="store_lost", error_after=5), "migrations"),
        (None, Faults(die_after=0), "migrations"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
async def test_faults_do_not_change_the_answer(prefill: Faults | None, decode: Faults | None, counter: str) -> None:
    p0, d0 = pair(prefill, decode)
    async with cluster([p0, d0]) as made:
        running = life(made)
        assert await text_of(running) == answer_text(PROMPT, 12)
        assert getattr(running.timeline, counter) == 1
        assert made.metric(f"headrace_{counter}_total") == 1
        assert running.usage.completion_tokens == 12
    attempts = [m.request.attempt for w in (p0, d0) for m in [*w.prefills, *w.decodes]]
    assert len(set(attempts)) == len(attempts)


async def test_wedged_worker_is_told_to_abort_and_gets_nothing_new() -> None:
    p0, d0 = pair(decode=Faults(wedge_after=3))
    async with cluster([p0, d0]) as made:
        await text_of(life(made))
        assert [abort.attempt for abort in d0.aborts] == [2]
        await made.until_healthy(2)  # the abort freed it
        d0.wedged = False
        d0.faults = Faults()
        assert await text_of(life(made, request_id="r2")) == answer_text(PROMPT, 12)
        assert len(d0.decodes) == 2


async def test_late_rows_of_an_old_attempt_reach_nobody() -> None:
    p0, d0 = pair(decode=Faults(freeze_after=4))
    async with cluster([p0, d0], stall_s=0.3) as made:
        chunks: list[str] = []
        async for chunk in life(made, max_tokens=40).chunks():
            chunks.append(chunk.text)
            if len(chunks) == 20:
                d0.frozen = False  # SIGCONT in the middle of the new attempt
        assert "".join(chunks) == answer_text(PROMPT, 40)


async def test_a_transfer_failure_leads_to_a_local_prefill() -> None:
    p0, d0 = pair(prefill=Faults(error="transfer_failed"))
    async with cluster([p0, d0]) as made:
        running = life(made)
        assert await text_of(running) == answer_text(PROMPT, 12)
        assert running.timeline.placements[-1]["last_resort"] == "handoff_failed"
    assert len(d0.decodes) == 1 and d0.decodes[0].handoff_attempt == 0


async def test_without_a_store_there_is_no_hand_off() -> None:
    p0, d0 = pair()
    async with cluster([p0, d0], stores=False) as made:
        assert await text_of(life(made)) == answer_text(PROMPT, 12)
        assert made.metric("headrace_last_resorts_total") == 1
    assert not p0.prefills


async def test_the_last_worker_serves_whatever_its_role() -> None:
    p0, d0 = pair()
    async with cluster([p0, d0]) as made:
        await d0.stop()
        await made.until_healthy(1)
        assert await text_of(life(made)) == answer_text(PROMPT, 12)
    assert len(p0.decodes) == 1


async def test_errors_of_the_request_are_not_retried() -> None:
    p0, d0 = pair(prefill=Faults(error="invalid_request"))
    async with cluster([p0, d0]) as made:
        with pytest.raises(InvalidRequest):
            await text_of(life(made))
        assert made.metric("headrace_retries_total") == 0


async def test_attempts_are_bounded() -> None:
    worker = FakeWorker("w0", faults=Faults(error="unavailable"))
    async with cluster([worker], policy="least_loaded", max_attempts=3) as made:
        with pytest.raises(Unavailable):
            await text_of(life(made))
    assert len(worker.decodes) == 3


async def test_a_full_cluster_says_so_at_once() -> None:
    worker = FakeWorker("w0", faults=Faults(error="overloaded"))
    async with cluster([worker], policy="least_loaded") as made:
        with pytest.raises(Overloaded):
            await text_of(life(made))
    assert len(worker.decodes) == 1


async def test_no_worker_is_an_immediate_refusal() -> None:
    worker = FakeWorker("w0")
    async with cluster([worker]) as made:
        await worker.stop()
        await made.until_healthy(0)
        with pytest.raises(Unavailable):
            await text_of(life(made))


async def test_a_begun_answer_waits_for_a_worker_to_return() -> None:
    worker = FakeWorker("w0", faults=Faults(die_after=5), token_s=0.005)
    async with cluster([worker], policy="least_loaded") as made:
        running = life(made)
        chunks: list[str] = []
        async for chunk in running.chunks():
            chunks.append(chunk.text)
            if len(chunks) == 5:
                task = asyncio.create_task(_come_back(made, worker))
        await task
        assert "".join(chunks) == answer_text(PROMPT, 12)
        assert running.timeline.migrations == 1


async def _come_back(made: FakeCluster, worker: FakeWorker) -> None:
    """A new generation at another address, as after a restart by the controller."""
    await made.until_healthy(0)
    worker.generation, worker.faults = 2, Faults()
    await worker.start()
    made.registry.listed = [worker.member, store("n0")]


@pytest.mark.parametrize("phase,stage", [("prefill", "routed"), ("decode", "first_token")])
async def test_the_deadline_names_the_stage(phase: str, stage: str) -> None:
    hang = Faults(wedge_after=0)
    p0, d0 = pair(prefill=hang if phase == "prefill" else None, decode=hang if phase == "decode" else None)
    async with cluster([p0, d0], stall_s=30.0) as made:
        running = life(made, deadline_s=0.5)
        with pytest.raises(DeadlineExceeded) as caught:
            await text_of(running)
        assert caught.value.stage == stage
        assert phase in caught.value.message
        await made.until_quiet()
    assert (p0 if phase == "prefill" else d0).aborts


async def test_a_client_that_goes_aborts_everywhere() -> None:
    p0, d0 = pair()
    d0.token_s = 0.05
    async with cluster([p0, d0]) as made:
        chunks = life(made, max_tokens=500).chunks()
        for _ in range(3):
            await anext(chunks)
        await chunks.aclose()
        await made.until_quiet()
        assert [abort.attempt for abort in p0.aborts] == [1]
        assert [abort.attempt for abort in d0.aborts] == [2]


async def test_many_at_once_each_get_their_own() -> None:
    workers = [*pair(), FakeWorker("d1", "decode", "n0", token_s=0.003)]
    async with cluster(workers) as made:
        texts = await asyncio.gather(*(text_of(life(made, 20, request_id=f"r{n}")) for n in range(40)))
        await made.until_quiet()
        assert set(texts) == {answer_text(PROMPT, 20)}
        assert workers[1].decodes and workers[2].decodes


async def test_dispatch_to_a_dead_link_is_a_lost_worker() -> None:
    p0, d0 = pair()
    async with cluster([p0, d0]) as made:
        link = made.membership.link(("d0", 1))
        assert link is not None
        await d0.stop()
        await made.until_healthy(1)
        with pytest.raises(WorkerLost):
            link.dispatch(pb.Decode())


async def test_block_names_are_the_engines() -> None:
    async with cluster(pair()) as made:
        await text_of(life(made))
        names = block_hashes(PROMPT, 64, salt_of("rev/layout", ""))
        assert made.service.spine.index.match(names) == {("p0", 1): 1, ("d0", 1): 1}


async def test_cache_aware_follows_the_prefix_of_earlier_requests() -> None:
    workers = [FakeWorker(f"w{n}", token_s=0.0) for n in range(3)]
    async with cluster(workers, policy="cache_aware") as made:
        for n in range(6):
            await text_of(life(made, request_id=f"r{n}"))
            await made.until_quiet()
        assert sorted(len(worker.decodes) for worker in workers) == [0, 0, 6]
