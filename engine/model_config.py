"""A model's shape, read from a Hugging Face config.json. Free of torch: the controller derives the block layout from it.

Invariant: a ModelConfig that loaded is one that engine.model computes exactly; anything else is refused here, by name.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.layout import BlockLayout
from protocol.errors import ConfigError

ARCHITECTURES = ("LlamaForCausalLM",)
MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Scaling | None
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool

    @staticmethod
    def load(folder: Path) -> "ModelConfig":
        """Of a folder with a config.json. Raises ConfigError: unreadable, or a model that we do not compute."""
        path = folder / "config.json"
        try:
            raw = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: not a model configuration: {error}") from error
        if not isinstance(raw, dict):
            raise ConfigError(f"{path}: not a model configuration: no object")
        return ModelConfig.parse(raw)

    @staticmethod
    def parse(raw: dict[str, Any]) -> "ModelConfig":
        """Of the content of a config.json. Raises ConfigError naming what is missing or unsupported."""
        _check_supported(raw)
        rope = raw.get("rope_parameters") or {**(raw.get("rope_scaling") or {}), "rope_theta": raw.get("rope_theta", 10000.0)}
        try:
            num_heads = int(raw["num_attention_heads"])
            config = ModelConfig(
                vocab_size=int(raw["vocab_size"]),
                hidden_size=int(raw["hidden_size"]),
                intermediate_size=int(raw["intermediate_size"]),
                num_layers=int(raw["num_hidden_layers"]),
                num_heads=num_heads,
                num_kv_heads=int(raw.get("num_key_value_heads") or num_heads),
                head_dim=int(raw.get("head_dim") or int(raw["hidden_size"]) // num_heads),
                max_position_embeddings=int(raw.get("max_position_embeddings", 2048)),
                rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
                rope_theta=float(rope.get("rope_theta", 10000.0)),
                rope_scaling=_scaling(rope),
                tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
                attention_bias=bool(raw.get("attention_bias", False)),
                mlp_bias=bool(raw.get("mlp_bias", False)),
            )
        except KeyError as error:
            raise ConfigError(f"config.json: {error.args[0]} is missing", field=str(error.args[0])) from error
        except (TypeError, ValueError) as error:
            raise ConfigError(f"config.json: {error}") from error
        _check_shape(config)
        return config

    def layout(self, block_tokens: int, dtype: str) -> BlockLayout:
        return BlockLayout(num_layers=self.num_layers, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, block_tokens=block_tokens, dtype=dtype)


def _check_supported(raw: dict[str, Any]) -> None:
    architectures = raw.get("architectures") or []
    if not any(name in ARCHITECTURES for name in architectures):
        raise ConfigError(f"architecture {', '.join(architectures) or 'unknown'} is not supported, only {', '.join(ARCHITECTURES)}", field="architectures")
    if raw.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"hidden_act {raw['hidden_act']!r} is not supported, only 'silu'", field="hidden_act")
    if raw.get("quantization_config"):
        raise ConfigError("quantised weights (quantization_config) are not supported", field="quantization_config")


def _check_shape(config: ModelConfig) -> None:
    if config.num_heads % config.num_kv_heads:
        raise ConfigError(f"{config.num_heads} attention heads are no multiple of {config.num_kv_heads} KV heads", field="num_key_value_heads")
    if config.hidden_size % 2 or config.intermediate_size % 2:
        raise ConfigError("hidden_size and intermediate_size must be even", field="hidden_size")
    if config.head_dim % 2 or config.head_dim > MAX_HEAD_DIM:
        raise ConfigError(f"head_dim {config.head_dim} is not supported: even and at most {MAX_HEAD_DIM}", field="head_dim")


def _scaling(rope: dict[str, Any]) -> Llama3Scaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ConfigError(f"rotary scaling {kind!r} is not supported, only 'default' and 'llama3'", field="rope_scaling")
    return Llama3Scaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_position_embeddings=int(rope["original_max_position_embeddings"]),
    )
