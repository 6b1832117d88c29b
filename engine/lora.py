"""LoRA adapters: PEFT folders read, checked and laid out beside the fused matrices that they change. Knows nothing of requests or batches.

Invariant: y += x A^T B^T with the adapter's scale folded into B; a field of adapter_config.json is used, neutral, harmless, or refused by name.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.arena import Arena
from engine.linear import PlainLinear
from engine.model_config import ModelConfig
from protocol.errors import InvalidRequest

USED = {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"}
# Fields that change what the weights mean, with the values that ask for nothing (null, false, 0 and empty always do).
NEUTRAL: dict[str, tuple[Any, ...]] = {"bias": ("none",), "init_lora_weights": (True, "gaussian", "eva", "orthogonal")}
# Of training alone, or told by the tensors themselves.
HARMLESS = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules", "inference_mode", "layers_pattern",
    "layers_to_transform", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_core", "peft_version", "qalora_group_size", "revision",
    "runtime_config", "target_modules", "task_type",
}  # fmt: skip
_TENSOR = re.compile(r"base_model\.model\.(model\.layers\.(\d+)\.(?:self_attn|mlp)\.(\w+))\.lora_([AB])\.weight")
FUSED = {"qkv": ("q_proj", "k_proj", "v_proj"), "output": ("o_proj",), "gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}


@dataclass(frozen=True, slots=True)
class Delta:
    """What an adapter adds to one fused product. `down`: the parts' A, one below the other; `up`: their scaled B, block by block."""

    down: PlainLinear
    up: PlainLinear
    rank: int


@dataclass(frozen=True, slots=True)
class Adapter:
    """`revision`: a fingerprint of what the folder holds; `layers`: by layer, fused product -> what is added to it."""

    name: str
    revision: str
    path: str
    layers: tuple[Mapping[str, Delta], ...]


def load_adapter(name: str, folder: Path, model: ModelConfig, dtype: torch.dtype, max_rank: int) -> Adapter:
    """Of a PEFT folder: adapter_config.json and adapter_model.safetensors. Raises InvalidRequest, which says what is not supported."""
    raw = _read_config(folder)
    weights = folder / "adapter_model.safetensors"
    if not weights.exists():
        pickled = (folder / "adapter_model.bin").exists()
        raise InvalidRequest(f"{folder}: " + ("adapter_model.bin is a pickle: convert it to safetensors" if pickled else f"{weights.name} is missing"))
    pairs = _read_pairs(weights, model, max_rank)
    scales = {module: _scale(raw, module, pair["A"].shape[0]) for module, pair in pairs.items()}
    arena = Arena()
    layers = tuple(_layer(f"model.layers.{index}", pairs, scales, model, dtype, arena) for index in range(model.num_layers))
    return Adapter(name, _fingerprint(raw, weights), str(folder), layers)


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "adapter_config.json"
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{path}: not an adapter's configuration: {error}") from None
    if not isinstance(raw, dict) or raw.get("peft_type") != "LORA":
        raise InvalidRequest(f"{path}: peft_type must be LORA", field="peft_type")
    for field, value in raw.items():
        if field not in USED | HARMLESS and value and value not in NEUTRAL.get(field, ()):
            raise InvalidRequest(f"{path}: {field} = {json.dumps(value)} is not supported", field=field)
    return raw


def _read_pairs(path: Path, model: ModelConfig, max_rank: int) -> dict[str, dict[str, Tensor]]:
    """Module name -> {"A": [r, inputs], "B": [outputs, r]}, fp32 and finite. What is too large is not read."""
    shapes = module_shapes(model)
    pairs: dict[str, dict[str, Tensor]] = {}
    try:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118  no dictionary
                match = _TENSOR.fullmatch(key)
                if match is None or match[3] not in shapes or int(match[2]) >= model.num_layers:
                    raise InvalidRequest(f"{path}: {key} is not supported: adapters of {', '.join(shapes)} are", field="target_modules")
                kind, shape = file.get_slice(key).get_dtype(), file.get_slice(key).get_shape()
                if kind not in ("F32", "F16", "BF16"):
                    raise InvalidRequest(f"{path}: {key} is of type {kind}: F32, F16 and BF16 are supported")
                if len(shape) == 2 and shape[match[4] == "B"] > max_rank:
                    raise InvalidRequest(f"{path}: {key} has rank {shape[match[4] == 'B']}, above lora.max_rank = {max_rank}", field="r")
                pairs.setdefault(match[1], {})[match[4]] = file.get_tensor(key).float()
    except (SafetensorError, OSError) as error:
        raise InvalidRequest(f"{path}: not a safetensors file: {error}") from None
    if not pairs:
        raise InvalidRequest(f"{path}: holds no adapter")
    for module, pair in pairs.items():
        outputs, inputs = shapes[module.rpartition(".")[2]]
        if set(pair) != {"A", "B"} or pair["A"].ndim != 2 or (pair["A"].shape[1], tuple(pair["B"].shape)) != (inputs, (outputs, pair["A"].shape[0])):
            raise InvalidRequest(f"{path}: {module} does not fit the model: A [r, {inputs}] and B [{outputs}, r] are expected")
        if not all(bool(tensor.isfinite().all()) for tensor in pair.values()):
            raise InvalidRequest(f"{path}: {module} holds values that are not finite")
    return pairs


def module_shapes(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of every module that an adapter may change."""
    hidden, wide = model.hidden_size, model.intermediate_size
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    attention = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, q)}
    return attention | {"gate_proj": (wide, hidden), "up_proj": (wide, hidden), "down_proj": (hidden, wide)}


def _scale(raw: dict[str, Any], module: str, rank: int) -> float:
    """alpha / r, or alpha / sqrt(r) for rsLoRA; patterns as PEFT matches them."""
    expected, alpha = (_of_pattern(raw.get(patterns) or {}, module, raw.get(default)) for patterns, default in _PATTERNS)
    if expected != rank:
        raise InvalidRequest(f"{module}: A has rank {rank}, the configuration says {expected}", field="r")
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise InvalidRequest(f"{module}: lora_alpha = {alpha!r} is no number", field="lora_alpha")
    return alpha / (math.sqrt(rank) if raw.get("use_rslora") else rank)


_PATTERNS = (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha"))


def _of_pattern(patterns: dict[str, Any], module: str, default: Any) -> Any:
    try:
        return next((value for pattern, value in patterns.items() if re.match(rf"(.*\.)?({pattern})$", module)), default)
    except re.error as error:
        raise InvalidRequest(f"rank_pattern or alpha_pattern: {error}", field="rank_pattern") from None


def _layer(name: str, pairs: dict[str, dict[str, Tensor]], scales: dict[str, float], model: ModelConfig, dtype: torch.dtype, arena: Arena) -> dict[str, Delta]:
    shapes = module_shapes(model)
    deltas: dict[str, Delta] = {}
    for fused, parts in FUSED.items():
        modules = [f"{name}.{'mlp' if fused in ('gate_up', 'down') else 'self_attn'}.{part}" for part in parts]
        present = [module for module in modules if module in pairs]
        if present:
            down = torch.cat([pairs[module]["A"] for module in present])
            heights = [shapes[part][0] for part in parts]
            up = torch.zeros(sum(heights), len(down))
            column = 0
            for module, start, height in zip(modules, _starts(heights), heights, strict=True):
                if module in pairs:
                    b = pairs[module]["B"] * scales[module]
                    up[start : start + height, column : column + b.shape[1]] = b
                    column += b.shape[1]
            deltas[fused] = _delta(down, up, dtype, arena)
    return deltas


def _starts(heights: Iterable[int]) -> list[int]:
    starts, total = [], 0
    for height in heights:
        starts.append(total)
        total += height
    return starts


def _delta(down: Tensor, up: Tensor, dtype: torch.dtype, arena: Arena) -> Delta:
    if len(down) % 2:  # packed pairs of bf16
        down = torch.cat([down, torch.zeros(1, down.shape[1])])
        up = torch.cat([up, torch.zeros(len(up), 1)], dim=1)
    return Delta(PlainLinear(down.to(dtype).contiguous(), None, arena), PlainLinear(up.to(dtype).contiguous(), None, arena), len(down))


def _fingerprint(raw: dict[str, Any], weights: Path) -> str:
    digest = hashlib.blake2b(json.dumps({field: raw.get(field) for field in sorted(USED)}, sort_keys=True).encode(), digest_size=8)
    with weights.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
