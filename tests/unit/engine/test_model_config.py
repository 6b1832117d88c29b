"""Which models are taken, and how the others are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.model_config import Llama3Scaling, ModelConfig
from protocol.errors import ConfigError

RAW: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 96,
    "intermediate_size": 200,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "rope_theta": 5000.0,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def test_fields_and_defaults() -> None:
    config = ModelConfig.parse(RAW)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (3, 6, 2, 16)
    assert (config.rope_theta, config.rope_scaling, config.tie_word_embeddings) == (5000.0, None, False)


def test_layout_is_the_blocks() -> None:
    layout = ModelConfig.parse(RAW).layout(64, "bfloat16")
    assert layout.shape == (2, 3, 2, 64, 16)
    assert layout.block_bytes == 2 * 3 * 2 * 64 * 16 * 2


def test_llama3_scaling_in_both_spellings() -> None:
    expected = Llama3Scaling(8.0, 1.0, 4.0, 8192)
    old = ModelConfig.parse(RAW | {"rope_scaling": LLAMA3})
    new = ModelConfig.parse(RAW | {"rope_theta": None, "rope_parameters": LLAMA3 | {"rope_theta": 5000.0}})
    assert old == new
    assert old.rope_scaling == expected


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"architectures": None}, "architecture"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "yarn"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        ({"quantization_config": {"bits": 4}}, "quant"),
        ({"num_key_value_heads": 4}, "KV heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"vocab_size": "many"}, "many"),
    ],
)
def test_what_we_cannot_compute_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ModelConfig.parse(RAW | change)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ConfigError, match="vocab_size"):
        ModelConfig.parse({key: value for key, value in RAW.items() if key != "vocab_size"})


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_an_unreadable_file_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        ModelConfig.load(tmp_path)


def test_load_reads_the_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    assert ModelConfig.load(tmp_path) == ModelConfig.parse(RAW)
