"""What every routing policy promises, over the whole table: healthy workers only, the same choice for the same question, nothing kept."""

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import ConfigError, Unavailable
from router.config import RouterConfig
from router.placement import Placement, RoutingRequest
from router.policies import POLICIES, Policy, new_policy
from router.view import ClusterView, StoreView, WorkerView

ROLES = ("prefill", "decode", "both")
workers = st.builds(
    WorkerView,
    name=st.sampled_from([f"w{n}" for n in range(6)]),
    generation=st.integers(1, 2),
    role=st.sampled_from(ROLES),
    node=st.sampled_from(["n0", "n1"]),
    trouble=st.sampled_from(["", "", "", "stalled", "draining", "not connected"]),
    sequences=st.integers(0, 20),
    waiting_tokens=st.integers(0, 5000),
)


@st.composite
def questions(draw: Any) -> tuple[RoutingRequest, ClusterView]:
    found = tuple(draw(st.lists(workers, max_size=6, unique_by=lambda worker: worker.key)))
    keys = [worker.key for worker in found]
    cached = {key: draw(st.integers(0, 100)) for key in keys if draw(st.booleans())}
    excluded = frozenset(key for key in keys if draw(st.integers(0, 4)) == 0)
    request = RoutingRequest(draw(st.integers(1, 4000)), 32, cached_blocks=cached, excluded=excluded)
    return request, ClusterView(found, (StoreView("s", 1, "a", "n0"),))


def answer(policy: Policy, request: RoutingRequest, view: ClusterView) -> Placement | None:
    try:
        return policy.choose(request, view)
    except Unavailable:
        return None


@pytest.fixture(params=sorted(POLICIES))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("name", sorted(POLICIES))
@given(question=questions())
@settings(max_examples=200, deadline=None)
def test_contract(name: str, question: tuple[RoutingRequest, ClusterView]) -> None:
    request, view = question
    before = copy.deepcopy(question)
    policy = new_policy(name, RouterConfig())
    placement = answer(policy, request, view)
    usable = {worker.key for worker in view.workers if worker.healthy and worker.key not in request.excluded}
    assert (placement is not None) == bool(usable), "a choice exactly when a worker is left"
    assert question == before, "a policy changes nothing"
    for other in (policy, new_policy(name, RouterConfig())):
        assert answer(other, request, view) == placement, "the same question, the same answer"
    shuffled = ClusterView(tuple(reversed(view.workers)), view.stores)
    assert _names(answer(policy, request, shuffled)) == _names(placement), "the order of the workers says nothing"
    if placement is None:
        return
    assert placement.reason
    assert placement.decode.key in usable
    decode_roles = {worker.key for worker in view.workers if worker.key in usable and worker.prefers("decode")}
    assert placement.decode.key in decode_roles or (not decode_roles and placement.last_resort), "roles first, the last resort is told"
    if placement.prefill is not None:
        assert placement.prefill.key in usable and placement.prefill.key != placement.decode.key
        assert placement.prefill.prefers("prefill") or placement.last_resort


def _names(placement: Placement | None) -> tuple[str, str | None] | None:
    """Two generations of one worker may tie."""
    return (placement.decode.name, placement.prefill.name if placement.prefill else None) if placement else None


def test_unknown_policies_are_refused() -> None:
    with pytest.raises(ConfigError, match="known: always_disaggregate"):
        new_policy("nearest", RouterConfig())


# ---- what makes each of them itself -----------------------------------------------------------------------------------------------

P0, P1 = (WorkerView(f"p{n}", 1, "prefill", "n0") for n in range(2))
D0, D1 = (WorkerView(f"d{n}", 1, "decode", "n1") for n in range(2))
ALL = ClusterView((P0, P1, D0, D1))


def choose(name: str, request: RoutingRequest, view: ClusterView = ALL) -> tuple[str | None, str, str]:
    placement = new_policy(name, RouterConfig()).choose(request, view)
    return placement.prefill.name if placement.prefill else None, placement.decode.name, placement.last_resort


def test_always_disaggregate_even_for_short_prompts() -> None:
    assert choose("always_disaggregate", RoutingRequest(1, 32)) == ("p0", "d0", "")


def test_always_disaggregate_alone_is_a_counted_last_resort() -> None:
    assert choose("always_disaggregate", RoutingRequest(500, 32), ClusterView((P0,))) == (None, "p0", "no_second_worker")
    assert choose("always_disaggregate", RoutingRequest(500, 32), ClusterView((D0, D1))) == ("d1", "d0", "prefill_role")


def test_least_loaded_never_disaggregates() -> None:
    busy = WorkerView("d0", 1, "decode", "n1", sequences=3)
    assert choose("least_loaded", RoutingRequest(2000, 32), ClusterView((P0, busy, D1))) == (None, "d1", "")


def test_cache_aware_keeps_short_and_mostly_cached_prompts_local() -> None:
    assert choose("cache_aware", RoutingRequest(64, 32)) == (None, "d0", "")
    assert choose("cache_aware", RoutingRequest(65, 32)) == ("p0", "d0", "")
    assert choose("cache_aware", RoutingRequest(1000, 32, cached_blocks={D1.key: 30})) == (None, "d1", "")


def test_cache_aware_goes_where_the_prefix_is_until_the_queue_costs_more() -> None:
    request = RoutingRequest(1000, 32, cached_blocks={P1.key: 20})
    assert choose("cache_aware", request)[0] == "p1"
    queued = WorkerView("p1", 1, "prefill", "n0", waiting_tokens=700)
    assert choose("cache_aware", request, ClusterView((P0, queued, D0)))[0] == "p0"
