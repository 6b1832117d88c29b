"""Every row of EVICTION: a victim is always something added and not removed, and everything goes in the end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.eviction import EVICTION, open_eviction
from protocol.errors import ConfigError

NAMES = [bytes([i]) for i in range(6)]
rows = pytest.mark.parametrize("row", EVICTION)


@rows
@given(events=st.lists(st.tuples(st.sampled_from(["add", "touch", "remove", "evict"]), st.sampled_from(NAMES))))
def test_a_victim_is_evictable(row, events):
    eviction, evictable = open_eviction(row), set()
    for verb, name in events:
        if verb == "add" and name not in evictable:
            eviction.add(name)
            evictable.add(name)
        elif verb == "remove" and name in evictable:
            eviction.remove(name)
            evictable.remove(name)
        elif verb == "touch":
            eviction.touch(name)
        elif verb == "evict":
            victim = eviction.victim()
            assert (victim in evictable) if evictable else victim is None
            if victim is not None:
                eviction.remove(victim)
                evictable.remove(victim)
        assert len(eviction) == len(evictable) and all((name in eviction) == (name in evictable) for name in NAMES)


@rows
def test_removing_what_is_not_there_is_an_error(row):
    with pytest.raises(KeyError):
        open_eviction(row).remove(b"x")


def test_lru_takes_the_least_recent():
    lru = open_eviction("lru")
    for name in NAMES[:3]:
        lru.add(name)
    lru.touch(NAMES[0])
    assert lru.victim() == NAMES[1]


def test_unknown_row_is_a_config_error():
    with pytest.raises(ConfigError, match="lru"):
        open_eviction("nope")
