"""A tokenizer whose tokens are bytes: 256 of them, and 256 as the start of a text."""

from collections.abc import Mapping, Sequence
from typing import Any


class ByteTokenizer:
    vocab_size = 257

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [*([256] if add_special_tokens else []), *text.encode()]

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return self.encode("".join(f"{message['role']}: {message['content']}\n" for message in messages))

    def token_bytes(self, token_id: int, special: bool = False) -> bytes:
        return (b"<s>" if special else b"") if token_id == 256 else bytes([token_id])
