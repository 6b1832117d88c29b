"""What a block's bytes mean: layout as data, with a fingerprint. Knows nothing of memory or models.

A block holds `block_tokens` tokens of all layers, ordered [kv head][layer][K, V][token][dim]: one transfer descriptor, and a
tensor-parallel rank's heads are one contiguous sub-span.
"""

import hashlib
from dataclasses import dataclass

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class BlockLayout:
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: str

    @property
    def token_bytes(self) -> int:
        return self.num_kv_heads * self.num_layers * 2 * self.head_dim * ITEM_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        return self.block_tokens * self.token_bytes

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        return self.num_kv_heads, self.num_layers, 2, self.block_tokens, self.head_dim

    @property
    def fingerprint(self) -> str:
        text = f"gqa:{self.num_kv_heads}h:{self.num_layers}l:2:{self.block_tokens}t:{self.head_dim}d:{self.dtype}"
        return f"{text}:{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"
