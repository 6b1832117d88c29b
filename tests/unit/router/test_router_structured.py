"""What bodies say about the form of their answers: taken, or refused by the place that is wrong. Schemas that pass are kept to the letter."""

import json
from typing import Any

import pytest

from bench.schemas import RIGID, SCHEMAS
from protocol.errors import InvalidRequest
from protocol.request import Grammar, Sampling
from router.openai import parse
from router.schema import check_schema

WHOLE: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": 9}


def grammar_of(**fields: Any) -> Grammar | None:
    return parse(json.dumps({"model": "m", "prompt": "x", **fields}).encode(), "completion").sampling.grammar


def refused(**fields: Any) -> str | None:
    with pytest.raises(InvalidRequest) as caught:
        grammar_of(**fields)
    assert caught.value.field is not None and caught.value.message.startswith(caught.value.field)
    return caught.value.field


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def test_every_field_gives_its_grammar() -> None:
    schema = {"type": "object", "properties": {"é": WHOLE}}
    text = json.dumps(schema, ensure_ascii=False)
    wrapped = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}
    assert grammar_of(response_format={"type": "text"}) is None
    assert grammar_of(response_format=None, guided_json=None) is None
    assert grammar_of(response_format={"type": "json_object"}) == Grammar("json_object", "")
    for fields in ({"response_format": wrapped}, {"guided_json": schema}, {"guided_json": text}, {"structured_outputs": {"json": schema, "regex": None}}):
        assert grammar_of(**fields) == Grammar("json_schema", text)
    assert grammar_of(guided_regex="a+") == grammar_of(structured_outputs={"regex": "a+"}) == Grammar("regex", "a+")
    assert grammar_of(guided_grammar="root ::= x") == Grammar("ebnf", "root ::= x")
    assert grammar_of(guided_choice=["yes", "no", "yes"]) == Grammar("choice", '["yes","no"]')
    chat = parse(json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object"}}).encode(), "chat")
    assert chat.sampling.grammar == Grammar("json_object", "") and chat.sampling.grammar.field == "response_format"


def test_a_grammar_survives_the_wire_with_its_field() -> None:
    grammar = grammar_of(guided_regex="é+")
    assert grammar is not None and grammar.field == "guided_regex"
    again = Sampling.from_message(Sampling(max_tokens=1, grammar=grammar).to_message()).grammar
    assert again == grammar and again is not None and again.field == "guided_regex"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "extra": 1}}}, "response_format.json_schema.extra"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[" * 5000}, "guided_json"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": "a" * 5000}, "guided_regex"),
        ({"guided_grammar": "x" * 40000}, "guided_grammar"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"guided_choice": [str(number) for number in range(1001)]}, "guided_choice"),
        ({"guided_json": {"enum": [str(number) for number in range(1001)]}}, "guided_json"),
        ({"guided_json": {"enum": ["x" * 70_000]}}, "guided_json"),
        ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend"),
    ],
)
def test_bad_fields_are_named(fields: dict[str, Any], field: str) -> None:
    assert refused(**fields) == field


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"not": {}}, "not"),
        ({"type": "strin"}, "type"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "items": [WHOLE]}, "items"),
        ({"type": "object", "properties": {"a": {"type": "string", "maxLenght": 3}}}, "properties.a.maxLenght"),
        ({"type": "object", "properties": {"a": WHOLE}, "required": ["b"]}, "required"),
        ({"type": "object", "properties": {"a": False}}, "properties.a"),
        ({"type": "object", "properties": {str(number): WHOLE for number in range(201)}}, "properties"),
        ({"type": "object", "properties": {"a": WHOLE}, "anyOf": [WHOLE]}, "properties"),
        ({"minimum": 3}, "minimum"),
        ({"type": "number", "multipleOf": 0.1}, "multipleOf"),
        ({"type": "integer", "enum": [1, "a"]}, "enum"),
        ({"enum": []}, "enum"),
        ({"type": "string", "pattern": "a", "maxLength": 3}, "maxLength"),
        ({"type": "string", "pattern": 'say "a"'}, "pattern"),
        ({"type": "string", "pattern": "a\\\\b"}, "pattern"),
        ({"type": "string", "pattern": "a\\n"}, "pattern"),
        ({"type": "string", "format": "zip"}, "format"),
        ({"type": "string", "maxLength": 10**9}, "maxLength"),
        ({"$ref": "http://elsewhere/x"}, "$ref"),
        ({"$ref": "#/$defs/missing"}, "$ref"),
        ({"allOf": [WHOLE, WHOLE]}, "allOf"),
        ({"oneOf": [WHOLE, {"type": "integer"}]}, "oneOf"),
        ({"anyOf": []}, "anyOf"),
        (nested(40), ".".join(["items"] * 32)),
    ],
)
def test_schemas_that_could_not_be_kept_are_refused_by_place(schema: dict[str, Any], place: str) -> None:
    assert refused(guided_json=schema) == f"guided_json.{place}"


def test_schemas_that_are_kept_pass() -> None:
    circle, square = ({"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]} for kind in ("circle", "square"))
    for schema in (
        *(schema for _, schema in [*SCHEMAS.values(), *RIGID.values()]),
        {"oneOf": [circle, {"$ref": "#/$defs/square"}], "$defs": {"square": square}, "discriminator": {"propertyName": "kind"}},
        {"oneOf": [{"type": "string"}, {"type": "null"}]},
        {"type": "object", "properties": {"self": {"$ref": "#"}}, "x-note": 1, "title": "t", "description": "d", "default": {}},
        nested(30),
    ):
        check_schema(schema, "schema")


def test_a_schema_of_many_parts_is_refused() -> None:
    schema = {"type": "object", "properties": {str(number): {"anyOf": [WHOLE] * 20} for number in range(150)}}
    assert refused(guided_json=schema) == "guided_json"
