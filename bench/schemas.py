"""Twenty-five JSON schemas and what to ask for: nested, with references, enums, unicode, numbers, recursion. Data for bench.structured and for the tests."""

from typing import Any

Schema = dict[str, Any]


def _object(**properties: Schema) -> Schema:
    """All required, nothing else."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _text(most: int) -> Schema:
    return {"type": "string", "minLength": 1, "maxLength": most}


def _list(items: Schema, most: int, least: int = 1) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def _whole(least: int, most: int) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most}


_YES_NO: Schema = {"type": "boolean"}
_POINT = _object(x=_whole(-99, 99), y=_whole(-99, 99))
_ADDRESS = _object(street=_text(24), city=_text(16), postcode={"type": "string", "pattern": "^[0-9]{5}$"})

# name -> (what to ask the model, schema)
SCHEMAS: dict[str, tuple[str, Schema]] = {
    "person": ("Describe a person.", _object(name=_text(20), age=_whole(0, 120), email=_text(30))),
    "address": ("Give an address in Paris.", _ADDRESS),
    "nested": ("Describe a company.", _object(company=_object(name=_text(20), seat=_ADDRESS), founded=_whole(1800, 2026))),
    "deep": ("Describe a world.", _object(world=_object(continent=_object(country=_object(region=_object(town=_text(16))))))),
    "list_of_text": ("List three fruits.", _object(fruits=_list(_text(12), 3, 3))),
    "list_of_objects": ("List two books.", _object(books=_list(_object(title=_text(30), year=_whole(1450, 2026)), 2, 2))),
    "matrix": ("Write a 2 by 2 matrix.", _object(rows=_list(_list(_whole(-9, 9), 2, 2), 2, 2))),
    "tuple": ("Give a latitude and a place.", {"type": "array", "prefixItems": [_whole(-90, 90), _text(12)], "items": False, "minItems": 2}),
    "enum": ("What colour is the sky?", _object(colour={"enum": ["red", "green", "blue"]}, sure=_YES_NO)),
    "mixed_enum": ("Pick something.", _object(pick={"enum": [1, 2.5, None, True, "five"]})),
    "const": ("Confirm.", _object(kind={"const": "confirmation"}, version={"const": 3}, ok=_YES_NO)),
    "unicode_keys": ("Nenne eine Stadt.", _object(größe=_whole(1, 9999), naïve=_YES_NO, 名前=_text(12))),
    "unicode_enum": ("今日の天気は?", _object(天気={"enum": ["晴れ", "曇り", "雨", "☃️", "🌪"]})),
    "escapes": ("Say a path.", _object(path={"enum": ["C:\\temp", 'say "hi"', "tab\there", "line\nbreak"]})),
    "integers": ("Three numbers, please.", _object(small=_whole(-5, 5), big=_whole(1000000, 9999999), any=_whole(-32768, 32767))),
    "numbers": ("Weigh a cat.", _object(weight={"type": "number", "minimum": 0, "maximum": 20}, unit={"enum": ["kg", "lb"]})),
    "null_or": ("Who is the heir?", _object(heir={"anyOf": [_text(16), {"type": "null"}]}, claims={"type": ["integer", "null"], "minimum": 0, "maximum": 9})),
    "union": (
        "Draw a shape.",
        {"anyOf": [_object(kind={"const": "circle"}, radius=_whole(1, 99)), _object(kind={"const": "square"}, side=_whole(1, 99))]},
    ),
    "optional": (
        "Describe a car.",
        {
            "type": "object",
            "properties": {"make": _text(12), "model": _text(12), "year": _whole(1886, 2026)},
            "required": ["make"],
            "additionalProperties": False,
        },
    ),
    "refs": ("Draw a line.", {"$defs": {"point": _POINT}, **_object(start={"$ref": "#/$defs/point"}, end={"$ref": "#/$defs/point"})}),
    "refs_to_refs": (
        "Draw a triangle.",
        {"$defs": {"point": _POINT, "corners": _list({"$ref": "#/$defs/point"}, 3, 3)}, **_object(corners={"$ref": "#/$defs/corners"})},
    ),
    "linked_list": (
        'Continue the pattern. 5 is {"value": 5, "next": null}. 6 is {"value": 6, "next": null}. And 7?',
        {"$defs": {"node": _object(value=_whole(0, 9), next={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]})}, "$ref": "#/$defs/node"},
    ),
    "tree": (
        'Continue the pattern. The folder a is {"name": "a", "folders": []}. The folder b is {"name": "b", "folders": []}. And the folder c?',
        {"$defs": {"folder": _object(name=_text(8), folders=_list({"$ref": "#/$defs/folder"}, 1, 0))}, "$ref": "#/$defs/folder"},
    ),
    "pattern": ("When is the meeting?", _object(date={"type": "string", "pattern": "^20[0-9]{2}-(0[1-9]|1[0-2])-[0-2][0-9]$"}, room=_whole(1, 30))),
    "format": ("Which machine was it, and when?", _object(day={"type": "string", "format": "date"}, host={"type": "string", "format": "ipv4"})),
}
# Those whose answers are mostly forced: long names, few choices.
RIGID: dict[str, tuple[str, Schema]] = {
    "flags": (
        "Set the switches.",
        _object(notifications_enabled=_YES_NO, automatic_updates=_YES_NO, location_services=_YES_NO, share_usage_statistics=_YES_NO),
    ),
    "classification": (
        "Great product, fast delivery!",
        _object(classification_result=_object(sentiment_of_the_review={"enum": ["positive", "negative"]}, confidence_in_percent=_whole(0, 99))),
    ),
    "tool_call": (
        "What is the weather in Oslo?",
        _object(
            function_name={"const": "get_current_weather"}, arguments=_object(location_name=_text(8), temperature_unit={"enum": ["celsius", "fahrenheit"]})
        ),
    ),
}
