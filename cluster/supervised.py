"""One child process that is kept alive: started, waited on, started again when it dies, stopped. Knows nothing of what the child does.

Invariant: at most one child runs; it dies with this process (cluster.tether); after `stop` none runs and none will.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from cluster import tether
from cluster.logs import open_log
from protocol.errors import Unavailable

log = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.1
_LAST_BACKOFF_S = 5.0


class Supervised:
    """`command` is called for every start. `ready(process)` returns when the child serves, and raises or times out when it does not.
    Start and stop it from the thread that lives as long as the process: the tether is bound to it."""

    def __init__(
        self,
        name: str,
        command: Callable[[], Sequence[str]],
        ready: Callable[[asyncio.subprocess.Process], Awaitable[None]],
        log_path: Path,
        start_s: float,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.restarts = 0
        self._command = command
        self._ready = ready
        self._log_path = log_path
        self._start_s = start_s
        self._environment = environment
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def start(self) -> None:
        """Raises Unavailable when the child is not ready within `start_s`; then none is left."""
        try:
            await self._launch()
        except BaseException:
            await self._end(grace_s=0)
            raise
        self._watch = asyncio.create_task(self._keep_alive())

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, then SIGKILL after `grace_s`. Idempotent."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
            self._watch = None
        await self._end(grace_s)

    async def _launch(self) -> None:
        with open_log(self._log_path) as output:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-S", tether.__file__, str(os.getpid()), *self._command()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=output,
                env=self._environment,
            )
        ready = asyncio.ensure_future(self._ready(self._process))
        ended = asyncio.ensure_future(self._process.wait())
        try:
            done, _ = await asyncio.wait({ready, ended}, timeout=self._start_s, return_when=asyncio.FIRST_COMPLETED)
            if ready in done:
                return ready.result()
            reason = f"ended with {self._process.returncode}" if ended in done else f"not ready within {self._start_s:.0f} s"
            raise Unavailable(f"{self.name} {reason}; see {self._log_path}", stage="start")
        finally:
            for task in (ready, ended):
                task.cancel()
            await asyncio.gather(ready, ended, return_exceptions=True)

    async def _keep_alive(self) -> None:
        backoff_s = _FIRST_BACKOFF_S
        while True:
            code = await _wait_and_discard(self._process)
            log.warning("%s ended with %s; starting it again", self.name, code)
            self.restarts += 1
            try:
                await self._launch()
                backoff_s = _FIRST_BACKOFF_S
            except Exception as error:
                log.error("%s did not start again: %s", self.name, error)
                await self._end(grace_s=0)
                backoff_s = min(backoff_s * 2, _LAST_BACKOFF_S)
            await asyncio.sleep(backoff_s)

    async def _end(self, grace_s: float) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM if grace_s > 0 else signal.SIGKILL)
        try:
            await asyncio.wait_for(process.wait(), grace_s if grace_s > 0 else 5)
        except TimeoutError:
            log.error("%s did not end within %.0f s: killed", self.name, grace_s)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _wait_and_discard(process: asyncio.subprocess.Process | None) -> int:
    """The child's exit code; what it still writes to its standard output is read, so that it never blocks on it."""
    assert process is not None and process.stdout is not None
    discard = asyncio.create_task(_discard(process.stdout))
    try:
        return await process.wait()
    finally:
        discard.cancel()


async def _discard(stream: asyncio.StreamReader) -> None:
    while await stream.read(65536):
        pass
