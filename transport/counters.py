"""What an endpoint moved since it was opened. Written by the endpoint alone; anyone may read."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

Direction = Literal["write", "read"]


@dataclass(slots=True)
class TransferCounters:
    """`transfers` counts the finished ones, `failures` those that raised after their spans were accepted; `seconds` is the time inside both, waits included."""

    bytes_written: int = 0
    bytes_read: int = 0
    transfers: int = 0
    failures: int = 0
    seconds: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    @contextmanager
    def measure(self, direction: Direction, num_bytes: int) -> Iterator[None]:
        """Count one transfer of `num_bytes` around its body."""
        started = time.monotonic()
        try:
            yield
        except BaseException:
            with self._lock:
                self.failures += 1
                self.seconds += time.monotonic() - started
            raise
        with self._lock:
            self.transfers += 1
            self.seconds += time.monotonic() - started
            if direction == "write":
                self.bytes_written += num_bytes
            else:
                self.bytes_read += num_bytes
