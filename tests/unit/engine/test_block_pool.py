import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.block_pool import BlockPool
from kvstore.hashing import BlockHash


def h(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "little"))


def test_released_blocks_are_matched_until_evicted_tail_first() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    for index, block in enumerate(blocks):
        pool.name(block, h(index))
    pool.release(blocks)
    assert pool.counts().cached == 3
    assert pool.match([h(0), h(1), h(2)]) == blocks
    pool.allocate(1)
    assert pool.match([h(0), h(1), h(2)]) == blocks[:2]
    assert pool.evictions == 1


def test_nameless_blocks_are_taken_before_cached_ones() -> None:
    pool = BlockPool(2)
    named, nameless = pool.allocate(2)
    pool.name(named, h(1))
    pool.release([named])
    pool.release([nameless])
    assert pool.allocate(1) == [nameless]
    assert pool.match([h(1)]) == [named]


def test_blocks_to_keep_do_not_count_as_allocatable() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.name(block, h(1))
    pool.release([block])
    assert pool.can_allocate(2)
    assert not pool.can_allocate(2, keeping=[block])


def test_a_second_block_with_the_same_content_stays_nameless() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.name(first, h(1))
    pool.name(second, h(1))
    pool.release([first, second])
    assert pool.counts() == type(pool.counts())(total=2, free=1, cached=1)


def test_releasing_too_often_is_refused() -> None:
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(ValueError, match="released more often"):
        pool.release(blocks)


def test_integrity_check_sees_a_wrong_owner_count() -> None:
    pool = BlockPool(2)
    block = pool.allocate(1)[0]
    assert pool.check_integrity({block: 1}) == []
    assert pool.check_integrity({block: 2})


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["allocate", "release", "match", "name"]), st.integers(0, 7)), max_size=60))
def test_conservation_over_random_moves(moves: list[tuple[str, int]]) -> None:
    pool = BlockPool(8)
    held: list[int] = []
    for move, argument in moves:
        if move == "allocate" and pool.can_allocate(argument):
            held += pool.allocate(argument)
        elif move == "release" and held:
            pool.release([held.pop(argument % len(held))])
        elif move == "match":
            found = pool.match([h(argument)])
            pool.refer(found)
            held += found
        elif move == "name" and held and held.count(held[0]) == 1 and pool.match([h(argument)]) == [] and pool._hashes[held[0]] is None:
            pool.name(held[0], h(argument))
        assert pool.check_integrity({block: held.count(block) for block in held}) == []
        counts = pool.counts()
        assert counts.free + counts.cached + len(set(held)) == counts.total
