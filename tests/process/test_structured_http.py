"""Structured output through HTTP and a hand-off, on the real model: the first token comes from the prefill worker, refusals come back as a 400 that names the
client's field, and whoever is beside them does not notice."""

import json
from collections.abc import Iterator

import httpx
import jsonschema
import pytest
from serving import serving, timeline

from bench.schemas import RIGID
from cluster.local import Cluster

pytestmark = pytest.mark.timeout(300)
WORDS, SCHEMA = RIGID["tool_call"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with serving("local") as it:
        yield it


def chat(cluster: Cluster, **fields: object) -> httpx.Response:
    body = {"model": cluster.config.model_name, "messages": [{"role": "user", "content": WORDS}], "max_tokens": 200, "temperature": 0, "seed": 1} | fields
    return httpx.post(f"{cluster.url}/v1/chat/completions", json=body, timeout=120)


def test_answers_match_and_are_handed_off(cluster: Cluster) -> None:
    wrapped = {"type": "json_schema", "json_schema": {"name": "call", "schema": SCHEMA, "strict": True}}
    reply = chat(cluster, response_format=wrapped)
    assert reply.status_code == 200, reply.text
    choice = reply.json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    assert [side["phase"] for side in timeline(cluster, reply.headers["x-request-id"])["sides"]] == ["prefill", "decode"]
    picked = chat(cluster, guided_choice=["Oslo", "Bergen"]).json()["choices"][0]
    assert picked["message"]["content"] in ("Oslo", "Bergen") and picked["finish_reason"] == "stop"
    assert isinstance(json.loads(chat(cluster, response_format={"type": "json_object"}, stop=["}"], include_stop_str_in_output=True).text), dict)


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"guided_regex": "(a"}, "guided_regex", "parenthesis"),
        ({"structured_outputs": {"grammar": 'root ::= "a" root'}}, "structured_outputs.grammar", "could ever end"),
        ({"guided_regex": "(a?){40}" * 20 + "a" * 40}, "guided_regex", "too ambiguous"),
        ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json.uniqueItems", "not supported"),
    ],
)
def test_refusals_name_the_field(cluster: Cluster, fields: dict[str, object], field: str, words: str) -> None:
    reply = chat(cluster, **fields)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["code"]) == (400, field, "invalid_request")
    assert words in error["message"]
