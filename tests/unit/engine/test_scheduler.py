"""The scheduler alone: budgets, single flight, preemption, loads, and conservation of blocks over random histories."""

import random
import time

import pytest

from engine.block_pool import BlockPool
from engine.config import EngineConfig
from engine.scheduler import Plan, Scheduler
from engine.sequence import Export, Sequence, SequenceState, Submission
from kvstore.hashing import private_hash
from protocol.errors import IllegalTransition
from protocol.request import GenerationRequest, Sampling

BLOCK = 4


def sequence(
    name: str, tokens: list[int], *, arrival: int = 0, priority: int = 0, deadline: float | None = None, load: bool = False, handoff: int = 0
) -> Sequence:
    deadline = deadline if deadline is not None else time.time() + 1000
    request = GenerationRequest(name, tuple(tokens), Sampling(max_tokens=50), deadline, priority=priority)
    private = private_hash(name, 0, handoff) if handoff % BLOCK else None
    submission = Submission(request, load=load, export=Export.NONE, handoff_tokens=handoff, private_block=private)
    return Sequence(submission, BLOCK, b"salt", None, arrival)  # type: ignore[arg-type]


def scheduler(blocks: int = 16, budget: int = 32, chunk: int = 16) -> tuple[Scheduler, BlockPool]:
    pool = BlockPool(blocks)
    return Scheduler(EngineConfig(block_tokens=BLOCK, max_num_batched_tokens=budget, chunk_tokens=chunk, max_num_seqs=8), pool), pool


def finish_step(it: Scheduler, plan: Plan, new_token: int = 7) -> None:
    for seq, num_tokens in plan.scheduled:
        done = num_tokens == seq.num_remaining
        seq.advance(num_tokens)
        it.name_blocks(seq)
        if done:
            seq.append(new_token)


def test_decodes_go_before_chunks_and_the_budget_holds() -> None:
    it, _ = scheduler(budget=10, chunk=8)
    short = sequence("short", [1, 2, 3], arrival=0)
    it.add(short)
    finish_step(it, it.schedule(time.time()))
    it.add(sequence("long", list(range(30)), arrival=1))
    plan = it.schedule(time.time())
    assert [(seq.key[0], n) for seq, n in plan.scheduled] == [("short", 1), ("long", 8)]


def test_priority_before_arrival() -> None:
    it, _ = scheduler(budget=4)
    it.add(sequence("later", [1, 2, 3, 4], arrival=0, priority=1))
    it.add(sequence("sooner", [5, 6, 7, 8], arrival=1, priority=0))
    assert it.schedule(time.time()).scheduled[0][0].key[0] == "sooner"


def test_identical_prefixes_in_flight_are_computed_once() -> None:
    it, _ = scheduler()
    prompt = list(range(9))
    it.add(sequence("a", prompt, arrival=0))
    it.add(sequence("b", prompt, arrival=1))
    plan = it.schedule(time.time())
    assert [seq.key[0] for seq, _ in plan.scheduled] == ["a"]
    finish_step(it, plan)
    plan = it.schedule(time.time())
    assert {seq.key[0]: n for seq, n in plan.scheduled} == {"a": 1, "b": 1}
    second = it.get(("b", 0))
    assert second is not None and second.tally.reused_device_tokens == 8


def test_who_waits_for_a_prefix_goes_on_when_its_owner_ends() -> None:
    it, _ = scheduler()
    owner = sequence("a", list(range(9)), arrival=0)
    it.add(owner)
    it.add(sequence("b", list(range(9)), arrival=1))
    it.schedule(time.time())
    it.finish(owner)
    assert [seq.key[0] for seq, _ in it.schedule(time.time()).scheduled] == ["b"]


def test_a_full_hit_computes_only_the_last_token_and_does_not_write_it() -> None:
    it, _ = scheduler()
    first = sequence("a", list(range(8)))
    it.add(first)
    finish_step(it, it.schedule(time.time()))
    it.finish(first)
    again = sequence("b", list(range(8)), arrival=1)
    it.add(again)
    plan = it.schedule(time.time())
    assert plan.scheduled == [(again, 1)]
    assert (again.num_computed, again.num_stored) == (7, 8)


def test_the_least_urgent_is_preempted_and_comes_back() -> None:
    it, _ = scheduler(blocks=6)
    older, younger = sequence("older", list(range(7)), arrival=0), sequence("younger", list(range(50, 57)), arrival=1)
    it.add(older)
    it.add(younger)
    finish_step(it, it.schedule(time.time()))
    assert it.num_running == 2
    for _ in range(6):
        finish_step(it, it.schedule(time.time()))
    assert younger.tally.preemptions == 1 and younger.state is SequenceState.WAITING
    assert older.tally.preemptions == 0
    it.finish(older)
    tokens = list(younger.tokens)
    finish_step(it, it.schedule(time.time()))
    assert younger.state is SequenceState.RUNNING and younger.tokens[: len(tokens)] == tokens
    assert it.check_integrity() == []


def test_received_kv_is_a_sequence_whose_computed_count_starts_high() -> None:
    it, _ = scheduler()
    seq = sequence("d", [*range(10), 99], load=True, handoff=10)
    it.add(seq)
    plan = it.schedule(time.time())
    ((loading, items),) = plan.loads
    assert loading is seq and plan.scheduled == []
    assert [(item.num_tokens, item.private) for item in items] == [(4, False), (4, False), (2, True)]
    assert it.loaded(seq.key, 3) is not None
    assert it.schedule(time.time()).scheduled == [(seq, 1)]
    assert seq.tally.recomputed_tokens == 0 and seq.tally.reused_store_tokens == 10


def test_missing_handoff_blocks_are_computed_again_and_counted() -> None:
    it, _ = scheduler()
    seq = sequence("d", [*range(10), 99], load=True, handoff=10)
    it.add(seq)
    it.schedule(time.time())
    it.loaded(seq.key, 1)
    assert it.schedule(time.time()).scheduled == [(seq, 7)]
    assert seq.tally.recomputed_tokens == 6


def test_blocks_of_an_aborted_load_stay_until_it_has_ended() -> None:
    it, pool = scheduler()
    seq = sequence("d", list(range(9)), load=True)
    it.add(seq)
    it.schedule(time.time())
    it.finish(seq)
    assert pool.counts().used == 3 and not it.is_idle
    assert it.loaded(seq.key, 2) is None
    assert pool.counts().used == 0 and it.is_idle


def test_deadline_ends_waiting_and_running_alike() -> None:
    it, pool = scheduler()
    it.add(sequence("a", list(range(6)), deadline=100.0))
    it.add(sequence("b", list(range(6, 12)), deadline=200.0, arrival=1))
    assert it.schedule(50.0).expired == []
    assert [seq.key[0] for seq in it.schedule(150.0).expired] == ["a"]
    assert [seq.key[0] for seq in it.schedule(250.0).expired] == ["b"]
    assert pool.counts().used == 0


def test_an_illegal_move_raises() -> None:
    seq = sequence("a", [1])
    with pytest.raises(IllegalTransition):
        seq.move(SequenceState.WAITING)


@pytest.mark.parametrize("seed", range(6))
def test_random_histories_conserve_blocks_and_starve_nobody(seed: int) -> None:
    """Random arrivals, shared prefixes, loads that succeed in part, aborts and finishes in a tight pool; then everyone must end."""
    rng = random.Random(seed)
    it, pool = scheduler(blocks=12, budget=12, chunk=6)
    loads: list[tuple[str, int]] = []
    sizes: dict[tuple[str, int], int] = {}
    live: dict[tuple[str, int], Sequence] = {}
    wanted: dict[tuple[str, int], int] = {}
    step = 0
    while step < 700 or live or loads:
        step += 1
        assert step < 5000, "someone starves"
        if step < 700 and rng.random() < 0.3:
            prompt = [rng.randint(0, 1)] * BLOCK + [rng.randint(0, 3) for _ in range(rng.randint(1, 14))]
            seq = sequence(f"s{step}", prompt, arrival=step, priority=rng.randint(0, 2), load=rng.random() < 0.5)
            live[seq.key], wanted[seq.key] = seq, rng.randint(1, 10)
            it.add(seq)
        if live and rng.random() < 0.05:
            it.finish(live.pop(rng.choice(list(live))))
        if loads and rng.random() < 0.7:
            key = loads.pop(rng.randrange(len(loads)))
            it.loaded(key, rng.randint(0, sizes[key]))
        plan = it.schedule(float(step))
        loads += [seq.key for seq, _ in plan.loads]
        sizes |= {seq.key: len(items) for seq, items in plan.loads}
        assert sum(n for _, n in plan.scheduled) <= 12
        assert all(n <= 6 for _, n in plan.scheduled)
        for seq, n in plan.scheduled:
            assert len(seq.blocks) * BLOCK >= seq.num_computed + n
        finish_step(it, plan, new_token=rng.randint(0, 3))
        for seq, _ in plan.scheduled:
            if seq.num_output >= wanted[seq.key]:
                it.finish(live.pop(seq.key))
        assert it.check_integrity() == []
    assert pool.counts().used == 0
