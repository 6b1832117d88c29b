"""The product's promise on the real model, in fp32: disaggregated == reused == batched == colocated == chunked == transformers, token for token.

Ties (top-2 logits closer than 5e-4 in transformers' own run) may part ways; they are counted and bounded. `make test` runs 15 prompts, `-m slow` all 50.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import Answer, ask_all, differing, serving, sides, timeline

from cluster.local import Cluster

pytestmark = pytest.mark.timeout(900)
GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "golden.json").read_text())["answers"]
FP32 = ("engine.dtype=float32", "engine.kv_cache_bytes=1073741824", "store.capacity_bytes=1073741824")
BLOCK = 32


def choose(count: int) -> list[dict[str, Any]]:
    """Evenly over the kinds of prompt, one long one included."""
    longest = max(GOLDEN, key=lambda entry: len(entry["prompt"]))
    others = [entry for entry in GOLDEN if len(entry["prompt"]) < 700]
    return [longest, *others[:: max(1, len(others) // (count - 1))]][:count]


@pytest.fixture(scope="module", params=[pytest.param(15, id="15"), pytest.param(50, id="all", marks=pytest.mark.slow)])
def golden(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return GOLDEN if request.param == 50 else choose(request.param)


@pytest.fixture(scope="module")
def disaggregated() -> Iterator[Cluster]:
    with serving("local", *FP32) as cluster:
        yield cluster


def check(golden: list[dict[str, Any]], answers: list[Answer], how: str) -> None:
    """Every answer is the golden one; at most 2 in 50 part at a tie. Prints the count."""
    outcomes = {entry["name"]: differing(entry, answer.tokens) for entry, answer in zip(golden, answers, strict=True)}
    wrong = {name: outcome for name, outcome in outcomes.items() if outcome not in ("", "tie")}
    ties = [name for name, outcome in outcomes.items() if outcome == "tie"]
    print(f"{how}: {len(golden) - len(wrong) - len(ties)} of {len(golden)} equal, {len(ties)} part at a tie, {len(wrong)} wrong")
    assert not wrong, wrong
    assert len(ties) <= 2


def test_disaggregated_equals_transformers_and_kv_really_moved(golden: list[dict[str, Any]], disaggregated: Cluster) -> None:
    """Bytes on the wire = filled tokens x token bytes, once pushed and once pulled; the decode worker computes no prompt token."""
    prompts = [entry["prompt"] for entry in golden]
    answers = ask_all(disaggregated, prompts)
    check(golden, answers, "disaggregated")
    token_bytes = 30 * 3 * 64 * 2 * 4
    seen: set[tuple[int, ...]] = set()
    for prompt, answer in zip(prompts, answers, strict=True):
        body = timeline(disaggregated, answer.request_id)
        if len(answer.tokens) == 1:
            continue
        (prefill,), (decode,) = sides(body, "prefill"), sides(body, "decode")
        full = [tuple(prompt[: end + BLOCK]) for end in range(0, len(prompt) - BLOCK + 1, BLOCK)]
        fresh = [prefix for prefix in full if prefix not in seen]
        seen.update(full)
        rest = len(prompt) % BLOCK
        assert prefill["pushed_blocks"] == len(fresh) + (rest > 0)
        assert prefill["pushed_bytes"] == (len(fresh) * BLOCK + rest) * token_bytes
        assert decode["computed_prompt_tokens"] <= 1
        assert decode["recomputed_tokens"] == 0
        assert decode["pulled_bytes"] == (len(prompt) - decode["reused_device_tokens"]) * token_bytes
        assert prefill["computed_prompt_tokens"] + prefill["reused_device_tokens"] + prefill["reused_store_tokens"] == len(prompt)
        assert prefill["transport"] == "nixl" and prefill["codec"] == "raw"


def test_prefix_reuse_equals_and_cached_tokens_are_true(golden: list[dict[str, Any]], disaggregated: Cluster) -> None:
    prompts = [entry["prompt"] for entry in golden]
    ask_all(disaggregated, prompts, at_once=4)
    answers = ask_all(disaggregated, prompts)
    check(golden, answers, "after prefix reuse")
    for prompt, answer in zip(prompts, answers, strict=True):
        whole_blocks = len(prompt) // BLOCK * BLOCK
        assert answer.cached_tokens == whole_blocks
        assert sides(timeline(disaggregated, answer.request_id), "prefill")[0]["computed_prompt_tokens"] == max(1, len(prompt) - whole_blocks)


def test_sixteen_at_once_equal(golden: list[dict[str, Any]], disaggregated: Cluster) -> None:
    several = (golden * 2)[:16] if len(golden) < 16 else golden
    check(several, ask_all(disaggregated, [entry["prompt"] for entry in several], at_once=16), "sixteen at once")


def test_colocated_and_chunked_equal(golden: list[dict[str, Any]]) -> None:
    """One worker, both phases, prompts cut into chunks of 48 tokens beside running decodes."""
    with serving("colocated", *FP32, "engine.chunk_tokens=48", "engine.max_num_batched_tokens=64") as cluster:
        answers = ask_all(cluster, [entry["prompt"] for entry in golden], at_once=4)
        check(golden, answers, "colocated, chunked, four at once")
        for answer in answers:
            assert not sides(timeline(cluster, answer.request_id), "prefill")
