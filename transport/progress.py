"""Calls `progress` of one endpoint while transfers may come in, and sleeps otherwise. Knows nothing of what a transfer is for.

Invariant: the thread runs only while someone holds the loop live; an endpoint that needs no progress has no thread.
"""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from transport.endpoint import Endpoint

logger = logging.getLogger(__name__)


class ProgressLoop:
    """Hold it live from the moment a peer may start a transfer until it has ended. `failures` counts raises of `progress`; the first is logged."""

    def __init__(self, endpoint: Endpoint, interval_s: float = 0.001) -> None:
        self._endpoint = endpoint
        self._interval_s = interval_s
        self._changed = threading.Condition()
        self._holds = 0
        self._is_closed = False
        self.rounds = 0
        self.failures = 0
        self._thread: threading.Thread | None = None
        if endpoint.needs_progress:
            self._thread = threading.Thread(target=self._run, name=f"{endpoint.name}-progress", daemon=True)
            self._thread.start()

    @contextmanager
    def live(self) -> Iterator[None]:
        self.hold()
        try:
            yield
        finally:
            self.release()

    def hold(self) -> None:
        with self._changed:
            self._holds += 1
            self._changed.notify()

    def release(self) -> None:
        """Undo one `hold`. Raises ValueError when there is none."""
        with self._changed:
            if self._holds == 0:
                raise ValueError("released more often than held")
            self._holds -= 1

    def close(self) -> None:
        """Idempotent. Call it before the endpoint's `close`."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while self._wait_until_live():
            try:
                self._endpoint.progress()
            except Exception:
                if self.failures == 0:
                    logger.exception("progress of %s failed; further failures are only counted", self._endpoint.name)
                self.failures += 1
            self.rounds += 1
            time.sleep(self._interval_s)

    def _wait_until_live(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._holds > 0 or self._is_closed)
            return not self._is_closed
