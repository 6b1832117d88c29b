"""Every row of ADMISSION: ranks are pure, and whatever they are, everybody is admitted and nobody waits past the age cap while others overtake."""

import math
import random
from collections.abc import Iterable

import pytest

from engine.admission import ADMISSION, open_admission
from engine.block_pool import BlockPool
from engine.config import EngineConfig
from engine.predictor import LengthPredictor
from engine.scheduler import Scheduler
from engine.sequence import Sequence, Submission
from protocol.errors import ConfigError
from protocol.request import GenerationRequest, Sampling

BLOCK, AGE_CAP_S = 4, 25.0
rows = pytest.mark.parametrize("row", ADMISSION)


def sequence(name: str, tokens: list[int], *, arrival: int = 0, queued: float = 0.0, max_tokens: int = 8, tenant: str = "") -> Sequence:
    request = GenerationRequest(name, tuple(tokens), Sampling(max_tokens=max_tokens), deadline=math.inf, tenant=tenant)
    made = Sequence(Submission(request), BLOCK, b"salt", None, arrival)  # type: ignore[arg-type]
    made.times.queued = queued
    return made


@rows
def test_a_rank_is_pure(row: str) -> None:
    pool = BlockPool(8)
    admission = open_admission(row, pool, LengthPredictor())
    asked = sequence("a", list(range(10)))
    before = pool.counts()
    ranks = [admission.rank(asked) for _ in range(3)]
    assert ranks[0] == ranks[1] == ranks[2] and math.isfinite(ranks[0]) and pool.counts() == before


@rows
@pytest.mark.parametrize("seed", range(3))
def test_nobody_waits_past_the_cap_while_others_overtake(row: str, seed: int) -> None:
    """One step a second, more arrivals than places. Passed over are only those that wait for a prefix in flight."""
    rng = random.Random(seed)
    pool = BlockPool(24)
    config = EngineConfig(block_tokens=BLOCK, max_num_batched_tokens=24, chunk_tokens=12, max_num_seqs=3, admission=row, age_cap_s=AGE_CAP_S)
    it, now = Scheduler(config, pool), 0
    waiting: dict[str, Sequence] = {}
    running: dict[str, Sequence] = {}
    overtakings = 0
    while now < 600 or waiting or running:
        now += 1
        assert now < 3000, "someone starves"
        if now < 600 and rng.random() < 0.6:
            prompt = [rng.randrange(4)] * (BLOCK * rng.randint(1, 4)) + [rng.randrange(100) for _ in range(rng.randint(1, 8))]
            waiting[f"s{now}"] = sequence(f"s{now}", prompt, arrival=now, queued=float(now), max_tokens=rng.choice((2, 8)))
            it.add(waiting[f"s{now}"])
        plan = it.schedule(float(now))
        for admitted in plan.admitted:
            waiting.pop(admitted.key[0], None)
            running[admitted.key[0]] = admitted
            older = [other for other in waiting.values() if other.order < admitted.order]
            overtakings += len(older)
            due = [other for other in older if now - other.times.queued >= AGE_CAP_S]
            assert all(shares_prefix(other, running.values()) for other in due)
        for seq, num_tokens in plan.scheduled:
            done = num_tokens == seq.num_remaining
            seq.advance(num_tokens)
            it.name_blocks(seq)
            if done:
                seq.append(rng.randrange(100))
            if seq.num_output >= seq.request.sampling.max_tokens:
                it.finish(running.pop(seq.key[0]))
        assert it.check_integrity() == []
    assert pool.counts().used == 0
    assert overtakings or row == "fcfs"


def shares_prefix(waiting: Sequence, others: Iterable[Sequence]) -> bool:
    return any(waiting.hashes[:1] == other.hashes[:1] for other in others)


def test_lpm_takes_the_longest_cached_prefix_first() -> None:
    pool = BlockPool(8)
    admission = open_admission("lpm", pool, LengthPredictor())
    cached = sequence("a", [1] * 9)
    for block, block_hash in zip(pool.allocate(2), cached.hashes, strict=True):
        pool.name(block, block_hash)
    assert admission.rank(cached) < admission.rank(sequence("b", [1] * 7)) < admission.rank(sequence("c", [2] * 9))


def test_shortest_predicted_follows_what_was_learnt() -> None:
    predictor = LengthPredictor()
    admission = open_admission("shortest_predicted", BlockPool(8), predictor)
    for tenant, length in (("brief", 5), ("wordy", 90)):
        ended = sequence("ended", [1] * 9, tenant=tenant, max_tokens=100)
        for token in range(length):
            ended.append(token)
        predictor.learn(ended)
    brief, wordy = (sequence("new", [2] * 9, tenant=tenant, max_tokens=100) for tenant in ("brief", "wordy"))
    assert predictor.remaining(brief) == 5 and predictor.remaining(wordy) == 90
    assert admission.rank(brief) < admission.rank(wordy)


def test_unknown_row_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="lpm"):
        open_admission("nope", BlockPool(1), LengthPredictor())
