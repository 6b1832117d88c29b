"""Where a thread's time goes: laps added up by name. Knows nothing of what is timed. Invariant: every moment belongs to exactly one lap."""

import time
from collections.abc import MutableMapping


class Stopwatch:
    def __init__(self, seconds: MutableMapping[str, float]) -> None:
        """Laps are added to `seconds`, which has a value for every name or makes one."""
        self._seconds = seconds
        self._since = time.perf_counter()

    def lap(self, name: str) -> None:
        """The time since the last lap belongs to `name`."""
        now = time.perf_counter()
        self._seconds[name] += now - self._since
        self._since = now
