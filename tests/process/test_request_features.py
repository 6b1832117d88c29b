"""Request features on real clusters with the real model: the whole body is the same handed off and colocated; n answers share their prompt's blocks."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import httpx
import pytest
from serving import serving, sides, timeline

from cluster.local import Cluster

T = TypeVar("T")
pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]
FP32 = ("engine.dtype=float32", "engine.kv_cache_bytes=268435456", "store.capacity_bytes=268435456")
PROMPT = "The history of the lighthouse begins with open fires that were built on hilltops to guide mariners at sea. " * 4
CHAT = [{"role": "user", "content": "Name three rivers and say in one sentence each where they flow."}]
SAMPLED = {"temperature": 0.9, "seed": 11, "top_p": 0.95}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("completions", {"logprobs": 3, "echo": True, "max_tokens": 8, **SAMPLED}),
    ("completions", {"prompt_logprobs": 1, "logprobs": 0, "max_tokens": 3, **SAMPLED}),
    ("completions", {"n": 3, "max_tokens": 20, "presence_penalty": 0.7, "logit_bias": {"100": 2.0}, **SAMPLED}),
    ("completions", {"max_tokens": 1, "logprobs": 2, **SAMPLED}),
    ("completions", {"max_tokens": 0, "echo": True, "logprobs": 1, **SAMPLED}),
    ("chat/completions", {"logprobs": True, "top_logprobs": 2, "max_tokens": 24, "repetition_penalty": 1.3, "temperature": 0}),
    ("chat/completions", {"stop": [" river", "\n"], "min_tokens": 6, "max_tokens": 24, "frequency_penalty": 0.5, **SAMPLED}),
    ("chat/completions", {"bad_words": ["Amazon", "Nile", "the"], "ignore_eos": True, "max_tokens": 24, "temperature": 0}),
    ("chat/completions", {"min_p": 0.1, "top_k": 30, "max_tokens": 20, "n": 2, "temperature": 1.2, "seed": 4}),
]
STREAMED = [BODIES[index] for index in (0, 4, 6, 8)]


def at_once(ask: Callable[[tuple[str, dict[str, Any]]], T], bodies: list[tuple[str, dict[str, Any]]]) -> list[T]:
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(ask, bodies))


def post(cluster: Cluster, path: str, fields: dict[str, Any]) -> dict[str, Any]:
    content = {"messages": CHAT} if path.startswith("chat") else {"prompt": PROMPT}
    reply = httpx.post(f"{cluster.url}/v1/{path}", json={"model": cluster.config.model_name, **content, **fields}, timeout=60)
    assert reply.status_code == 200, reply.text
    body: dict[str, Any] = reply.json()
    return body


def essence(body: dict[str, Any]) -> dict[str, Any]:
    usage = {name: count for name, count in body["usage"].items() if name != "prompt_tokens_details"}
    return {"choices": body["choices"], "usage": usage}


def test_bodies_are_the_same_handed_off_and_colocated() -> None:
    with serving("local", *FP32) as cluster:
        handed_off = at_once(lambda body: post(cluster, *body), BODIES)
        prefills = [side for body in handed_off[:2] for side in sides(timeline(cluster, body["id"]), "prefill")]
        assert prefills and all(side["reused_device_tokens"] + side["reused_store_tokens"] == 0 for side in prefills)  # prompt logprobs reuse nothing
        shared = post(cluster, "completions", {"prompt": "Something else. " + PROMPT, "n": 4, "max_tokens": 12, **SAMPLED})
        computed = [sides(timeline(cluster, shared["id"] + suffix), "prefill")[0]["computed_prompt_tokens"] for suffix in ("", ".1", ".2", ".3")]
    with serving("colocated", *FP32) as cluster:
        colocated = at_once(lambda body: post(cluster, *body), BODIES)
        streamed = at_once(lambda body: _streamed(cluster, *body), STREAMED)
    for (_, fields), one, other in zip(BODIES, handed_off, colocated, strict=True):
        assert essence(one) == essence(other), fields
    whole = [[_text(choice) for choice in body["choices"]] for asked, body in zip(BODIES, colocated, strict=True) if asked in STREAMED]
    assert streamed == whole
    prompt_tokens = shared["usage"]["prompt_tokens"]
    assert sum(computed) <= prompt_tokens + 3 * 32 and max(computed) == prompt_tokens
    assert shared["usage"]["completion_tokens"] == 48 and len({choice["text"] for choice in shared["choices"]}) > 1


def _text(choice: dict[str, Any]) -> str:
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def _streamed(cluster: Cluster, path: str, fields: dict[str, Any]) -> list[str]:
    content = {"messages": CHAT} if path.startswith("chat") else {"prompt": PROMPT}
    texts: dict[int, str] = {}
    with httpx.stream("POST", f"{cluster.url}/v1/{path}", json={"model": cluster.config.model_name, "stream": True, **content, **fields}, timeout=60) as reply:
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            choice = httpx.Response(200, content=line[6:]).json()["choices"][0]
            piece = choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
            texts[choice["index"]] = texts.get(choice["index"], "") + piece
    return [texts[index] for index in sorted(texts)]
