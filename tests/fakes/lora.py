"""Adapters as PEFT writes them, random, and the plain merge of one into a model's weights: the oracle."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.lora import module_shapes
from engine.model_config import ModelConfig

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(folder: Path, model_path: Path, seed: int = 0, rank: int = 4, modules: tuple[str, ...] = ALL, size: float = 0.3, **config: Any) -> Path:
    """`config`: fields of adapter_config.json beside the common ones."""
    model = ModelConfig.load(model_path)
    generator = torch.Generator().manual_seed(1000 + seed)
    ranks = config.get("rank_pattern") or {}
    tensors: dict[str, Tensor] = {}
    for layer in range(model.num_layers):
        for module in modules:
            outputs, inputs = module_shapes(model)[module]
            name = f"base_model.model.{_full(layer, module)}"
            r = ranks.get(module, rank)
            tensors[f"{name}.lora_A.weight"] = torch.randn(r, inputs, generator=generator) * size
            tensors[f"{name}.lora_B.weight"] = torch.randn(outputs, r, generator=generator) * size
    folder.mkdir(parents=True, exist_ok=True)
    common = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(modules), "bias": "none", "use_rslora": False, "use_dora": False}
    (folder / "adapter_config.json").write_text(json.dumps(common | config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merged(state: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """The model's weights with the adapter's products added."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    state = dict(state)
    for key in [key for key in tensors if ".lora_A." in key]:
        a, b = tensors[key], tensors[key.replace("lora_A", "lora_B")]
        module = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        alpha = (config.get("alpha_pattern") or {}).get(module.rpartition(".")[2], config["lora_alpha"])
        scale = alpha / (math.sqrt(len(a)) if config["use_rslora"] else len(a))
        state[f"{module}.weight"] = state[f"{module}.weight"] + scale * b @ a
    return state


def _full(layer: int, module: str) -> str:
    return f"model.layers.{layer}.{'self_attn' if module in ('q_proj', 'k_proj', 'v_proj', 'o_proj') else 'mlp'}.{module}"
