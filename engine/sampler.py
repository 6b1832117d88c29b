"""Logits -> next tokens and their logprobs. Owns greedy and sampled choice; knows nothing of sequences or stop conditions.

Invariant: a token is a pure function of (its row of logits, its Choice): the random number comes from a counter keyed by (seed, sample, position),
never from a generator's state, so whoever goes on with a request draws the same, in whatever company.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.token_rules import TokenRules, apply_masks, apply_rules
from protocol.errors import IntegrityViolation
from protocol.logprobs import TokenLogprob
from protocol.request import Sampling

_LEAST_TEMPERATURE = 1e-30  # keeps the division inside float32; far below one step of any logit, so already greedy
_WEIGHT_FLOORS = (-7.0, -14.0, -np.inf)  # log of weight relative to the largest: how deep the sorted head goes, tried in this order
_SCORED_AT_ONCE = 64  # rows of log-softmax in memory at a time
_LEAST_TOP = 20  # one width for all rows, so that the order of equal logprobs does not depend on what companions ask for

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Choice:
    """What one row of logits is chosen by. `position`: what the request's random numbers are counted by, from 0 on; `sample`: which of its n answers.
    `mask`: tokens that may come at all, int32 [ceil(V / 32)], bit i of word w for token 32 w + i; the hook of structured output."""

    sampling: Sampling
    position: int
    sample: int = 0
    rules: TokenRules | None = None
    mask: torch.Tensor | None = None

    @property
    def is_plain(self) -> bool:
        return self.mask is None and (self.rules is None or self.rules.is_plain)


@dataclass(frozen=True, slots=True)
class Chosen:
    """`token` None: the request's own rules forbid every token."""

    token: int | None
    logprob: TokenLogprob | None = None


@torch.inference_mode()
def choose(logits: torch.Tensor, choices: Sequence[Choice]) -> list[Chosen]:
    """The next token of each row of `logits` [R, V] float32, which are edited in place, with its logprob where the row's sampling asks.

    Rules and masks first. Greedy takes the lowest index on ties. Sampled: softmax at the temperature, tokens of at least `min_p` times the likeliest's
    probability, of those the `top_k` likeliest (lowest index first on ties), of those the fewest that hold `top_p` of their mass, then the inverse of
    their cumulated distribution, likeliest first. Logprobs are the model's own: of the logits as they came in.
    """
    asking = [row for row, choice in enumerate(choices) if choice.sampling.logprobs is not None]
    raw = torch.log_softmax(logits[asking], dim=-1) if asking else None
    hopeless = _edit(logits, choices)
    tokens: list[int] = torch.argmax(logits, dim=-1).tolist()
    sampled = [row for row, choice in enumerate(choices) if choice.sampling.temperature > 0 and row not in hopeless]
    if sampled:
        rows = logits[sampled].to(device="cpu", dtype=torch.float32).numpy()
        for row, values in zip(sampled, rows, strict=True):
            choice = choices[row]
            tokens[row] = _sample_row(values, choice.sampling, uniform(choice.sampling.seed, choice.position, choice.sample))
    scores: dict[int, TokenLogprob] = {}
    if raw is not None:
        scores = dict(zip(asking, _described(raw, [tokens[row] for row in asking], [choices[row].sampling.logprobs or 0 for row in asking]), strict=True))
    return [Chosen(None) if row in hopeless else Chosen(token, scores.get(row)) for row, token in enumerate(tokens)]


@torch.inference_mode()
def score(logits: torch.Tensor, tokens: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """How likely the rows of `logits` [R, V] found the tokens that follow them."""
    scores: list[TokenLogprob] = []
    for start in range(0, len(tokens), _SCORED_AT_ONCE):
        some = tokens[start : start + _SCORED_AT_ONCE]
        scores += _described(torch.log_softmax(logits[start : start + len(some)], dim=-1), some, [num_top] * len(some))
    return scores


def _edit(logits: torch.Tensor, choices: Sequence[Choice]) -> set[int]:
    """Apply masks and rules in place; the rows that have no possible token left."""
    edited = [row for row, choice in enumerate(choices) if not choice.is_plain]
    if not edited:
        return set()
    apply_masks(logits, [choice.mask for choice in choices])
    apply_rules(logits, [choice.rules for choice in choices])
    largest = logits[edited].amax(dim=-1).tolist()
    return {row for row, value in zip(edited, largest, strict=True) if value == -np.inf}


def _described(logprobs: torch.Tensor, tokens: Sequence[int], tops: Sequence[int]) -> list[TokenLogprob]:
    own = logprobs.gather(1, torch.tensor(tokens, device=logprobs.device)[:, None])
    ranks = ((logprobs > own).sum(dim=-1) + 1).tolist()
    best = torch.topk(logprobs, min(max(*tops, _LEAST_TOP) if any(tops) else 0, logprobs.shape[1]), dim=-1)
    rows = zip(tokens, own[:, 0].tolist(), ranks, best.indices.tolist(), best.values.tolist(), tops, strict=True)
    return [TokenLogprob(token, logprob, rank, tuple(zip(ids[:top], values[:top], strict=True))) for token, logprob, rank, ids, values, top in rows]


def uniform(seed: int, position: int, sample: int = 0) -> float:
    """The random number in [0, 1) of one position of one of a request's answers."""
    return float(np.random.Generator(np.random.Philox(key=seed % 2**64 + (sample << 64), counter=position)).random())


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
    needs_total = sampling.top_k <= 0 and sampling.min_p <= 0  # else the head that is looked at holds all the mass that counts
    total = float(np.exp(scaled).sum(dtype=np.float64)) if needs_total else 0.0
    floors = (math.log(sampling.min_p),) if sampling.min_p > 0 else _WEIGHT_FLOORS
    for floor in floors:
        head = np.flatnonzero(scaled >= floor)
        head = head[np.argsort(-scaled[head], kind="stable")]
        cumulated = np.cumsum(np.exp(scaled[head]), dtype=np.float64)
        chosen = _choose(cumulated, total, sampling, number, is_whole=floor == floors[-1])
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
