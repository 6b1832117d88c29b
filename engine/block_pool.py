"""The device pool's book-keeping: reference counts, prefix index, eviction order. Knows nothing of bytes, models or requests.

Invariants (check_integrity):
- free + cached + used = total. Free: nobody refers to it and it has no name. Cached: nobody refers to it but its hash can still be matched.
- A block gets its hash once, when it is full; from then on its content does not change until it is allocated again.
- The idle order is the eviction order: nameless blocks first, then the least recently released; a sequence's tail goes before its head.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvstore.hashing import BlockHash


@dataclass(frozen=True, slots=True)
class PoolCounts:
    total: int
    free: int
    cached: int

    @property
    def used(self) -> int:
        return self.total - self.free - self.cached


class BlockPool:
    def __init__(self, num_blocks: int, prefix_cache: bool = True) -> None:
        self._prefix_cache = prefix_cache
        self._references = [0] * num_blocks
        self._hashes: list[BlockHash | None] = [None] * num_blocks
        self._by_hash: dict[BlockHash, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._num_cached = 0
        self.evictions = 0

    def match(self, hashes: Sequence[BlockHash]) -> list[int]:
        """The blocks of the longest leading run of `hashes` in the pool; not yet referred to."""
        found: list[int] = []
        for block_hash in hashes:
            block = self._by_hash.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def can_allocate(self, num_blocks: int, keeping: Sequence[int] = ()) -> bool:
        """Whether `num_blocks` can be had while the idle ones among `keeping` stay untouched."""
        kept = sum(1 for block in keeping if self._references[block] == 0)
        return num_blocks <= len(self._idle) - kept

    def allocate(self, num_blocks: int) -> list[int]:
        """Fresh blocks with one reference each, evicting idle cached ones in order. The caller asked `can_allocate` first."""
        blocks = []
        for _ in range(num_blocks):
            block, _ = self._idle.popitem(last=False)
            self._forget_hash(block)
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def refer(self, blocks: Iterable[int]) -> None:
        """One more reference to each block, taking it out of eviction's reach."""
        for block in blocks:
            if self._references[block] == 0:
                del self._idle[block]
                self._num_cached -= 1  # an idle block can only be named through its hash
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less to each block; idle ones become evictable, the tail first."""
        for block in reversed(blocks):
            if self._references[block] <= 0:
                raise ValueError(f"block {block} is released more often than referred to")
            self._references[block] -= 1
            if self._references[block] > 0:
                continue
            self._idle[block] = None
            if self._hashes[block] is None:
                self._idle.move_to_end(block, last=False)
            else:
                self._num_cached += 1

    def name(self, block: int, block_hash: BlockHash) -> None:
        """Give a full, referred-to block its hash. Where another block has that name already, this one stays nameless."""
        if not self._prefix_cache or block_hash in self._by_hash:
            return
        self._hashes[block] = block_hash
        self._by_hash[block_hash] = block

    def counts(self) -> PoolCounts:
        return PoolCounts(total=len(self._references), free=len(self._idle) - self._num_cached, cached=self._num_cached)

    def check_integrity(self, references: dict[int, int] | None = None) -> list[str]:
        """Broken conservation laws in words; `references`: what the owners believe, block -> count."""
        violations = []
        idle = {block for block, count in enumerate(self._references) if count == 0}
        if idle != set(self._idle):
            violations.append(f"pool: idle blocks {len(idle)} by count, {len(self._idle)} by list")
        cached = sum(1 for block in self._idle if self._hashes[block] is not None)
        if cached != self._num_cached:
            violations.append(f"pool: {cached} cached blocks, {self._num_cached} counted")
        named = {block_hash: block for block, block_hash in enumerate(self._hashes) if block_hash is not None}
        if named != self._by_hash:
            violations.append("pool: the prefix index and the blocks' hashes disagree")
        if references is not None:
            held = {block: count for block, count in enumerate(self._references) if count}
            if held != references:
                violations.append(f"pool: references {len(held)} blocks, owners hold {len(references)}")
        return violations

    def _forget_hash(self, block: int) -> None:
        block_hash = self._hashes[block]
        if block_hash is None:
            return
        self._hashes[block] = None
        del self._by_hash[block_hash]
        self._num_cached -= 1
        self.evictions += 1
