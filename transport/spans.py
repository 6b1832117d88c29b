"""Checks spans against the two arenas. Invariant: what passes here lies inside both, so no backend needs a bound of its own towards an honest peer."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from transport.endpoint import Span

SpanTable = npt.NDArray[np.int64]


def check_spans(spans: Sequence[Span], local_bytes: int, remote_bytes: int) -> SpanTable:
    """int64 (N, 3): local, remote, length; empty spans are dropped. Raises ValueError for a span outside either arena."""
    try:
        table = np.array(spans, dtype=np.int64).reshape(-1, 3)
    except OverflowError:
        raise ValueError("a span lies outside of any arena") from None
    local, remote, length = table.T
    outside = (table < 0).any(axis=1) | (length > local_bytes - local) | (length > remote_bytes - remote)
    if outside.any():
        first = Span(*table[outside.argmax()].tolist())
        raise ValueError(f"{first} lies outside of its arena: {local_bytes} bytes here, {remote_bytes} at the peer")
    return table[length > 0]
