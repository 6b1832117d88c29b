"""The wire form of a request: nothing that it says may be lost on the way."""

from dataclasses import fields

from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import headrace_pb2 as pb
from protocol.logprobs import TokenLogprob
from protocol.request import GenerationRequest, Grammar, Sampling

ids = st.integers(0, 2**31 - 1)
samplings = st.builds(
    Sampling,
    max_tokens=ids,
    temperature=st.floats(0, 2),
    top_p=st.floats(0, 1),
    top_k=ids,
    seed=st.integers(0, 2**64 - 1),
    stop=st.lists(st.text(min_size=1), max_size=3).map(tuple),
    stop_token_ids=st.lists(ids, max_size=3).map(tuple),
    ignore_eos=st.booleans(),
    include_stop=st.booleans(),
    min_p=st.floats(0, 1),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.01, 5),
    logit_bias=st.dictionaries(ids, st.floats(-100, 100), max_size=3),
    bad_words=st.lists(st.lists(ids, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
    min_tokens=ids,
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
    grammar=st.none() | st.builds(Grammar, st.sampled_from(["json_schema", "choice"]), st.text()),
)
requests = st.builds(
    GenerationRequest,
    request_id=st.text(min_size=1),
    prompt_tokens=st.lists(ids, max_size=4).map(tuple),
    sampling=samplings,
    deadline=st.floats(0, 2e9),
    attempt=ids,
    output_tokens=st.lists(ids, max_size=4).map(tuple),
    priority=st.integers(-(2**31), 2**31 - 1),
    tenant=st.text(),
    sample=ids,
    adapter=st.text(),
)


@settings(max_examples=100, deadline=None)
@given(requests)
def test_a_request_survives_the_wire(request: GenerationRequest) -> None:
    assert GenerationRequest.from_message(pb.Request.FromString(request.to_message().SerializeToString())) == request


def test_every_field_is_on_the_wire() -> None:
    assert {field.name for field in fields(GenerationRequest)} == set(pb.Request.DESCRIPTOR.fields_by_name)
    assert {field.name for field in fields(Sampling)} == set(pb.Sampling.DESCRIPTOR.fields_by_name)


def test_a_message_of_an_older_peer_asks_for_nothing_new() -> None:
    assert Sampling.from_message(pb.Sampling(max_tokens=3)) == Sampling(3, temperature=0.0, top_p=0.0)


def test_samples_differ_in_name_and_number_alone() -> None:
    request = GenerationRequest("r", (1,), Sampling(3), 0.0)
    assert request.samples(1) == (request,)
    assert [(it.request_id, it.sample, it.sampling) for it in request.samples(2)] == [("r.0", 0, request.sampling), ("r.1", 1, request.sampling)]


def test_a_logprob_survives_the_wire() -> None:
    it = TokenLogprob(7, -1.5, 3, ((9, -0.25), (8, -0.5)))
    assert TokenLogprob.from_message(it.to_message()) == it
