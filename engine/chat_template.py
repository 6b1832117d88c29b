"""Chat templates: the sandboxed Jinja environment that models' templates are written for, and the plain form of messages that they read. Owns what
a template may call and what a message may hold; knows nothing of tokens.

Invariant: a template, which is code from outside, sees plain data only and cannot change it.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node, Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from protocol.errors import InvalidRequest

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})


class GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training; a prompt only needs its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        return Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def compile_template(source: str) -> Template:
    """TemplateError: the source is not a template."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies with text parts joined by line breaks and absent (None) entries left out. InvalidRequest names what is refused."""
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence) or not messages:
        raise InvalidRequest("messages must be a list of at least one message", field="messages")
    return [_plain_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _plain_message(message: Any, field: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{field} must be an object with role and content", field=field)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidRequest(f"{field}.role must be one of {', '.join(sorted(ROLES))}", field=f"{field}.role")
    plain = {str(name): value for name, value in message.items() if value is not None}
    if "content" in plain:
        plain["content"] = _plain_content(plain["content"], f"{field}.content")
    elif not (role == "assistant" and plain.get("tool_calls")):
        raise InvalidRequest(f"{field}.content is missing", field=f"{field}.content")
    return plain


def _plain_content(content: Any, field: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise InvalidRequest(f"{field} must be text or a list of text parts", field=field)
    texts = []
    for index, part in enumerate(content):
        place = f"{field}[{index}]"
        if not isinstance(part, Mapping) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise InvalidRequest(f"{place}.type {kind!r} is not supported: this model reads text only", field=f"{place}.type")
        if not isinstance(part.get("text"), str):
            raise InvalidRequest(f"{place}.text must be a string", field=f"{place}.text")
        texts.append(part["text"])
    return "\n".join(texts)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    """Jinja's own filter escapes HTML, which prompts do not want."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
