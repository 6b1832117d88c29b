"""What a decode job asks of the store: a hand-off's blocks are waited for under its hold; a preempted sequence takes what it wrote back, if it is there."""

import time
from types import SimpleNamespace
from typing import Any

from decode_worker.service import DecodeService
from engine.events import Load
from engine.scheduler import LoadItem
from engine.sequence import Sequence
from kvstore.hashing import hold_name
from kvstore.loader import NodeLoader
from kvstore.mover import FetchReport
from protocol import headrace_pb2 as pb
from protocol.request import GenerationRequest, Sampling

BLOCK = 4


class FakeMover:
    codec, transport = "raw", "fake"

    def __init__(self) -> None:
        self.fetched: list[tuple[str, bool]] = []

    async def fetch(self, session: object, hold: str, blocks: list[Any], *, expect: bool, **_: Any) -> FetchReport:
        self.fetched.append((hold, expect))
        return FetchReport(num_blocks=len(blocks))


async def test_a_preempted_hand_off_waits_for_nothing() -> None:
    answered: list[int] = []
    engine = SimpleNamespace(submit=lambda submission: None, loaded=lambda key, good: answered.append(good))
    posted: list[pb.StoreRequest] = []
    mover, session = FakeMover(), SimpleNamespace(lost=False, post=posted.append)

    async def local_store() -> Any:
        return session

    request = GenerationRequest("r", tuple(range(8)), Sampling(max_tokens=9), time.time() + 60, attempt=2, output_tokens=(1,))
    message = pb.Decode(request=request.to_message(), handoff_tokens=8, handoff_attempt=1)
    job = DecodeService(engine, NodeLoader(mover, local_store), BLOCK, 5.0).start(message, lambda row: None)  # type: ignore[arg-type]
    sequence = Sequence(job.submission, BLOCK, b"salt", None, 0)  # type: ignore[arg-type]
    items = [LoadItem(index, block_hash, BLOCK) for index, block_hash in enumerate(sequence.hashes)]
    for preemptions in (0, 1):
        sequence.tally.preemptions = preemptions
        job.handle(Load(sequence, items))
        for task in list(job._tasks):
            await task
    assert mover.fetched == [(hold_name("r", 1), True), (hold_name("r", 2), False)]
    assert answered == [2, 2]
    assert [request.forget.request_id for request in posted] == [hold_name("r", 1)]
