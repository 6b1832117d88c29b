"""What travels for a block: its encoding and the checksum of it. Knows nothing of slots, requests or peers.

Contract, checked for every row of CODECS by tests/contract/test_codec.py: decode(encode(block)) equals the block's filled tokens within the codec's
fidelity ("raw": bit for bit), an encoding is at most `encoded_bytes` long, and tokens past `num_tokens` neither travel nor are written.
"""

from importlib import import_module
from typing import Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.layout import ITEM_BYTES, BlockLayout
from protocol.errors import ConfigError

Bytes = npt.NDArray[np.uint8]

FIDELITIES = ("raw",)  # best first


class Codec(Protocol):
    name: str
    fidelity: str

    def encoded_bytes(self, num_tokens: int) -> int:
        """The most that a block with so many filled tokens can take."""
        ...

    def in_place(self, num_tokens: int) -> bool:
        """Whether the block's own bytes are its encoding, so that nothing need be staged."""
        ...

    def encode(self, block: Bytes, num_tokens: int, out: Bytes) -> int:
        """`block` [block_bytes] into the front of `out`; returns the encoded length in bytes."""
        ...

    def decode(self, encoded: Bytes, num_tokens: int, block: Bytes) -> None:
        """Fills the first `num_tokens` tokens of `block` [block_bytes]. Raises ValueError for a wrong length."""
        ...


CODECS = {"raw": "kvstore.codec:RawCodec"}


class RawCodec:
    """The block's bytes; a partial block is packed to its filled tokens."""

    name = "raw"
    fidelity = "raw"

    def __init__(self, layout: BlockLayout) -> None:
        self._layout = layout
        heads, layers, kv, tokens, dim = layout.shape
        self._token_shape = (heads, layers, kv, tokens, dim * ITEM_BYTES[layout.dtype])

    def encoded_bytes(self, num_tokens: int) -> int:
        return num_tokens * self._layout.token_bytes

    def in_place(self, num_tokens: int) -> bool:
        return num_tokens == self._layout.block_tokens

    def encode(self, block: Bytes, num_tokens: int, out: Bytes) -> int:
        filled = block.reshape(self._token_shape)[:, :, :, :num_tokens]
        out[: filled.size].reshape(filled.shape)[...] = filled
        return filled.size

    def decode(self, encoded: Bytes, num_tokens: int, block: Bytes) -> None:
        filled = block.reshape(self._token_shape)[:, :, :, :num_tokens]
        if encoded.size != filled.size:
            raise ValueError(f"{encoded.size} bytes are not {num_tokens} tokens of {self._layout.token_bytes} bytes")
        filled[...] = encoded.reshape(filled.shape)


def open_codec(name: str, layout: BlockLayout) -> Codec:
    try:
        module, _, attribute = CODECS[name].partition(":")
    except KeyError:
        raise ConfigError(f"store.codec: {name!r} is none of {', '.join(CODECS)}", field="store.codec") from None
    codec: Codec = getattr(import_module(module), attribute)(layout)
    return codec


def acceptable(fidelity: str, least: str) -> bool:
    """Whether a copy of `fidelity` may stand for one of at least `least`; an unknown fidelity never may, an empty `least` takes any."""
    if not least:
        return True
    return fidelity in FIDELITIES and least in FIDELITIES and FIDELITIES.index(fidelity) <= FIDELITIES.index(least)


def block_checksum(encoded: Bytes, block_hash: bytes, fidelity: str, fingerprint: str) -> int:
    """xxh3 of the encoded bytes, seeded so that bytes of another block, fidelity or layout do not pass. The GIL is released while it runs."""
    seed = xxhash.xxh3_64_intdigest(b"\x00".join((block_hash, fidelity.encode(), fingerprint.encode())))
    return xxhash.xxh3_64_intdigest(encoded.data, seed)
