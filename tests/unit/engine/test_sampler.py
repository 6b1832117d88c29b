import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampler import Choice, choose, top2_margin, uniform
from protocol.errors import IntegrityViolation
from protocol.request import Sampling

DRAWS = 20_000


def sample(logits: torch.Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> list[int | None]:
    return [chosen.token for chosen in choose(logits.clone(), [Choice(*pair) for pair in zip(samplings, positions, strict=True)])]


def exact_distribution(logits: list[float], sampling: Sampling) -> np.ndarray:
    """The definition, written plainly in float64."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if sampling.top_k:
        order = order[: sampling.top_k]
    weights = [math.exp((logits[token] - max(logits)) / sampling.temperature) for token in order]
    mass, kept = 0.0, 0
    while kept < len(order) and (kept == 0 or mass < sampling.top_p * sum(weights)):
        mass += weights[kept]
        kept += 1
    distribution = np.zeros(len(logits))
    for token, weight in zip(order[:kept], weights[:kept], strict=True):
        distribution[token] = weight / mass
    return distribution


def draws(logits: list[float], sampling: Sampling, count: int = DRAWS) -> np.ndarray:
    rows = torch.tensor([logits], dtype=torch.float32).expand(count, -1)
    return np.bincount(sample(rows, [sampling] * count, range(count)), minlength=len(logits))


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1, seed=1),
        Sampling(1, seed=2, temperature=0.5),
        Sampling(1, seed=3, temperature=2.5, top_k=5),
        Sampling(1, seed=4, top_p=0.8),
        Sampling(1, seed=5, temperature=1.5, top_k=6, top_p=0.7),
    ],
)
def test_frequencies_follow_the_exact_distribution(sampling: Sampling) -> None:
    logits = [0.0, 1.5, -1.0, 2.0, 0.5, -2.0, 1.5, -8.0, -15.0, -math.inf]
    expected = exact_distribution(logits, sampling) * DRAWS
    counted = draws(logits, sampling)
    assert not counted[expected == 0].any()
    likely = expected >= 5
    chi_square = ((counted[likely] - expected[likely]) ** 2 / expected[likely]).sum()
    degrees = likely.sum() - 1
    assert chi_square < degrees + 4 * math.sqrt(2 * degrees) + 4  # seeds are fixed: this never flickers; a wrong distribution gives hundreds


def test_deep_tokens_of_a_flat_distribution_are_drawn() -> None:
    """A head of the sorted vocabulary is looked at first; a draw beyond it must still be right."""
    logits = [10.0] + [0.0] * 40_000
    count = 2_000
    rows = torch.tensor([logits], dtype=torch.float32).expand(count, -1)
    tokens = np.array(sample(rows, [Sampling(1, seed=9)] * count, range(count)))
    expected = math.exp(10) / (math.exp(10) + 40_000)
    assert abs((tokens == 0).mean() - expected) < 4 * math.sqrt(expected * (1 - expected) / count)
    assert 18_000 < tokens[tokens > 0].mean() < 22_000


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.floats(-30, 30, width=32), min_size=11, max_size=11), min_size=1, max_size=6),
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.3, 1.0]), st.sampled_from([0, 1, 4]), st.sampled_from([0.3, 1.0]), st.integers(-5, 2**63)), min_size=6, max_size=6
    ),
    st.permutations(range(6)),
)
def test_companions_and_their_order_change_nothing(rows: list[list[float]], choices: list[tuple[float, int, float, int]], order: list[int]) -> None:
    samplings = [Sampling(1, temperature=t, top_k=k, top_p=p, seed=seed) for t, k, p, seed in choices][: len(rows)]
    positions = [7 * index for index in range(len(rows))]
    together = sample(torch.tensor(rows), samplings, positions)
    alone = [sample(torch.tensor([row]), [sampling], [position])[0] for row, sampling, position in zip(rows, samplings, positions, strict=True)]
    order = [index for index in order if index < len(rows)]
    shuffled = sample(torch.tensor([rows[i] for i in order]), [samplings[i] for i in order], [positions[i] for i in order])
    assert together == alone
    assert shuffled == [together[i] for i in order]


def test_random_numbers_depend_on_seed_and_position_alone() -> None:
    numbers = {(seed, position): uniform(seed, position) for seed in (0, 1, -1, 2**63) for position in range(50)}
    assert numbers == {key: uniform(*key) for key in reversed(numbers)}
    assert len(set(numbers.values())) == len(numbers)
    assert all(0 <= number < 1 for number in numbers.values())
    assert uniform(0, 0) == 0.011546754286331562  # another value would break resumed requests across versions


def test_greedy_takes_the_lowest_index_on_ties() -> None:
    logits = torch.zeros(3, 1000)
    logits[1, [400, 700]] = 2.0
    logits[2, 999] = 1.0
    assert sample(logits, [Sampling(1, temperature=0.0)] * 3, [0, 0, 0]) == [0, 400, 999]


@pytest.mark.parametrize(
    "sampling", [Sampling(1, top_k=1), Sampling(1, top_p=1e-9), Sampling(1, top_p=0.0), Sampling(1, temperature=1e-9), Sampling(1, temperature=1e-320)]
)
def test_narrow_settings_are_greedy(sampling: Sampling) -> None:
    logits = torch.randn(64, 500, generator=torch.Generator().manual_seed(0))
    assert sample(logits, [sampling] * 64, range(64)) == logits.argmax(-1).tolist()


def test_top_k_keeps_the_lowest_indices_of_a_tie() -> None:
    assert set(np.flatnonzero(draws([1.0] * 8, Sampling(1, top_k=3), 300))) == {0, 1, 2}


def test_top_k_beyond_the_vocabulary_is_off() -> None:
    logits = torch.randn(50, 20, generator=torch.Generator().manual_seed(1))
    whole, cut = [Sampling(1, seed=4)] * 50, [Sampling(1, seed=4, top_k=1000)] * 50
    assert sample(logits, whole, range(50)) == sample(logits, cut, range(50))


def test_impossible_tokens_are_never_drawn_and_hopeless_rows_are_named() -> None:
    only_seven = [-math.inf] * 7 + [-3.0] + [-math.inf] * 4
    assert draws(only_seven, Sampling(1, temperature=5.0), 200)[7] == 200
    for value in (-math.inf, math.nan, math.inf):
        with pytest.raises(IntegrityViolation):
            sample(torch.full((1, 5), value), [Sampling(1)], [0])


def test_top2_margin() -> None:
    assert top2_margin(torch.tensor([[1.0, 4.0, 2.5], [3.0, 3.0, 0.0]])).tolist() == [1.5, 0.0]
