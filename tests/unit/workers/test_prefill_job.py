"""A prefill job alone: every exported block is unpinned once and the job ends, whatever happens to its push."""

import asyncio
import time
from typing import Any

from engine.events import Admitted, Chunk, Exported, Failed
from engine.scheduler import LoadItem
from engine.sequence import Sequence
from kvstore.loader import NodeLoader
from kvstore.mover import PoolBlock, PushReport
from prefill_worker.service import PrefillJob, PrefillService
from protocol import headrace_pb2 as pb
from protocol.errors import Cancelled, StoreLost
from protocol.request import GenerationRequest, Sampling


class Engine:
    def __init__(self) -> None:
        self.unpinned: list[int] = []
        self.aborted = 0

    def submit(self, submission: Any) -> None: ...

    def abort(self, key: Any) -> None:
        self.aborted += 1

    def unpin(self, blocks: list[int]) -> None:
        self.unpinned += blocks


class NoStore:
    def __init__(self, error: Exception) -> None:
        self._error = error

    async def get(self, *_: Any) -> Any:
        raise self._error


class Mover:
    """A destination that has no credit for the first `refusals` attaches."""

    codec, transport, block_bytes = "raw", "shm", 8

    def __init__(self, refusals: int = 0) -> None:
        self.refusals = refusals
        self.attached = self.closed = 0

    async def attach(self, session: Any, hold: str, attempt: int, keys: list[pb.BlockKey], deadline: float) -> "Plan":
        self.attached += 1
        return Plan(self, len(keys) if self.attached <= self.refusals else 0)


class Plan:
    def __init__(self, mover: Mover, num_refused: int) -> None:
        self.num_refused = num_refused
        self._mover = mover

    async def push(self, blocks: list[PoolBlock], deadline: float) -> PushReport:
        names = {block.hash for block in blocks} if not self.num_refused else set()
        return PushReport(accepted=names, present=names)

    async def close(self) -> None:
        self._mover.closed += 1


class Store:
    async def get(self, *_: Any) -> Any:
        return self

    def post(self, _: Any) -> None: ...


async def no_store() -> None:
    return None


def begin(error: Exception | None = None, mover: Mover | None = None) -> tuple[Engine, list[pb.Row], PrefillJob, Sequence]:
    engine, rows = Engine(), []
    stores: Any = Store() if mover else NoStore(error or StoreLost("gone"))
    service = PrefillService(engine, NodeLoader(mover or Mover(), no_store), stores, 32)  # type: ignore[arg-type]
    request = GenerationRequest("r", tuple(range(40)), Sampling(max_tokens=4), time.time() + 30, attempt=1)
    job = service.start(pb.Prefill(request=request.to_message()), rows.append)
    return engine, rows, job, Sequence(job.submission, 32, b"salt", None, 0)  # type: ignore[arg-type]


async def ended(job: PrefillJob) -> None:
    async with asyncio.timeout(5):
        while not job.is_done:  # noqa: ASYNC110 (its tasks are its own)
            await asyncio.sleep(0.001)


def exported(sequence: Sequence, *blocks: int) -> Exported:
    return Exported(sequence, [LoadItem(block, sequence.hashes[0], 32) for block in blocks])


async def test_a_preempted_prefill_is_pushed_by_one_task_and_ends() -> None:
    engine, rows, job, sequence = begin()
    job.handle(Admitted(sequence))
    job.handle(exported(sequence, 1))
    job.handle(Admitted(sequence))
    job.handle(exported(sequence, 2))
    job.handle(Chunk(sequence, [5], "x", "handoff"))
    await ended(job)
    assert sorted(engine.unpinned) == [1, 2]
    assert [(row.finish_reason, row.kv_pushed) for row in rows] == [("handoff", False), ("", False)]


async def test_an_aborted_job_reports_no_push() -> None:
    engine, rows, job, sequence = begin()
    job.handle(Admitted(sequence))
    job.handle(exported(sequence, 3))
    job.abort()
    job.handle(Failed(sequence.key, Cancelled("aborted")))
    await ended(job)
    assert engine.unpinned == [3] and engine.aborted == 1
    assert [row.finish_reason for row in rows] == ["error"]


async def test_a_fault_of_ours_pins_nothing_and_is_reported_as_not_pushed() -> None:
    engine, rows, job, sequence = begin(RuntimeError("a fault"))
    job.handle(Admitted(sequence))
    job.handle(exported(sequence, 1, 2))
    job.handle(Chunk(sequence, [5], "x", "handoff"))
    await ended(job)
    assert sorted(engine.unpinned) == [1, 2]
    assert [(row.finish_reason, row.kv_pushed) for row in rows] == [("handoff", False), ("", False)]


async def test_aborted_after_the_hand_off_it_stops_pushing() -> None:
    engine, rows, job, sequence = begin()
    job.handle(Admitted(sequence))
    job.handle(exported(sequence, 1))
    job.handle(Chunk(sequence, [5], "x", "handoff"))
    job.abort()
    await ended(job)
    assert engine.unpinned == [1]
    assert [row.finish_reason for row in rows] == ["handoff"], "nobody is left to hear of the push"


async def test_without_credit_it_asks_again_until_the_destination_has_room() -> None:
    mover = Mover(refusals=2)
    engine, rows, job, sequence = begin(mover=mover)
    job.handle(Admitted(sequence))
    job.handle(exported(sequence, 1))
    job.handle(Exported(sequence, [LoadItem(2, job.submission.private_block or sequence.hashes[0], 8, private=True)]))
    job.handle(Chunk(sequence, [5], "x", "handoff"))
    await ended(job)
    assert sorted(engine.unpinned) == [1, 2]
    assert rows[-1].kv_pushed and rows[-1].work.pushed_blocks == 2
    assert mover.attached == mover.closed >= 3
