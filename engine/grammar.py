"""A grammar in the client's words -> what xgrammar follows token by token. Owns the four notations, the vocabulary as xgrammar wants it, and the check that
an answer can end at all; knows nothing of processes, limits or sequences.

JSON is written in one form: ", " and ": " between parts and no other white space, properties in the schema's order, none but the declared ones unless the
schema's own `additionalProperties` allows more. So most of a rigid schema is forced, and forced tokens cost no forward pass.
"""

import json
from collections.abc import Iterator

import xgrammar

from engine.tokenizer import Tokenizer
from protocol.errors import InvalidRequest

Expression = tuple[int, list[int]]

ANY_OBJECT = json.dumps({"type": "object", "additionalProperties": True})
# Kinds of expressions in xgrammar's serialised grammars that the check below looks into; all others match something.
_RULE, _SEQUENCE, _CHOICES, _REPEAT = 4, 5, 6, 8


def vocabulary(tokenizer: Tokenizer) -> xgrammar.TokenizerInfo:
    """Every token as the bytes that it adds to the answer; special tokens add none and are never allowed, but for those that end an answer."""
    pieces = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
    return xgrammar.TokenizerInfo(
        pieces, vocab_type=xgrammar.VocabType.RAW, vocab_size=tokenizer.vocab_size, stop_token_ids=sorted(tokenizer.stop_token_ids) or None
    )


def parse_grammar(kind: str, text: str) -> xgrammar.Grammar:
    """Raises InvalidRequest with the parser's own words, or where no answer could ever end."""
    try:
        grammar = _parse(kind, text)
    except (RuntimeError, ValueError) as error:
        raise InvalidRequest(f"{kind}: {_plain(error)}") from None
    if not _can_end(grammar):
        raise InvalidRequest(f"{kind}: no answer that matches it could ever end")
    return grammar


def _parse(kind: str, text: str) -> xgrammar.Grammar:
    if kind == "json_schema":
        return xgrammar.Grammar.from_json_schema(text, any_whitespace=False)
    if kind == "json_object":
        return xgrammar.Grammar.from_json_schema(ANY_OBJECT, any_whitespace=False)
    if kind == "regex":
        return xgrammar.Grammar.from_regex(text)
    if kind == "ebnf":
        return xgrammar.Grammar.from_ebnf(text)
    if kind == "choice":
        return xgrammar.Grammar.from_ebnf("root ::= " + " | ".join(map(_literal, json.loads(text))))
    raise InvalidRequest(f"grammar kind {kind!r} is unknown")


def _literal(text: str) -> str:
    escaped = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return '"' + "".join(escaped.get(character, character) for character in text) + '"'


def _plain(error: Exception) -> str:
    """The parser's message without its time stamp and source line."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    head, mark, rest = lines[0].partition(".cc:")
    return (rest.partition(": ")[2] if mark else head)[:300].strip()


def _can_end(grammar: xgrammar.Grammar) -> bool:
    """Whether some finite text matches: the least fixed point over the rules."""
    serialised = json.loads(grammar.serialize_json())
    expressions = list(_expressions(serialised["grammar_expr_data"], serialised["grammar_expr_indptr"]))
    bodies = [rule[1] for rule in serialised["rules"]]
    ending: set[int] = set()
    while True:
        more = {rule for rule, body in enumerate(bodies) if rule not in ending and _ends(expressions, body, ending)}
        if not more:
            return serialised["root_rule_id"] in ending
        ending |= more


def _expressions(data: list[int], starts: list[int]) -> Iterator[Expression]:
    """A list of kind, length, items for each."""
    for start in starts:
        yield data[start], data[start + 2 : start + 2 + data[start + 1]]


def _ends(expressions: list[Expression], index: int, ending: set[int]) -> bool:
    kind, items = expressions[index]
    if kind == _RULE:
        return items[0] in ending
    if kind == _SEQUENCE:
        return all(_ends(expressions, item, ending) for item in items)
    if kind == _CHOICES:
        return any(_ends(expressions, item, ending) for item in items)
    if kind == _REPEAT:
        return items[1] == 0 or items[0] in ending
    return True
