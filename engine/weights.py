"""A Llama model's weights from safetensors, in the shape that a step wants: q, k, v in one matrix, gate and up in another.

Knows nothing of how they are used. Invariant: every tensor has the shape that the configuration demands, or loading raises.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from headrace_native import Array
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.arena import Arena
from engine.linear import Linear, LinearFormat
from engine.model_config import ModelConfig
from protocol.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LayerWeights:
    input_norm: Array
    qkv: Linear
    output: Linear
    post_norm: Array
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Weights:
    embedding: Tensor
    layers: list[LayerWeights]
    norm: Array
    head: Linear


def load_weights(folder: Path, config: ModelConfig, weights: LinearFormat) -> Weights:
    """From model.safetensors or the shards that model.safetensors.index.json names. Raises ConfigError naming a missing or misshapen tensor."""
    tensors = _Tensors(folder, weights)
    embedding = tensors.read("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    return Weights(
        embedding=embedding,
        layers=[_layer(tensors, f"model.layers.{index}", config) for index in range(config.num_layers)],
        norm=Array(tensors.read("model.norm.weight", config.hidden_size)),
        head=tensors.pack(embedding if config.tie_word_embeddings else tensors.read("lm_head.weight", config.vocab_size, config.hidden_size)),
    )


def _layer(tensors: "_Tensors", name: str, config: ModelConfig) -> LayerWeights:
    hidden, wide = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention, mlp = f"{name}.self_attn", f"{name}.mlp"
    return LayerWeights(
        input_norm=Array(tensors.read(f"{name}.input_layernorm.weight", hidden)),
        qkv=tensors.fused({f"{attention}.q_proj": q, f"{attention}.k_proj": kv, f"{attention}.v_proj": kv}, hidden, config.attention_bias),
        output=tensors.fused({f"{attention}.o_proj": hidden}, q, config.attention_bias),
        post_norm=Array(tensors.read(f"{name}.post_attention_layernorm.weight", hidden)),
        gate_up=tensors.fused({f"{mlp}.gate_proj": wide, f"{mlp}.up_proj": wide}, hidden, config.mlp_bias),
        down=tensors.fused({f"{mlp}.down_proj": hidden}, wide, config.mlp_bias),
    )


class _Tensors:
    """The named tensors of a folder, each read from its file once asked for; matrices packed in the order of reading."""

    def __init__(self, folder: Path, weights: LinearFormat) -> None:
        self._format = weights
        self._arena = Arena()
        self._files: dict[str, Path] = {}
        for path in _safetensors_files(folder):
            try:
                with safe_open(path, framework="pt") as file:
                    self._files.update(dict.fromkeys(file.keys(), path))
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{path}: not a safetensors file: {error}") from error

    def read(self, name: str, *shape: int) -> Tensor:
        if name not in self._files:
            raise ConfigError(f"the model's weights lack {name}")
        with safe_open(self._files[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ConfigError(f"{name} has shape {tuple(tensor.shape)}, the configuration demands {shape}")
        return tensor.to(self._format.dtype).contiguous()

    def fused(self, parts: dict[str, int], width: int, bias: bool) -> Linear:
        """The matrices named, of the heights given, one below the other."""
        weight = torch.cat([self.read(f"{part}.weight", height, width) for part, height in parts.items()])
        return self.pack(weight, torch.cat([self.read(f"{part}.bias", height) for part, height in parts.items()]) if bias else None)

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return self._format.pack(weight, bias, self._arena)


def _safetensors_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if single.exists():
        return [single]
    if not index.exists():
        raise ConfigError(f"{folder}: neither model.safetensors nor {index.name}")
    try:
        return [folder / file for file in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"{index}: not an index of shards: {error}") from error
