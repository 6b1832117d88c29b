"""Names of blocks: chained hashes, the same in every process and on every machine. Knows nothing of where a block lies.

Invariant: a block's hash covers its tokens, all tokens before it and the salt (model, numerics, tenant), so equal hash means equal KV.
"""

import hashlib
from array import array
from collections.abc import Sequence
from typing import NewType

BlockHash = NewType("BlockHash", bytes)
HASH_BYTES = 16


def salt_of(*parts: str) -> bytes:
    """A chain's root: whatever must keep two chains apart (layout fingerprint, model revision, numerics, tenant)."""
    return hashlib.blake2b("\x00".join(parts).encode(), digest_size=HASH_BYTES).digest()


def request_salt(model: str, tenant: str, adapter: str = "", revision: str = "") -> bytes:
    """The root of a request's chain. `model`: what workers announce as their salt; `revision`: of the adapter's weights."""
    return salt_of(model, tenant, adapter, revision) if adapter else salt_of(model, tenant)


def block_hashes(tokens: Sequence[int], block_tokens: int, salt: bytes, parent: bytes | None = None) -> list[BlockHash]:
    """One hash for each full block of `tokens`; `parent` goes on with a chain."""
    hashes: list[BlockHash] = []
    previous = parent if parent is not None else salt
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        block = array("I", tokens[start : start + block_tokens]).tobytes()
        previous = hashlib.blake2b(previous + block, digest_size=HASH_BYTES).digest()
        hashes.append(BlockHash(previous))
    return hashes


def private_hash(request_id: str, attempt: int, num_tokens: int) -> BlockHash:
    """The name of a request's last, partly filled block: nobody else can ask for it."""
    name = f"private\x00{request_id}\x00{attempt}\x00{num_tokens}".encode()
    return BlockHash(hashlib.blake2b(name, digest_size=HASH_BYTES).digest())


def hold_name(request_id: str, attempt: int) -> str:
    """Who holds blocks in a store: one attempt of a request, so that the end of one attempt frees nothing of another."""
    return f"{request_id}#{attempt}"
