"""A real redis-server as the cluster keeps it."""

import asyncio
import os
import signal
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from cluster.config import RedisEntry
from cluster.redis_server import RedisServer, redis_executable
from protocol.errors import ConfigError, Unavailable

LIMIT_BYTES = 4 * 1024**2


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[RedisServer]:
    server = RedisServer(RedisEntry(max_memory_bytes=LIMIT_BYTES), tmp_path, tmp_path / "redis.log")
    await server.start()
    yield server
    await server.stop()


async def ask(url: str, command: str, *arguments: str) -> object:
    client = Redis.from_url(url, decode_responses=True)
    try:
        return await client.execute_command(command, *arguments)
    finally:
        await client.aclose()


async def test_the_password_is_needed_and_private(server: RedisServer, tmp_path: Path) -> None:
    assert await ask(server.url, "PING")
    with pytest.raises(RedisError, match="authenticated"):
        await ask(f"unix://{tmp_path / 'redis.sock'}", "PING")
    password = server.url.split("@")[0].rpartition(":")[2]
    assert server.pid is not None
    assert password not in " ".join(psutil.Process(server.pid).cmdline())
    assert stat.S_IMODE((tmp_path / "redis.conf").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "redis.sock").stat().st_mode) == 0o700


async def test_no_port_no_disk_bounded_memory(server: RedisServer, tmp_path: Path) -> None:
    assert server.pid is not None
    assert [connection for connection in psutil.Process(server.pid).net_connections("inet")] == []
    client = Redis.from_url(server.url)
    for index in range(2 * LIMIT_BYTES // 65536):
        await client.set(f"hint:{index}", b"x" * 65536)
    assert (await client.info("memory"))["used_memory"] <= LIMIT_BYTES * 1.1
    await client.aclose()
    await server.stop()
    assert set(os.listdir(tmp_path)) <= {"redis.conf", "redis.log"}


async def test_a_killed_server_comes_back_with_the_same_address(server: RedisServer) -> None:
    url, pid = server.url, server.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    for _ in range(200):
        try:
            await ask(url, "PING")
            if server.pid not in (None, pid):
                break
        except (RedisError, OSError):
            pass
        await asyncio.sleep(0.05)
    assert server.pid not in (None, pid)
    assert server.restarts == 1


async def test_stop_leaves_no_process_and_is_idempotent(server: RedisServer) -> None:
    pid = server.pid
    assert pid is not None
    await server.stop()
    assert not psutil.pid_exists(pid)
    assert server.pid is None
    await server.stop()


async def test_a_server_that_cannot_start_is_an_error(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 120)  # a unix socket's path may have 107 characters
    folder.mkdir()
    server = RedisServer(RedisEntry(), folder, tmp_path / "redis.log", start_s=5)
    with pytest.raises(Unavailable, match="redis"):
        await server.start()
    assert server.pid is None


async def test_a_configured_server_is_used_as_it_is(server: RedisServer, tmp_path: Path) -> None:
    other = RedisServer(RedisEntry(url=server.url), tmp_path, tmp_path / "other.log")
    await other.start()
    assert other.url == server.url
    assert other.pid is None
    await other.stop()
    assert await ask(server.url, "PING")


async def test_a_configured_server_that_does_not_answer_is_refused(tmp_path: Path) -> None:
    server = RedisServer(RedisEntry(url=f"unix://:secret@{tmp_path}/none.sock"), tmp_path, tmp_path / "r.log")
    with pytest.raises(ConfigError, match="no Redis answers there") as caught:
        await server.start()
    assert "secret" not in caught.value.message


def test_there_is_an_executable() -> None:
    assert os.access(redis_executable(), os.X_OK)
