"""The scheduler's laws over random histories: budgets, conservation of blocks, single ownership, no starvation. 12,000 steps and more in all."""

import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.admission import ADMISSION
from engine.block_pool import BlockPool
from engine.config import EngineConfig
from engine.scheduler import Plan, Scheduler
from engine.sequence import Sequence, SequenceKey, Submission
from kvstore.hashing import private_hash
from protocol.request import GenerationRequest, Sampling

BLOCK, BLOCKS, BUDGET, CHUNK, SEATS = 4, 12, 12, 6, 5
EXAMPLES, STEPS = 20, 600
CONFIGS = st.fixed_dictionaries(
    {"admission": st.sampled_from(sorted(ADMISSION)), "mixed_chunk": st.booleans(), "age_cap_s": st.sampled_from([0.0, 30.0]), "prefix_cache": st.booleans()}
)


class History:
    """Random arrivals of two classes and two tenants with shared prefixes, loads that succeed in part, aborts and deadlines, in a tight pool."""

    def __init__(self, seed: int, config: dict[str, Any]) -> None:
        self.rng = random.Random(seed)
        self.pool = BlockPool(BLOCKS, config["prefix_cache"])
        engine = EngineConfig(block_tokens=BLOCK, max_num_batched_tokens=BUDGET, chunk_tokens=CHUNK, max_num_seqs=SEATS, **config)
        self.scheduler = Scheduler(engine, self.pool)
        self.live: dict[SequenceKey, Sequence] = {}
        self.loads: dict[SequenceKey, int] = {}
        self.steps = 0
        self.arrivals = 0

    def arrive(self) -> None:
        rng, self.arrivals = self.rng, self.arrivals + 1
        tokens = [rng.randint(0, 1)] * BLOCK + [rng.randint(0, 3) for _ in range(rng.randint(1, 14))]
        name, handoff = f"s{self.arrivals}", len(tokens) - 1 if rng.random() < 0.3 else 0
        deadline = self.steps + (rng.randint(1, 60) if rng.random() < 0.1 else 1e9)
        request = GenerationRequest(
            name, tuple(tokens), Sampling(max_tokens=rng.randint(1, 12)), deadline, priority=rng.randint(0, 1), tenant=rng.choice(("a", "b"))
        )
        private = private_hash(name, 0, handoff) if handoff % BLOCK else None
        submission = Submission(request, rng.random() < 0.1, bool(handoff) or rng.random() < 0.5, handoff_tokens=handoff, private_block=private)
        sequence = Sequence(submission, BLOCK, b"salt", None, self.arrivals)  # type: ignore[arg-type]
        sequence.times.queued = float(self.steps)
        self.live[sequence.key] = sequence
        self.scheduler.add(sequence)

    def disturb(self) -> None:
        rng = self.rng
        if self.live and rng.random() < 0.05:
            self.scheduler.drop(self.live.pop(rng.choice(list(self.live))))
        if self.loads and rng.random() < 0.7:
            key = rng.choice(list(self.loads))
            self.scheduler.loaded(key, rng.randint(0, self.loads.pop(key)))

    def round(self) -> None:
        plan: Plan | None = self.scheduler.schedule(float(self.steps))
        assert plan is not None
        for sequence in plan.expired:
            del self.live[sequence.key]
        self.loads |= {sequence.key: len(items) for sequence, items in plan.loads}
        for _ in range(self.rng.randint(1, 4)):
            self.step(plan)
            plan = self.scheduler.again(plan, float(self.steps)) if plan.scheduled else None
            if plan is None:
                return

    def step(self, plan: Plan) -> None:
        self.steps += 1
        assert sum(num_tokens for _, num_tokens in plan.scheduled) <= BUDGET
        assert all(0 < num_tokens <= CHUNK for _, num_tokens in plan.scheduled)
        assert len({sequence.key for sequence, _ in plan.scheduled}) == len(plan.scheduled) <= SEATS
        assert self.scheduler.num_running + len(self.loads) - self.num_orphans() <= SEATS
        for sequence, num_tokens in plan.scheduled:
            assert len(sequence.blocks) * BLOCK >= sequence.num_computed + num_tokens
            done = num_tokens == sequence.num_remaining
            sequence.advance(num_tokens)
            self.scheduler.name_blocks(sequence)
            if done:
                sequence.append(self.rng.randint(0, 3))
                if sequence.submission.one_token or sequence.num_output >= sequence.request.sampling.max_tokens:
                    self.scheduler.finish(self.live.pop(sequence.key))
        assert self.scheduler.check_integrity() == []

    def num_orphans(self) -> int:
        return sum(key not in self.live for key in self.loads)


@settings(max_examples=EXAMPLES, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), config=CONFIGS)
def test_random_histories_conserve_blocks_and_starve_nobody(seed: int, config: dict[str, Any]) -> None:
    it = History(seed, config)
    while it.steps < STEPS or it.live or it.loads:
        assert it.steps < 5 * STEPS, "someone starves"
        if it.steps < STEPS and it.rng.random() < 0.3:
            it.arrive()
        it.disturb()
        it.round()
    assert it.pool.counts().used == 0 and it.scheduler.is_idle
