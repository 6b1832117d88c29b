"""Which JSON schemas we take: those whose every keyword is kept to the letter. Owns the list of keywords, the combinations that the grammar compiler would
weaken, and the bounds; knows nothing of the compiler itself.

Invariant: whatever matches the grammar of a schema that passes here is valid against the schema. `format` is checked by its shape alone: 2026-02-31 is a date.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from protocol.errors import InvalidRequest

MAX_DEPTH = 32
MAX_SCHEMAS = 2000
MAX_PROPERTIES = 200  # of one object
MAX_VALUES = 1000  # of all enums together
MAX_COUNT = 100_000  # as a bound of lengths and counts

ANNOTATIONS = {
    "title",
    "description",
    "default",
    "examples",
    "example",
    "deprecated",
    "readOnly",
    "writeOnly",
    "discriminator",
    "$schema",
    "$id",
    "$comment",
    "$defs",
    "definitions",
}
# Keywords that say something only about values of a type.
OF_TYPE: dict[str, set[str]] = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "array": {"items", "prefixItems", "unevaluatedItems", "minItems", "maxItems"},
    "object": {
        "properties",
        "required",
        "additionalProperties",
        "unevaluatedProperties",
        "patternProperties",
        "propertyNames",
        "minProperties",
        "maxProperties",
    },
    "boolean": set(),
    "null": set(),
}
# Alone in their schema, but for annotations.
ALONE = {"$ref", "anyOf", "oneOf", "allOf", "enum", "const"}
# Pairs of which the second would be ignored.
CLASHES = [
    ("pattern", {"minLength", "maxLength", "format"}),
    ("format", {"minLength", "maxLength"}),
    ("patternProperties", {"properties", "propertyNames"}),
    ("propertyNames", {"properties"}),
]
FORMATS = {
    "date",
    "time",
    "date-time",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uuid",
    "uri",
    "uri-reference",
    "uri-template",
    "json-pointer",
    "relative-json-pointer",
}
_COUNTS = {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"}
_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_MAY_BE_FALSE = {"additionalProperties", "items", "unevaluatedItems", "unevaluatedProperties"}
_ESCAPED_IN_JSON = re.compile(r'["\x00-\x1f]|\\[\\"ntrfv0xucb]')  # what JSON writes with a backslash, which the compiler's patterns do not
_IMPLIED = {"properties": "object", "items": "array", "prefixItems": "array"}  # the types that schemas without one mean by these


def check_schema(schema: Any, field: str) -> None:
    """Raises InvalidRequest with the place within the schema."""
    if not isinstance(schema, dict):
        raise _refused(field, "must be an object")
    seen = values = 0
    waiting = [(schema, field, 1, "")]
    while waiting:
        one, path, depth, keyword = waiting.pop()
        seen += 1
        if seen > MAX_SCHEMAS:
            raise _refused(field, f"more than {MAX_SCHEMAS} schemas within it")
        if depth > MAX_DEPTH:
            raise _refused(path, f"nested deeper than {MAX_DEPTH}")
        if isinstance(one, bool) and (one or keyword in _MAY_BE_FALSE):
            continue
        if not isinstance(one, dict):
            raise _refused(path, "must be a schema")
        _check_one(one, path, schema)
        values += len(one.get("enum", ()))
        if values > MAX_VALUES:
            raise _refused(path, f"more than {MAX_VALUES} enum values in all")
        waiting += ((inner, where, depth + 1, name) for inner, where, name in _within(one, path))


def _within(schema: Mapping[str, Any], path: str) -> Iterator[tuple[Any, str, str]]:
    """The schemas in a schema, where they are, and under which keyword."""
    for name in ("properties", "patternProperties", "$defs", "definitions"):
        inner = schema.get(name, {})
        if not isinstance(inner, dict):
            raise _refused(f"{path}.{name}", "must be an object")
        yield from ((one, f"{path}.{name}.{key}", name) for key, one in inner.items())
    for name in ("anyOf", "oneOf", "allOf", "prefixItems"):
        inner = schema.get(name, [])
        if not isinstance(inner, list) or (name in schema and not inner):
            raise _refused(f"{path}.{name}", "must be a list of schemas")
        yield from ((one, f"{path}.{name}[{index}]", name) for index, one in enumerate(inner))
    for name in ("items", "additionalProperties", "propertyNames", "unevaluatedItems", "unevaluatedProperties"):
        if name in schema:
            yield schema[name], f"{path}.{name}", name


def _check_one(schema: dict[str, Any], path: str, root: Mapping[str, Any]) -> None:
    said = {name for name in schema if name not in ANNOTATIONS and not name.startswith("x-")}
    types = _types(schema, path)
    known = {"type", *ALONE}.union(*OF_TYPE.values())
    if unknown := sorted(said - known):
        raise _refused(f"{path}.{unknown[0]}", "this keyword is not supported")
    for name in sorted(said & ALONE):
        others = said - {name, "type"} if name in ("enum", "const") else said - {name}
        if others:
            raise _refused(f"{path}.{min(others)}", f"not supported beside {name}")
        _check_alone(name, schema, path, root)
    allowed = set().union(*(OF_TYPE[one] for one in types))
    if foreign := sorted(said - allowed - {"type", *ALONE}):
        raise _refused(f"{path}.{foreign[0]}", "says nothing about the schema's type; give the type that it is about")
    for name, clashing in CLASHES:
        if name in said and (second := sorted(said & clashing)):
            raise _refused(f"{path}.{second[0]}", f"not supported beside {name}")
    _check_values(schema, path, said)
    if "object" in types:
        _check_object(schema, path)


def _types(schema: Mapping[str, Any], path: str) -> set[str]:
    given = schema.get("type", [_IMPLIED[name] for name in _IMPLIED if name in schema])
    types = given if isinstance(given, list) else [given]
    for one in types:
        if not isinstance(one, str) or one not in OF_TYPE:
            raise _refused(f"{path}.type", f"{one!r} is unknown; known: {', '.join(OF_TYPE)}")
    return set(types)


def _check_alone(name: str, schema: Mapping[str, Any], path: str, root: Mapping[str, Any]) -> None:
    value = schema[name]
    if name == "$ref":
        _resolve(value, f"{path}.$ref", root)
    elif name == "enum":
        if not isinstance(value, list) or not value:
            raise _refused(f"{path}.enum", "must be a list of values")
    elif name == "allOf" and isinstance(value, list) and len(value) > 1:
        raise _refused(f"{path}.allOf", "more than one schema is not supported")
    elif name == "oneOf" and isinstance(value, list) and not _are_disjoint(value, root):
        raise _refused(f"{path}.oneOf", "the schemas may overlap; use anyOf, or give each its own type or a required property with its own const")
    if name in ("enum", "const") and "type" in schema:
        types = _types(schema, path)
        for one in value if name == "enum" else [value]:
            if not any(_is_of(one, kind) for kind in types):
                raise _refused(f"{path}.{name}", f"{str(one)[:40]!r} is not of the schema's type")


def _resolve(reference: Any, path: str, root: Mapping[str, Any]) -> Any:
    """References within the same schema alone."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise _refused(path, "only references within the schema, as #/$defs/name")
    target: Any = root
    for part in reference.split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(target, dict) or part not in target:
            raise _refused(path, f"{reference[:80]!r} leads nowhere")
        target = target[part]
    return target


def _are_disjoint(schemas: list[Any], root: Mapping[str, Any]) -> bool:
    """By their types, or by a property that all require and that has values of its own in each."""
    targets = [_resolve(one["$ref"], "$ref", root) if isinstance(one, dict) and "$ref" in one else one for one in schemas]
    if not all(isinstance(one, dict) for one in targets):
        return False
    types = [one.get("type") for one in targets]
    if all(isinstance(one, str) for one in types) and len(set(types)) == len(types) and not {"number", "integer"} <= set(types):
        return True
    if any(one != "object" for one in types):
        return False
    shared = set.intersection(*({*one.get("required", ())} & {*one.get("properties", {})} for one in targets))
    return any(_differ([one["properties"][name] for one in targets]) for name in shared)


def _differ(schemas: list[Any]) -> bool:
    values = [[one["const"]] if "const" in one else one.get("enum", []) for one in schemas if isinstance(one, dict)]
    flat = [repr(value) for some in values for value in some]
    return len(values) == len(schemas) and all(values) and len(set(flat)) == len(flat)


def _check_values(schema: Mapping[str, Any], path: str, said: set[str]) -> None:
    for name in sorted(said & _COUNTS):
        if not isinstance(schema[name], int) or isinstance(schema[name], bool) or not 0 <= schema[name] <= MAX_COUNT:
            raise _refused(f"{path}.{name}", f"must be a whole number, at most {MAX_COUNT}")
    for name in sorted(said & _BOUNDS):
        if not isinstance(schema[name], int | float) or isinstance(schema[name], bool) or not -1e15 <= schema[name] <= 1e15:
            raise _refused(f"{path}.{name}", "must be a number between -1e15 and 1e15")
    if "multipleOf" in said and (not isinstance(schema["multipleOf"], int) or not 1 <= schema["multipleOf"] <= 10_000 or schema.get("type") != "integer"):
        raise _refused(f"{path}.multipleOf", "must be a whole number, at most 10000, and the type integer")
    for pattern in [*([schema["pattern"]] if "pattern" in said else []), *schema.get("patternProperties", {})]:
        if not isinstance(pattern, str) or _ESCAPED_IN_JSON.search(pattern):
            raise _refused(f"{path}.pattern", "must be a string, and not name quotes, backslashes or control characters")
    if "format" in said and schema["format"] not in FORMATS:
        raise _refused(f"{path}.format", f"{str(schema['format'])[:40]!r} is not supported; known: {', '.join(sorted(FORMATS))}")


def _check_object(schema: Mapping[str, Any], path: str) -> None:
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or len(properties) > MAX_PROPERTIES:
        raise _refused(f"{path}.properties", f"must be an object with at most {MAX_PROPERTIES} properties")
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise _refused(f"{path}.required", "must be a list of names")
    for name in required:
        if name not in properties:
            raise _refused(f"{path}.required", f"{name[:40]!r} is not among the properties")


def _is_of(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    of_kind: dict[str, tuple[type, ...]] = {
        "string": (str,),
        "number": (int, float),
        "integer": (int,),
        "array": (list,),
        "object": (dict,),
        "null": (type(None),),
    }
    return isinstance(value, of_kind.get(kind, ())) or (kind == "integer" and isinstance(value, float) and value.is_integer())


def _refused(path: str, words: str) -> InvalidRequest:
    return InvalidRequest(f"{path}: {words}", field=path)
