"""The scheduler alone: budgets, single flight, preemption, loads, classes and tenants. Random histories: test_scheduler_histories.py."""

import random
import time

import pytest

from engine.block_pool import BlockPool
from engine.config import EngineConfig
from engine.predictor import Outlook, peak_growth
from engine.scheduler import Plan, Scheduler
from engine.sequence import Export, Sequence, SequenceState, Submission
from engine.waiting import TenantShares
from kvstore.hashing import private_hash
from protocol.errors import IllegalTransition
from protocol.request import GenerationRequest, Sampling

BLOCK = 4


def sequence(
    name: str,
    tokens: list[int],
    *,
    arrival: int = 0,
    priority: int = 0,
    deadline: float | None = None,
    load: bool = False,
    handoff: int = 0,
    tenant: str = "",
    max_tokens: int = 50,
) -> Sequence:
    deadline = deadline if deadline is not None else time.time() + 1000
    request = GenerationRequest(name, tuple(tokens), Sampling(max_tokens=max_tokens), deadline, priority=priority, tenant=tenant)
    private = private_hash(name, 0, handoff) if handoff % BLOCK else None
    submission = Submission(request, load=load, export=Export.NONE, handoff_tokens=handoff, private_block=private)
    return Sequence(submission, BLOCK, b"salt", None, arrival)  # type: ignore[arg-type]


def scheduler(blocks: int = 16, budget: int = 32, chunk: int = 16, seats: int = 8, **settings: object) -> tuple[Scheduler, BlockPool]:
    pool = BlockPool(blocks)
    config = EngineConfig(block_tokens=BLOCK, max_num_batched_tokens=budget, chunk_tokens=chunk, max_num_seqs=seats, **settings)  # type: ignore[arg-type]
    return Scheduler(config, pool), pool


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


def test_prompts_beside_decodes_are_cut_smaller_than_alone() -> None:
    pool = BlockPool(32)
    it = Scheduler(EngineConfig(block_tokens=BLOCK, max_num_batched_tokens=32, chunk_tokens=16, mixed_chunk_tokens=6, max_num_seqs=8), pool)
    it.add(sequence("short", [1, 2, 3], arrival=0))
    it.add(sequence("long", list(range(40)), arrival=1))
    finish_step(it, it.schedule(time.time()))
    it.add(sequence("other", list(range(50, 90)), arrival=2))
    assert [(seq.key[0], n) for seq, n in it.schedule(time.time()).scheduled] == [("short", 1), ("long", 6)]


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


def test_a_higher_class_takes_the_place_of_a_lower_one() -> None:
    """The latency of a class does not depend on how much of a lower one is there."""
    it, _ = scheduler(seats=2)
    low = [sequence(f"low{index}", [index] * 5, arrival=index, priority=1) for index in range(20)]
    for seq in low:
        it.add(seq)
    finish_step(it, it.schedule(time.time()))
    high = [sequence(f"high{index}", [50 + index] * 5, arrival=30 + index) for index in range(3)]
    for seq in high:
        it.add(seq)
    assert [seq.key[0] for seq, _ in it.schedule(time.time()).scheduled] == ["high0", "high1"]
    assert it.preemptions == 2 and all(seq.state is SequenceState.WAITING for seq in low)
    it.finish(high[0])
    assert [seq.key[0] for seq, _ in it.schedule(time.time()).scheduled] == ["high1", "high2"]
    assert it.preemptions == 2, "a class does not take its own places"


def test_a_preempted_sequence_loads_what_it_wrote_back_of_prompt_and_answer() -> None:
    it, pool = scheduler(blocks=8, seats=1)
    seq = sequence("d", [*range(10), 99], priority=1, load=True, handoff=10, max_tokens=20)
    it.add(seq)
    it.schedule(time.time())
    it.loaded(seq.key, 3)
    for token in range(100, 107):
        finish_step(it, it.schedule(time.time()), token)
    assert seq.num_tokens == 18
    urgent = sequence("urgent", list(range(50, 80)), arrival=1)
    it.add(urgent)
    finish_step(it, it.schedule(time.time()))
    assert seq.state is SequenceState.WAITING
    it.finish(urgent)
    ((_, items),) = it.schedule(time.time()).loads
    assert [(item.hash, item.num_tokens, item.private) for item in items] == [(block_hash, BLOCK, False) for block_hash in seq.hashes]
    it.loaded(seq.key, 4)
    assert it.schedule(time.time()).scheduled == [(seq, 2)]
    assert seq.tally.recomputed_tokens == 0 and pool.counts().used == 5


def test_mixed_chunk_puts_decodes_and_chunks_in_one_step_or_lets_them_take_turns() -> None:
    kinds: dict[bool, list[set[str]]] = {}
    for mixed in (True, False):
        it, _ = scheduler(blocks=32, budget=8, chunk=8, mixed_chunk=mixed)
        it.add(sequence("short", [1, 2, 3], arrival=0))
        finish_step(it, it.schedule(time.time()))
        it.add(sequence("long", list(range(30)), arrival=1))
        kinds[mixed] = []
        for _ in range(4):
            plan = it.schedule(time.time())
            kinds[mixed].append({seq.key[0] for seq, _ in plan.scheduled})
            finish_step(it, plan)
    assert kinds[True] == [{"short", "long"}] * 4
    assert kinds[False] == [{"long"}, {"short"}] * 2


def test_the_tenant_that_was_served_least_goes_first() -> None:
    """A flood of one tenant does not delay another's few requests; with both present they share alike."""
    it, _ = scheduler(blocks=64, seats=1)
    for index in range(10):
        it.add(sequence(f"flood{index}", [index, index], arrival=index, tenant="flood"))
    for index in range(3):
        it.add(sequence(f"few{index}", [50 + index, index], arrival=20 + index, tenant="few"))
    order = []
    while len(order) < 13:
        ((seq, _),) = it.schedule(time.time()).scheduled
        order.append(seq.request.tenant)
        seq.advance(2)
        it.finish(seq)
    assert order[:6].count("few") == 3 and order[6:] == ["flood"] * 7


def test_loaded_tokens_cost_a_tenant_nothing() -> None:
    it, _ = scheduler(blocks=64, seats=2)
    it.add(sequence("loads", list(range(20)), tenant="loads", load=True))
    it.add(sequence("computes", list(range(50, 59)), arrival=1, tenant="computes"))
    it.schedule(time.time())
    it.loaded(("loads", 0), 4)
    for name, tenant in (("first", "computes"), ("second", "loads")):
        it.add(sequence(name, [len(name)] * 3, arrival=2, tenant=tenant))
    for key in (("loads", 0), ("computes", 0)):
        it.drop(it.get(key))  # type: ignore[arg-type]
    assert [seq.key[0] for seq in it.schedule(time.time()).admitted] == ["second", "first"]


def test_a_tenant_saves_nothing_up_by_staying_away() -> None:
    shares = TenantShares()
    shares.enter("busy")
    shares.charge("busy", 1000)
    shares.enter("late")
    assert shares.served("late") == 1000
    shares.charge("late", 10)
    shares.leave("late")
    shares.enter("late")
    assert shares.served("late") == 1010, "leaving does not wipe the slate either"
    shares.leave("busy")
    shares.leave("late")
    shares.enter("busy")
    assert shares.served("busy") == 0


def test_learnt_lengths_bound_admission_so_that_nobody_is_preempted() -> None:
    """20 answers of 40 tokens in a pool for three of them: once the length is known, memory is given to as many as can end."""
    it, _ = scheduler(blocks=36, seats=8, budget=64)
    for index in range(20):
        it.add(sequence(f"s{index}", [index] * 5, arrival=index, max_tokens=1000))
    before = []
    while not it.is_idle:
        plan = it.schedule(time.time())
        finish_step(it, plan)
        for seq, _ in plan.scheduled:
            if seq.num_output == 40:
                it.finish(seq)
                before.append(it.preemptions)
    assert before[0] > 0, "nothing was known"
    assert before[-1] == before[6]


def test_peak_growth_is_the_worst_moment_before_an_end() -> None:
    """Against stepping through it token by token."""
    rng = random.Random(1)
    for _ in range(200):
        outlooks = []
        for _ in range(rng.randint(1, 6)):
            tokens = rng.randint(1, 40)
            held = -(-tokens // BLOCK)
            outlooks.append(Outlook(tokens, held, rng.randint(0, held), rng.randint(1, 30)))
        worst = max(
            sum(-(-(it.num_tokens + step) // BLOCK) - it.num_held if step <= it.remaining else -it.num_own for it in outlooks)
            for step in range(1, max(it.remaining for it in outlooks) + 1)
        )
        assert peak_growth(outlooks, BLOCK) == worst


def test_a_round_of_decode_steps_ends_when_a_plan_is_due() -> None:
    it, _ = scheduler(blocks=3)
    it.add(sequence("a", [1, 2, 3], deadline=100.0))
    plan = it.schedule(0.0)
    finish_step(it, plan)
    assert it.again(plan, 100.0) is None, "at the deadline"
    following = it.again(plan, 0.0)
    assert following is not None and [n for _, n in following.scheduled] == [1]
    finish_step(it, following)
    other = sequence("b", [9] * 3, arrival=1)
    it.add(other)
    assert it.again(following, 0.0) is None, "somebody waits"
    it.finish(other)
    steps = 0
    while following := it.again(following, 0.0):
        finish_step(it, following)
        steps += 1
    assert steps == 13 - 5, "until no block is left to grow into"
