"""Spans, and the pieces that staged reads are cut into."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.endpoint import Span
from transport.nixl_staging import pieces
from transport.spans import check_spans

ARENA_BYTES = 1000
number = st.integers(min_value=-3, max_value=ARENA_BYTES + 3) | st.sampled_from([2**31, 2**63 - 1, 2**63, -(2**63)])


@given(st.lists(st.builds(Span, number, number, number), max_size=5), st.integers(1, ARENA_BYTES), st.integers(1, ARENA_BYTES))
def test_what_passes_lies_inside_both_arenas_and_nothing_else_is_refused(spans: list[Span], local_bytes: int, remote_bytes: int) -> None:
    def inside(span: Span) -> bool:
        return min(span) >= 0 and span.local + span.length <= local_bytes and span.remote + span.length <= remote_bytes

    if all(map(inside, spans)):
        table = check_spans(spans, local_bytes, remote_bytes)
        assert [tuple(row) for row in table.tolist()] == [tuple(span) for span in spans if span.length]
    else:
        with pytest.raises(ValueError, match="outside"):
            check_spans(spans, local_bytes, remote_bytes)


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99), st.integers(1, 50)), max_size=6), st.integers(1, 40))
def test_pieces_cover_every_byte_once_in_groups_of_bounded_size(rows: list[tuple[int, int, int]], max_bytes: int) -> None:
    groups = list(pieces(np.array(rows, dtype=np.int64).reshape(-1, 3), max_bytes))
    assert all(0 < group[:, 2].sum() <= max_bytes for group in groups)
    moved = [(local + index, remote + index) for group in groups for local, remote, length in group.tolist() for index in range(length)]
    assert moved == [(local + index, remote + index) for local, remote, length in rows for index in range(length)]
