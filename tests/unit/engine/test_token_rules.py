"""Bias, bans and penalties against their definitions written plainly; masks; the state rebuilt by replay."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampler import Choice, choose, score
from engine.token_rules import TokenRules, apply_masks, apply_rules
from protocol.request import GenerationRequest, Sampling

VOCABULARY = 12
EOS = (11,)
token_ids = st.integers(0, VOCABULARY - 1)
samplings = st.builds(
    Sampling,
    max_tokens=st.just(50),
    temperature=st.sampled_from([0.0, 0.7]),
    seed=st.integers(0, 5),
    presence_penalty=st.sampled_from([0.0, 0.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.25]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    logit_bias=st.dictionaries(token_ids, st.sampled_from([-100.0, -1.5, 2.0]), max_size=3),
    bad_words=st.lists(st.lists(token_ids, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
    min_tokens=st.integers(0, 6),
    stop_token_ids=st.lists(token_ids, max_size=2).map(tuple),
    logprobs=st.sampled_from([None, 0, 3]),
)
requests = st.builds(
    GenerationRequest,
    request_id=st.just("r"),
    prompt_tokens=st.lists(token_ids, min_size=1, max_size=6).map(tuple),
    sampling=samplings,
    deadline=st.just(0.0),
    output_tokens=st.lists(token_ids, max_size=8).map(tuple),
)
LOGITS = st.lists(st.floats(-8, 8, width=32), min_size=VOCABULARY, max_size=VOCABULARY)


def defined(logits: list[float], request: GenerationRequest) -> list[float]:
    """What vLLM's documents say, one token at a time."""
    s, output = request.sampling, list(request.output_tokens)
    out = []
    for token, logit in enumerate(logits):
        logit += s.logit_bias.get(token, 0.0)
        if token in (*request.prompt_tokens, *output):
            logit = logit / s.repetition_penalty if logit > 0 else logit * s.repetition_penalty
        logit -= s.frequency_penalty * output.count(token) + s.presence_penalty * (token in output)
        ends = token in (*EOS, *s.stop_token_ids) and len(output) < s.min_tokens
        bad = any(word[-1] == token and tuple(output)[len(output) - len(word) + 1 :] == word[:-1] for word in s.bad_words if len(word) <= len(output) + 1)
        out.append(-math.inf if ends or bad else logit)
    return out


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(requests, LOGITS), min_size=1, max_size=5))
def test_rules_are_their_definition_for_every_row_of_a_batch(rows: list[tuple[GenerationRequest, list[float]]]) -> None:
    logits = torch.tensor([values for _, values in rows])
    apply_rules(logits, [TokenRules(request, EOS) for request, _ in rows])
    for row, (request, values) in zip(logits.tolist(), rows, strict=True):
        assert row == pytest.approx(defined(values, request), rel=1e-5, abs=1e-5)


@settings(max_examples=100, deadline=None)
@given(requests, LOGITS)
def test_a_replayed_state_is_the_grown_one(request: GenerationRequest, values: list[float]) -> None:
    grown = TokenRules(dataclasses.replace(request, output_tokens=()), EOS)
    for token in request.output_tokens:
        grown.push(token)
    one, other = torch.tensor([values]), torch.tensor([values])
    apply_rules(one, [grown])
    apply_rules(other, [TokenRules(request, EOS)])
    assert torch.equal(one, other)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(requests, LOGITS), min_size=2, max_size=5))
def test_companions_change_neither_token_nor_logprobs(rows: list[tuple[GenerationRequest, list[float]]]) -> None:
    choices = [Choice(request.sampling, 7, 0, TokenRules(request, EOS)) for request, _ in rows]
    logits = torch.tensor([values for _, values in rows])
    alone = [choose(logits[index : index + 1].clone(), [choice])[0] for index, choice in enumerate(choices)]
    assert choose(logits.clone(), choices) == alone


def test_logprobs_are_the_models_own() -> None:
    values = [0.0, 3.0, 1.0, 2.0]
    sampling = Sampling(5, temperature=0.0, logit_bias={2: 50.0}, logprobs=2)
    request = GenerationRequest("r", (0,), sampling, 0.0)
    chosen = choose(torch.tensor([values]), [Choice(sampling, 0, 0, TokenRules(request))])[0]
    exact = torch.log_softmax(torch.tensor(values), -1).tolist()
    assert chosen.token == 2 and chosen.logprob is not None
    assert (chosen.logprob.token, chosen.logprob.rank, chosen.logprob.logprob) == (2, 3, exact[2])
    assert chosen.logprob.top == ((1, exact[1]), (3, exact[3]))
    assert choose(torch.tensor([values]), [Choice(Sampling(5, temperature=0.0), 0)])[0].logprob is None


def test_scores_of_following_tokens() -> None:
    logits = torch.randn(150, 30, generator=torch.Generator().manual_seed(0))
    tokens = [index % 30 for index in range(150)]
    scores = score(logits, tokens, 1)
    exact = torch.log_softmax(logits, -1)
    assert [one.token for one in scores] == tokens
    assert [one.logprob for one in scores] == [exact[row, token].item() for row, token in enumerate(tokens)]
    assert [one.top[0][0] for one in scores] == logits.argmax(-1).tolist()


def test_a_row_whose_tokens_are_all_banned_is_told_alone() -> None:
    banned = Sampling(5, temperature=0.0, bad_words=((0,), (1,), (2,)), logprobs=1)
    for temperature in (0.0, 1.0):
        banned = dataclasses.replace(banned, temperature=temperature)
        rules = TokenRules(GenerationRequest("r", (0,), banned, 0.0))
        plain = Choice(Sampling(5, temperature=0.0, logprobs=0), 0)
        chosen = choose(torch.tensor([[1.0, 2.0, 3.0]] * 2), [Choice(banned, 0, 0, rules), plain])
        assert chosen[0].token is None and chosen[1].token == 2 and chosen[1].logprob is not None


def test_masks_allow_exactly_their_bits() -> None:
    logits = torch.zeros(3, 40)
    allowed = {0, 31, 32, 39}
    words = [sum(1 << bit for bit in range(32) if 32 * word + bit in allowed) for word in range(2)]
    mask = torch.tensor([word - 2**32 if word >= 2**31 else word for word in words], dtype=torch.int32)
    apply_masks(logits, [None, mask, None])
    assert {token for token in range(40) if logits[1, token] == 0} == allowed
    assert not logits[[0, 2]].any()
    assert choose(torch.arange(80.0).view(2, 40), [Choice(Sampling(1, temperature=0.0), 0, mask=mask), Choice(Sampling(1), 0)])[0].token == 39


def test_min_p_cuts_relative_to_the_likeliest() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).expand(2000, -1)
    for min_p, kept in ((0.2, {0, 1, 2}), (0.5, {0, 1}), (1.0, {0}), (0.0, {0, 1, 2, 3})):
        choices = [Choice(Sampling(1, seed=1, min_p=min_p), position) for position in range(2000)]
        assert {chosen.token for chosen in choose(logits.clone(), choices)} == kept


def test_samples_of_one_request_draw_differently() -> None:
    logits = torch.zeros(8, 1000)
    assert len({chosen.token for chosen in choose(logits, [Choice(Sampling(1, seed=3), 5, sample) for sample in range(8)])}) > 5
