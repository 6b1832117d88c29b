"""Absolute deadlines in time.monotonic() seconds. Invariant: whoever waits asks here how long it still may."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from protocol.errors import TransferTimeout


def remaining(deadline: float) -> float:
    """Seconds left, always positive. Raises TransferTimeout when there are none."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TransferTimeout("the deadline of the transfer passed")
    return left


@contextmanager
def held(lock: threading.Lock, deadline: float) -> Iterator[None]:
    """Hold `lock`; raises TransferTimeout when it does not come free in time."""
    if not lock.acquire(timeout=min(remaining(deadline), threading.TIMEOUT_MAX)):
        raise TransferTimeout("the deadline passed while another transfer was running")
    try:
        yield
    finally:
        lock.release()
