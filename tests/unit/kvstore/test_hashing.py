"""Names of blocks: equal exactly where tokens, everything before them and the salt are equal, in every process; and the prefixes that they find."""

import subprocess
import sys

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.block_pool import BlockPool
from kvstore.hashing import block_hashes, private_hash, salt_of

BLOCK = 4
TOKENS = st.lists(st.integers(0, 2), max_size=24)


def test_every_process_gives_the_same_names() -> None:
    program = "from kvstore.hashing import *; print(block_hashes(range(70), 32, salt_of('model', 'tenant'))[-1].hex(), private_hash('r', 1, 5).hex())"
    printed = [subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout for _ in range(2)]
    assert printed[0] == printed[1] == f"{block_hashes(range(70), 32, salt_of('model', 'tenant'))[-1].hex()} {private_hash('r', 1, 5).hex()}\n"


def test_only_full_blocks_have_names_and_a_chain_can_be_gone_on_with() -> None:
    assert block_hashes([1] * 7, BLOCK, b"salt") == block_hashes([1] * 4, BLOCK, b"salt")
    whole = block_hashes(list(range(12)), BLOCK, b"salt")
    assert whole[1:] == block_hashes(list(range(4, 12)), BLOCK, b"salt", parent=whole[0])


def test_salts_and_their_parts_are_kept_apart() -> None:
    assert salt_of("ab", "c") != salt_of("a", "bc")
    assert not set(block_hashes([1] * 8, BLOCK, salt_of("a"))) & set(block_hashes([1] * 8, BLOCK, salt_of("b")))


@given(one=TOKENS, other=TOKENS)
def test_names_are_equal_exactly_as_far_as_the_prefixes(one: list[int], other: list[int]) -> None:
    names = zip(block_hashes(one, BLOCK, b"salt"), block_hashes(other, BLOCK, b"salt"), strict=False)
    for index, (mine, others) in enumerate(names):
        end = (index + 1) * BLOCK
        assert (mine == others) == (one[:end] == other[:end])


@settings(max_examples=50)
@given(known=st.lists(TOKENS, max_size=12), asked=TOKENS)
def test_the_pool_finds_the_longest_common_prefix(known: list[list[int]], asked: list[int]) -> None:
    """Against comparing with every known sequence, block by block."""
    pool = BlockPool(100)
    for tokens in known:
        hashes = block_hashes(tokens, BLOCK, b"salt")
        blocks = pool.allocate(len(hashes))
        for block, block_hash in zip(blocks, hashes, strict=True):
            pool.name(block, block_hash)
        pool.release(blocks)
    longest = max((common for tokens in known if (common := common_blocks(tokens, asked))), default=0)
    assert len(pool.match(block_hashes(asked, BLOCK, b"salt"))) == longest


def common_blocks(one: list[int], other: list[int]) -> int:
    blocks = 0
    while (end := (blocks + 1) * BLOCK) <= min(len(one), len(other)) and one[:end] == other[:end]:
        blocks += 1
    return blocks
