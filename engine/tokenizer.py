"""Text <-> token ids <-> chat messages, as the model's own files say. Owns the tokenizer, the chat template and the end-of-answer tokens; knows nothing of
torch, transformers or requests' life. The router and the workers each have one.

Invariant: `encode` and `render_chat` give what transformers gives for the same folder; `b"".join(map(token_bytes, ids))`, decoded, is `decode(ids)`.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from jinja2 import Template
from jinja2.exceptions import TemplateError

from engine.chat_template import compile_template, plain_messages
from protocol.errors import ConfigError, InvalidRequest

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_METASPACE = "\u2581"  # how pieces write a space


class Tokenizer:
    """`eos_token_id`: None where the model names none; `stop_token_ids`: every token that ends an answer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # tokenizers raises bare Exception
            raise ConfigError(f"{folder / 'tokenizer.json'}: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        settings = _json(folder / "special_tokens_map.json") | _json(folder / "tokenizer_config.json")
        self._special_texts = _special_texts(settings)
        self._hidden_ids = {token_id for token_id, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        self._templates = _templates(folder, settings)
        self._is_byte_level = _is_byte_level(json.loads(self._tokenizer.to_str())["decoder"])
        self.vocab_size: int = self._tokenizer.get_vocab_size()
        self.eos_token_id: int | None = self._tokenizer.token_to_id(self._special_texts.get("eos_token", ""))
        self.stop_token_ids: frozenset[int] = _stop_token_ids(folder) | ({self.eos_token_id} if self.eos_token_id is not None else set())

    def encode(self, text: str, add_special_tokens: bool = True, field: str = "prompt") -> list[int]:
        """InvalidRequest: text that is not valid Unicode (lone surrogates)."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"{field} is not valid Unicode at character {error.start}", field=field) from error
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def render_chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None, add_generation_prompt: bool = True) -> str:
        """The prompt's text by the model's own template. InvalidRequest names the message or part that is refused."""
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise InvalidRequest("this model has no chat template: use a plain completion", field="messages")
        plain = plain_messages(messages)
        try:
            variables = dict(self._special_texts, messages=plain, tools=tools, documents=None, add_generation_prompt=add_generation_prompt)
            return self._templates[name].render(variables)
        except (TemplateError, TypeError, KeyError, ValueError, AttributeError, IndexError, OverflowError) as error:
            raise InvalidRequest(f"the model's chat template refused the messages: {error}", field="messages") from error

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None) -> list[int]:
        """The template writes the special tokens itself."""
        return self.encode(self.render_chat(messages, tools), add_special_tokens=False, field="messages")

    def token_id(self, text: str) -> int | None:
        """Of the one token that is written so, if there is one."""
        token: int | None = self._tokenizer.token_to_id(text)
        return token

    def token_bytes(self, token_id: int, special: bool = False) -> bytes:
        """What a token adds to the answer's UTF-8; empty for ids that the vocabulary lacks and for special tokens; `special`: these by their names."""
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        if token_id in self._hidden_ids:
            return str(piece).encode() if special else b""
        if self._is_byte_level:
            values = [_BYTE_OF_CHARACTER.get(character) for character in piece]
            return piece.encode() if None in values else bytes(value for value in values if value is not None)
        if byte := _BYTE_PIECE.fullmatch(piece):
            return bytes([int(byte[1], 16)])
        return piece.replace(_METASPACE, " ").encode()


def _byte_level_alphabet() -> dict[str, int]:
    """Printable Latin-1 characters stand for themselves, the other bytes for characters from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_level_alphabet()


def _is_byte_level(decoder: dict[str, Any] | None) -> bool:
    """Of the two families of decoders that exist for Llama-like models, which: byte-level, or metaspace with byte pieces."""
    steps = [] if decoder is None else decoder.get("decoders", [decoder])
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return True
    if "ByteFallback" in kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        return False
    raise ConfigError(f"the tokenizer's decoder {'+'.join(kinds) or 'none'} is not supported: byte-level, or metaspace with byte fall-back")


def _templates(folder: Path, settings: dict[str, Any]) -> dict[str, Template]:
    """Named templates; a file of its own wins over the settings' entry."""
    path, entry = folder / "chat_template.jinja", settings.get("chat_template")
    named: dict[str, str] = {"default": entry} if isinstance(entry, str) else {}
    if isinstance(entry, list):
        named = {template["name"]: template["template"] for template in entry}
    if path.is_file():
        named["default"] = path.read_text(encoding="utf-8")
    try:
        return {name: compile_template(source) for name, source in named.items()}
    except TemplateError as error:
        raise ConfigError(f"the chat template of {folder} is not valid: {error}") from error


def _special_texts(settings: dict[str, Any]) -> dict[str, str]:
    """The variables (bos_token, ...) that templates may write."""
    extra = settings.get("extra_special_tokens")
    entries = {name: settings.get(name) for name in SPECIAL_TOKENS} | (extra if isinstance(extra, dict) else {})
    texts = {name: entry.get("content") if isinstance(entry, dict) else entry for name, entry in entries.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _stop_token_ids(folder: Path) -> frozenset[int]:
    generation, model = _json(folder / "generation_config.json"), _json(folder / "config.json")
    ids = generation.get("eos_token_id", model.get("eos_token_id"))
    return frozenset([ids] if isinstance(ids, int) else ids or [])


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    content: dict[str, Any] = json.loads(path.read_bytes())
    return content
