"""LlamaModel against transformers on tiny random models: the whole prompt, in chunks, token by token, and in mixed batches."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from engine.attention import ATTENTION, Attention, load_attention
from engine.batch import Batch
from engine.model import LlamaModel
from engine.model_config import ModelConfig
from protocol.errors import ConfigError

BLOCK = 32
SMALL = {"vocab_size": 300, "hidden_size": 96, "intermediate_size": 200, "num_hidden_layers": 3, "max_position_embeddings": 512}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "grouped, tied": {"num_attention_heads": 6, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "one to one": {"num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": False},
    "biased, own head dim": {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32, "attention_bias": True, "mlp_bias": True},
    "llama 3 rope": {"num_attention_heads": 6, "num_key_value_heads": 3, "rope_parameters": LLAMA3_ROPE},
}


def save_random(folder: Path, config: dict[str, Any], **options: Any) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMALL | config, initializer_range=0.15))
    for parameter in model.parameters():  # norms and biases that matter
        if parameter.dim() == 1:
            parameter.data += torch.randn_like(parameter) * 0.2
    model.save_pretrained(folder, **options)


class Served:
    """A model with a pool, and the sequences in it; `steps` computes any tokens of any of them."""

    def __init__(self, folder: Path, dtype: torch.dtype, attention: Attention, prompts: list[list[int]]) -> None:
        config = ModelConfig.load(folder)
        self.model = LlamaModel.load(folder, config, {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype])
        self.attention = attention
        self.prompts = prompts
        self.blocks = max(-(-len(prompt) // BLOCK) for prompt in prompts)
        layout = config.layout(BLOCK, "float32")
        self.pool = torch.full((self.blocks * len(prompts), *layout.shape), float("nan"), dtype=dtype)

    def steps(self, ranges: list[tuple[int, int, int]]) -> list[Tensor]:
        """Logits of tokens [first, last) of each (sequence, first, last), in one batch."""
        rows = [(s, position) for s, first, last in ranges for position in range(first, last)]
        starts = [0]
        for _, first, last in ranges:
            starts.append(starts[-1] + last - first)
        tables = [[s + len(self.prompts) * i for i in range(self.blocks)] for s, _, _ in ranges]
        batch = Batch(
            tokens=torch.tensor([self.prompts[s][position] for s, position in rows]),
            positions=torch.tensor([position for _, position in rows]),
            slots=torch.tensor([(s + len(self.prompts) * (position // BLOCK)) * BLOCK + position % BLOCK for s, position in rows]),
            block_tables=torch.tensor(tables, dtype=torch.int32),
            query_starts=torch.tensor(starts, dtype=torch.int32),
            context_lens=torch.tensor([last for _, _, last in ranges], dtype=torch.int32),
            logit_rows=torch.arange(len(rows)),
        )
        return list(self.model.forward(batch, self.pool, self.attention).split([last - first for _, first, last in ranges]))


def random_prompts() -> list[list[int]]:
    torch.manual_seed(1)
    return [torch.randint(0, SMALL["vocab_size"], (length,)).tolist() for length in (75, 1, 32, 130)]


def expected_logits(folder: Path, dtype: torch.dtype, prompts: list[list[int]]) -> list[Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    with torch.inference_mode():
        return [model(torch.tensor([prompt])).logits[0].float() for prompt in prompts]


@pytest.fixture(params=CONFIGS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    save_random(tmp_path, CONFIGS[request.param])
    return tmp_path


@pytest.mark.parametrize("attention", ATTENTION)
def test_fp32_logits_equal_transformers(folder: Path, attention: str) -> None:
    prompts = random_prompts()
    expected = expected_logits(folder, torch.float32, prompts)
    served = Served(folder, torch.float32, load_attention(attention, 1), prompts)
    whole = [served.steps([(s, 0, len(prompt))])[0] for s, prompt in enumerate(prompts)]
    for ours, theirs in zip(whole, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_chunked_batched_and_by_one_equal_transformers(folder: Path) -> None:
    prompts = random_prompts()
    expected = expected_logits(folder, torch.float32, prompts)
    served = Served(folder, torch.float32, load_attention("native", 2), prompts)
    parts: list[list[Tensor]] = [[] for _ in prompts]
    mixed = [[(0, 0, 50), (1, 0, 1)], [(0, 50, 70), (3, 0, 100)], [(0, 70, 71), (2, 0, 32), (3, 100, 101)]]
    mixed += [[(3, position, position + 1)] + ([(0, position - 30, position - 29)] if position < 105 else []) for position in range(101, 130)]
    for ranges in mixed:
        for (s, _, _), logits in zip(ranges, served.steps(ranges), strict=True):
            parts[s].append(logits)
    for ours, theirs in zip(parts, expected, strict=True):
        torch.testing.assert_close(torch.cat(ours), theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_are_bitwise_the_same_alone_batched_and_chunked(folder: Path, dtype: torch.dtype) -> None:
    prompts = random_prompts()
    alone = [Served(folder, dtype, load_attention("native", 1), prompts).steps([(s, 0, len(prompt))])[0] for s, prompt in enumerate(prompts)]
    torch.set_num_threads(2)
    served = Served(folder, dtype, load_attention("native", 2), prompts)
    torch.set_num_threads(1)
    batched = served.steps([(s, 0, len(prompt)) for s, prompt in enumerate(prompts)])
    by_one = torch.cat([served.steps([(3, i, i + 1)])[0] for i in range(130)])
    for ours, expected in zip([*batched, by_one], [*alone, alone[3]], strict=True):
        assert torch.equal(ours, expected)


def test_bf16_is_as_near_to_fp32_as_transformers_bf16(folder: Path) -> None:
    prompts = random_prompts()
    exact, theirs = expected_logits(folder, torch.float32, prompts), expected_logits(folder, torch.bfloat16, prompts)
    served = Served(folder, torch.bfloat16, load_attention("native", 1), prompts)
    ours = served.steps([(s, 0, len(prompt)) for s, prompt in enumerate(prompts)])

    def distance(logits: list[Tensor]) -> float:
        return (torch.cat(logits) - torch.cat(exact)).pow(2).mean().sqrt().item()

    assert 0 < distance(ours) < 1.2 * distance(theirs)


def test_only_the_rows_asked_for_get_logits(tmp_path: Path) -> None:
    save_random(tmp_path, CONFIGS["grouped, tied"])
    prompts = random_prompts()
    served = Served(tmp_path, torch.float32, load_attention("native", 1), prompts)
    whole = served.steps([(0, 0, 75)])[0]
    batch = Batch(
        tokens=torch.tensor(prompts[0]),
        positions=torch.arange(75),
        slots=torch.full((75,), -1),
        block_tables=torch.tensor([[0, 4, 8]], dtype=torch.int32),
        query_starts=torch.tensor([0, 75], dtype=torch.int32),
        context_lens=torch.tensor([75], dtype=torch.int32),
        logit_rows=torch.tensor([74, 3]),
    )
    torch.testing.assert_close(served.model.forward(batch, served.pool, served.attention), whole[[74, 3]], atol=1e-5, rtol=0)
    no_logits = replace(batch, logit_rows=torch.zeros(0, dtype=torch.int64))
    assert served.model.forward(no_logits, served.pool, served.attention).shape == (0, SMALL["vocab_size"])


def test_shards_load_as_one_file_does(tmp_path: Path) -> None:
    save_random(tmp_path / "one", CONFIGS["one to one"])
    save_random(tmp_path / "many", CONFIGS["one to one"], max_shard_size="200KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    one, many = (Served(tmp_path / name, torch.float32, load_attention("native", 1), [[5, 6]]).steps([(0, 0, 2)])[0] for name in ("one", "many"))
    assert torch.equal(one, many)


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    save_random(tmp_path, CONFIGS["one to one"])
    config, file = ModelConfig.load(tmp_path), tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file(tensors | {name: torch.zeros(3, 3)}, file)
    with pytest.raises(ConfigError, match=r"up_proj.*\(3, 3\)"):
        LlamaModel.load(tmp_path, config, "fp32")
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, file)
    with pytest.raises(ConfigError, match=r"lack model.layers.1.mlp.up_proj"):
        LlamaModel.load(tmp_path, config, "fp32")
    file.write_bytes(b"none")
    with pytest.raises(ConfigError, match="safetensors"):
        LlamaModel.load(tmp_path, config, "fp32")
    file.unlink()
    with pytest.raises(ConfigError, match="neither"):
        LlamaModel.load(tmp_path, config, "fp32")


REAL = Path(os.path.expanduser("~/.cache/headrace/models/smollm2-135m-instruct"))


@pytest.mark.skipif(not (REAL / "model.safetensors").exists(), reason="smollm2-135m-instruct is not in the model cache: headrace model fetch")
def test_the_real_model_equals_transformers() -> None:
    prompts = [list(range(1000, 1040)), [7, 300, 12]]
    expected = expected_logits(REAL, torch.float32, prompts)
    served = Served(REAL, torch.float32, load_attention("native", 1), prompts)
    for ours, theirs in zip(served.steps([(0, 0, 40), (1, 0, 3)]), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=0)
