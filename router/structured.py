"""What a body says about the form of its answer -> Grammar. Owns the fields and their sizes; what a schema may say is router.schema's, whether a grammar is
right and affordable the workers'.

Invariant: at most one grammar, from one field, and nothing in it that would be dropped.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from protocol.errors import InvalidRequest
from protocol.request import Grammar
from router.fields import SharedFields
from router.schema import check_schema

MAX_SCHEMA_BYTES = 64 * 1024
MAX_REGEX_CHARACTERS = 4096
MAX_EBNF_BYTES = 32 * 1024
MAX_CHOICES = 1000
MAX_CHOICE_BYTES = 32 * 1024
_HARMLESS_FORMAT = {"name", "description", "strict"}
_HARMLESS_OPTIONS = {"disable_any_whitespace", "disable_fallback"}

Reader = Callable[[Any, str], Grammar]


def grammar_of(shared: SharedFields) -> Grammar | None:
    """Raises InvalidRequest, which names the field."""
    found = [
        *_response_format(shared.response_format),
        *_structured_outputs(shared.structured_outputs),
        *(_READERS[kind](value, name) for name, kind, value in _guided(shared) if value is not None),
    ]
    if len(found) > 1:
        raise InvalidRequest(f"{found[1].field}: {found[0].field} says already what the answer must be", field=found[1].field)
    return found[0] if found else None


def _guided(shared: SharedFields) -> list[tuple[str, str, Any]]:
    return [
        ("guided_json", "json", shared.guided_json),
        ("guided_regex", "regex", shared.guided_regex),
        ("guided_grammar", "grammar", shared.guided_grammar),
        ("guided_choice", "choice", shared.guided_choice),
    ]


def _response_format(body: Mapping[str, Any] | None) -> list[Grammar]:
    if body is None:
        return []
    kind = body.get("type")
    known = {"text": {"type"}, "json_object": {"type"}, "json_schema": {"type", "json_schema"}}
    if not isinstance(kind, str) or kind not in known:
        raise _refused("response_format.type", f"{kind!r} is not supported; known: {', '.join(known)}")
    _only(body, known[kind], "response_format")
    if kind == "text":
        return []
    if kind == "json_object":
        return [Grammar("json_object", "", "response_format")]
    wrapper = body.get("json_schema")
    if not isinstance(wrapper, dict) or not isinstance(wrapper.get("schema"), dict):
        raise _refused("response_format.json_schema.schema", "required, an object")
    _only(wrapper, {"schema", *_HARMLESS_FORMAT}, "response_format.json_schema")
    return [_schema(wrapper["schema"], "response_format.json_schema.schema")]


def _structured_outputs(body: Mapping[str, Any] | None) -> list[Grammar]:
    """vLLM's field."""
    if body is None:
        return []
    _only({name: value for name, value in body.items() if value is not None}, {*_READERS, *_HARMLESS_OPTIONS}, "structured_outputs")
    asked = [(name, body[name]) for name in _READERS if body.get(name) is not None]
    if len(asked) != 1:
        raise _refused("structured_outputs", f"exactly one of {', '.join(_READERS)}")
    name, value = asked[0]
    return [_READERS[name](value, f"structured_outputs.{name}")]


def _only(body: Mapping[str, Any], known: set[str], field: str) -> None:
    for name in body:
        if name not in known:
            raise _refused(f"{field}.{name}", "not supported")


def _schema(value: Any, field: str) -> Grammar:
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError) as error:
            raise _refused(field, f"not valid JSON: {error}") from None
    check_schema(value, field)
    text = json.dumps(value, ensure_ascii=False)
    if len(text.encode(errors="replace")) > MAX_SCHEMA_BYTES:
        raise _refused(field, f"more than {MAX_SCHEMA_BYTES} bytes")
    return Grammar("json_schema", text, field)


def _text(kind: str, most: int) -> Reader:
    def read(value: Any, field: str) -> Grammar:
        if not isinstance(value, str) or not value:
            raise _refused(field, "must be a string that is not empty")
        if len(value.encode(errors="replace")) > most:
            raise _refused(field, f"at most {most} bytes")
        return Grammar(kind, value, field)

    return read


def _choice(value: Any, field: str) -> Grammar:
    if not isinstance(value, list) or not value or not all(isinstance(choice, str) and choice for choice in value):
        raise _refused(field, "must be a list of strings, none of them empty")
    if len(value) > MAX_CHOICES or sum(len(choice.encode(errors="replace")) for choice in value) > MAX_CHOICE_BYTES:
        raise _refused(field, f"at most {MAX_CHOICES} strings of {MAX_CHOICE_BYTES} bytes together")
    return Grammar("choice", msgspec.json.encode(list(dict.fromkeys(value))).decode(), field)


def _json_object(value: Any, field: str) -> Grammar:
    if value is not True:
        raise _refused(field, "must be true")
    return Grammar("json_object", "", field)


def _refused(field: str, words: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: {words}", field=field)


_READERS: dict[str, Reader] = {
    "json": _schema,
    "regex": _text("regex", MAX_REGEX_CHARACTERS),
    "grammar": _text("ebnf", MAX_EBNF_BYTES),
    "choice": _choice,
    "json_object": _json_object,
}
