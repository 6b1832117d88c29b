"""Adapters and embeddings on a real cluster with the real model, in fp32, against transformers: many adapters at once through hand-offs, loaded and unloaded
over HTTP, their KV reused by their own requests alone; embeddings by mean and last, asked again, through the official client."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from fakes.lora import merged, write_adapter
from serving import TIE, serving, sides, timeline
from transformers import AutoTokenizer, LlamaForCausalLM

from cluster.local import Cluster

pytestmark = pytest.mark.timeout(600)
FP32 = ("engine.dtype=float32", "engine.kv_cache_bytes=268435456", "store.capacity_bytes=268435456")
PROMPT = "The history of the lighthouse begins with open fires that were built on hilltops to guide mariners at sea. " * 3
TEXTS = [PROMPT, "A short one.", "Die Würde des Menschen ist unantastbar."]
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def paths(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        "red": write_adapter(folder / "red", smollm2_path, 1, rank=8, size=0.05),
        "green": write_adapter(folder / "green", smollm2_path, 2, rank=16, modules=("q_proj", "v_proj"), size=0.1, use_rslora=True),
    }


def model_of(smollm2_path: Path, path: Path | None) -> LlamaForCausalLM:
    model = LlamaForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32)
    if path is not None:
        model.load_state_dict(merged(model.state_dict(), path))
    return model


def ask(cluster: Cluster, model: str, prompt: list[int]) -> dict[str, Any]:
    body = {"model": model, "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    reply = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def change(cluster: Cluster, action: str, **body: str) -> int:
    return httpx.post(f"{cluster.url}/v1/{action}_lora_adapter", json=body, timeout=60).status_code


def partings(model: LlamaForCausalLM, prompt: list[int], tokens: list[int]) -> list[int]:
    """Where the tokens are not the model's greedy ones, ties aside."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    best = logits.topk(2).values
    return [i for i, token in enumerate(tokens) if logits[i].argmax() != token and best[i, 0] - best[i, 1] > TIE]


def pooled(model: LlamaForCausalLM, prompt: list[int], kind: str) -> torch.Tensor:
    with torch.no_grad():
        hidden = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1][0]
    return torch.nn.functional.normalize(hidden.mean(dim=0) if kind == "mean" else hidden[-1], dim=0)


def embeddings(cluster: Cluster, model: str, kind: str) -> list[list[float]]:
    client = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="x", timeout=60)
    return [one.embedding for one in client.embeddings.create(model=model, input=TEXTS, extra_body={"pooling": kind}).data]


def test_against_transformers(smollm2_path: Path, paths: dict[str, Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    prompts = [tokenizer(text).input_ids for text in TEXTS]
    with serving("local", *FP32, f"engine.lora.adapters.red={paths['red']}", "router.adapter_changes=true") as cluster:
        base = cluster.config.model_name
        assert change(cluster, "load", lora_name="green", lora_path=str(paths["green"])) == 200
        listed = {model["id"]: model["parent"] for model in httpx.get(f"{cluster.url}/v1/models").json()["data"]}
        assert listed == {base: None, "red": base, "green": base}
        asked = [(model, prompt) for prompt in prompts for model in (base, "red", "green")]
        with ThreadPoolExecutor(9) as pool:
            first = list(pool.map(lambda one: ask(cluster, *one), asked))
        vectors = {(model, kind): embeddings(cluster, model, kind) for model in (base, "green") for kind in ("mean", "last")}
        again = [ask(cluster, *one) for one in asked[:3]]
        repeated = {(model, kind): embeddings(cluster, model, kind) for model, kind in vectors}
        moved = [timeline(cluster, answer["id"]) for answer in first]
        assert change(cluster, "unload", lora_name="green") == 200
        assert change(cluster, "load", lora_name="other", lora_path="/nowhere") == 400
        assert httpx.post(f"{cluster.url}/v1/completions", json={"model": "green", "prompt": "x"}).status_code == 404
    models = {name: model_of(smollm2_path, paths.get(name)) for name in (base, "red", "green")}
    for (name, prompt), answer in zip(asked, first, strict=True):
        tokens = answer["choices"][0]["token_ids"]
        assert len(tokens) == NUM_TOKENS and partings(models[name], prompt, tokens) == []
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0  # the same prompt under another name is another prompt
    tokens_of = {(name, tuple(prompt)): answer["choices"][0]["token_ids"] for (name, prompt), answer in zip(asked, first, strict=True)}
    assert all(any(tokens_of[name, tuple(prompt)] != tokens_of[base, tuple(prompt)] for prompt in prompts) for name in ("red", "green"))
    assert all(sides(body, "prefill")[0]["pushed_bytes"] > 0 and sides(body, "decode")[0]["computed_prompt_tokens"] == 0 for body in moved)
    for answer, before in zip(again, first[:3], strict=True):
        assert answer["choices"] == before["choices"] and answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32
    assert repeated == vectors
    for (name, kind), found in vectors.items():
        for vector, prompt in zip(found, prompts, strict=True):
            torch.testing.assert_close(torch.tensor(vector), pooled(models[name], prompt, kind), rtol=1e-3, atol=2e-5)
