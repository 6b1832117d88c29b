"""Logits -> next tokens. Owns greedy and sampled choice; knows nothing of sequences or stop conditions.

Invariant: a token is a pure function of (its row of logits, its Sampling, its position): the random number comes from a counter keyed by (seed, position),
never from a generator's state, so whoever goes on with a request draws the same, in whatever company.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from protocol.errors import IntegrityViolation
from protocol.request import Sampling

_LEAST_TEMPERATURE = 1e-30  # keeps the division inside float32; far below one step of any logit, so already greedy
_WEIGHT_FLOORS = (-7.0, -14.0, -np.inf)  # log of weight relative to the largest: how deep the sorted head goes, tried in this order

Floats = npt.NDArray[np.float32]


def sample(logits: torch.Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> list[int]:
    """One token per row of `logits` [R, V] float32; `positions`: what the request's random numbers are counted by, any integers from 0 on.

    Greedy takes the lowest index on ties. Sampled: softmax at the temperature, the `top_k` likeliest (lowest index first on ties), of those the fewest
    that hold `top_p` of their mass, then the inverse of their cumulated distribution, likeliest first.
    """
    tokens: list[int] = torch.argmax(logits, dim=-1).tolist()
    sampled = [row for row, sampling in enumerate(samplings) if sampling.temperature > 0]
    if sampled:
        rows = logits[sampled].to(device="cpu", dtype=torch.float32).numpy()
        for row, values in zip(sampled, rows, strict=True):
            tokens[row] = _sample_row(values, samplings[row], uniform(samplings[row].seed, positions[row]))
    return tokens


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) of one position of one request."""
    return float(np.random.Generator(np.random.Philox(key=seed % 2**64, counter=position)).random())


def top2_margin(logits: torch.Tensor) -> torch.Tensor:
    """[R, V] -> [R]: by how much the largest logit leads; a small lead is a tie that another order of summation may turn."""
    best = torch.topk(logits, 2, dim=-1).values
    return best[..., 0] - best[..., 1]


def _sample_row(values: Floats, sampling: Sampling, number: float) -> int:
    largest = values.max()
    if not np.isfinite(largest):
        raise IntegrityViolation("the logits of a row have no finite maximum")
    with np.errstate(over="ignore"):
        scaled: Floats = (values - largest) / np.float32(max(sampling.temperature, _LEAST_TEMPERATURE))
    total = float(np.exp(scaled).sum(dtype=np.float64))
    for floor in _WEIGHT_FLOORS:
        head = np.flatnonzero(scaled >= floor)
        head = head[np.argsort(-scaled[head], kind="stable")]
        cumulated = np.cumsum(np.exp(scaled[head]), dtype=np.float64)
        chosen = _choose(cumulated, total, sampling, number, is_whole=floor == -np.inf)
        if chosen is not None:
            return int(head[chosen])
    raise IntegrityViolation("a whole distribution did not hold its own mass")


def _choose(cumulated: npt.NDArray[np.float64], total: float, sampling: Sampling, number: float, is_whole: bool) -> int | None:
    """Index into the sorted head whose running sums are `cumulated`; None where the choice may lie beyond the head. `total`: mass of all tokens."""
    if sampling.top_k > 0:
        if sampling.top_k > len(cumulated) and not is_whole:
            return None
        cumulated = cumulated[: sampling.top_k]
        total = float(cumulated[-1])
    elif is_whole:
        total = float(cumulated[-1])
    if sampling.top_p < 1:
        if cumulated[-1] < sampling.top_p * total and not is_whole:
            return None
        kept = int(np.searchsorted(cumulated, sampling.top_p * total, side="left")) + 1
        cumulated = cumulated[:kept]
        total = float(cumulated[-1])
    chosen = int(np.searchsorted(cumulated, number * total, side="right"))
    if chosen == len(cumulated) and not is_whole and sampling.top_k <= 0 and sampling.top_p >= 1:
        return None
    last_with_mass = int(np.searchsorted(cumulated, cumulated[-1], side="left"))
    return min(chosen, last_with_mass)
