"""How far bf16 logits are from fp32 on the real model, beside transformers' own bf16."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.batch import Batch
from engine.config import EngineConfig
from engine.model_config import ModelConfig
from engine.runner import open_runner

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "golden.json").read_text())["answers"]
PROMPTS = [entry["prompt"] for entry in GOLDEN if len(entry["prompt"]) < 300][::4]


def our_logits(path: Path, dtype: str, prompts: list[list[int]], weights: str = "auto") -> list[torch.Tensor]:
    """Logits [T, vocabulary] of every position of each prompt."""
    config = EngineConfig(dtype=dtype, weights=weights, threads=2)  # type: ignore[arg-type]
    model = ModelConfig.load(path)
    num_blocks = 16
    runner = open_runner(config, path, model, np.zeros(num_blocks * model.layout(config.block_tokens, dtype).block_bytes, np.uint8))
    logits = []
    for prompt in prompts:
        count = torch.tensor([len(prompt)], dtype=torch.int32)
        rows = torch.arange(len(prompt))
        table = torch.arange(num_blocks, dtype=torch.int32).view(1, -1)
        starts = torch.tensor([0, len(prompt)], dtype=torch.int32)
        logits.append(runner.run(Batch(torch.tensor(prompt), rows, rows, table, starts, count, rows)).clone())
    return logits


def their_logits(path: Path, dtype: torch.dtype, prompts: list[list[int]]) -> list[torch.Tensor]:
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    with torch.inference_mode():
        return [model(torch.tensor([prompt])).logits[0].float() for prompt in prompts]


@pytest.mark.timeout(300)
def test_bf16_is_as_near_to_fp32_as_transformers_own_bf16(smollm2_path: Path) -> None:
    torch.set_num_threads(2)
    exact = their_logits(smollm2_path, torch.float32, PROMPTS)
    theirs, ours = their_logits(smollm2_path, torch.bfloat16, PROMPTS), our_logits(smollm2_path, "bfloat16", PROMPTS)
    fp32, w8a8 = our_logits(smollm2_path, "float32", PROMPTS), our_logits(smollm2_path, "bfloat16", PROMPTS, "w8a8")
    distance = {
        name: float(torch.stack([(some - true).square().mean() for some, true in zip(logits, exact, strict=True)]).mean().sqrt())
        for name, logits in (("transformers bf16", theirs), ("ours bf16", ours), ("ours fp32", fp32), ("ours w8a8", w8a8))
    }
    print({name: round(value, 6) for name, value in distance.items()})
    assert distance["ours bf16"] <= 0.6 * distance["transformers bf16"]
    assert distance["ours bf16"] < distance["ours w8a8"] < 4 * distance["transformers bf16"]
    assert distance["ours fp32"] < 1e-3
