"""A real cluster for tests: start it from an example file, ask it over HTTP, look into its parts."""

import asyncio
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from cli.config import load_config
from cluster.local import Cluster

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
TIE = 5e-4  # top-2 logits closer than this may come in either order


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(example: str, *settings: str) -> Iterator[Cluster]:
    """The cluster of examples/<example>.yaml with `key=value` settings, on a free port."""
    config = load_config(EXAMPLES / f"{example}.yaml", [f"router.http_port={free_port()}", *settings])
    with Cluster(config) as cluster:
        yield cluster


@dataclass(frozen=True)
class Answer:
    status: int
    tokens: tuple[int, ...]
    text: str
    usage: dict[str, Any]
    request_id: str
    body: dict[str, Any]

    @property
    def cached_tokens(self) -> int:
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])


async def ask(client: httpx.AsyncClient, model: str, prompt: Sequence[int], max_tokens: int = 32, timeout_s: float = 120, **fields: Any) -> Answer:
    """One greedy completion of token ids, not streamed."""
    body = {"model": model, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True} | fields
    reply = await client.post("/v1/completions", json=body, headers={"x-request-timeout-s": str(timeout_s)}, timeout=timeout_s + 10)
    content = reply.json()
    choice = content["choices"][0] if reply.status_code == 200 else {}
    return Answer(
        reply.status_code, tuple(choice.get("token_ids", ())), choice.get("text", ""), content.get("usage", {}), reply.headers.get("x-request-id", ""), content
    )


def ask_all(cluster: Cluster, prompts: Sequence[Sequence[int]], *, at_once: int = 1, **fields: Any) -> list[Answer]:
    """Answers in the order of the prompts, `at_once` of them running."""

    async def run() -> list[Answer]:
        gate = asyncio.Semaphore(at_once)
        async with httpx.AsyncClient(base_url=cluster.url) as client:

            async def one(prompt: Sequence[int]) -> Answer:
                async with gate:
                    return await ask(client, cluster.config.model_name, prompt, **fields)

            return await asyncio.gather(*(one(prompt) for prompt in prompts))

    return asyncio.run(run())


def timeline(cluster: Cluster, request_id: str) -> dict[str, Any]:
    """The request's timeline, once the prefill side's report on its pushes has come too."""
    until = time.monotonic() + 5
    while True:
        body: dict[str, Any] = httpx.get(f"{cluster.url}/v1/requests/{request_id}/timeline").json()
        if time.monotonic() > until or all(side["kv_pushed"] for side in body["sides"] if side["phase"] == "prefill"):
            return body
        time.sleep(0.05)


def sides(body: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [side["work"] for side in body["sides"] if side["phase"] == phase]


def look(cluster: Cluster) -> dict[str, Any]:
    body: dict[str, Any] = httpx.get(f"{cluster.url}/cluster").json()
    return body


def differing(golden: dict[str, Any], tokens: Sequence[int]) -> str:
    """ "" when the tokens are the golden ones, "tie" when they part at a tie, else where they part."""
    for index, (expected, margin) in enumerate(zip(golden["answer"], golden["margins"], strict=True)):
        if index >= len(tokens) or tokens[index] != expected:
            return "tie" if margin < TIE else f"token {index}: {tokens[index] if index < len(tokens) else None} for {expected}, margin {margin:.4f}"
    extra = len(tokens) - len(golden["answer"])
    return f"{extra} tokens after the end" if extra > 0 else ""
