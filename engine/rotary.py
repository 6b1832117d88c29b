"""Rotary position angles as a table: computed once in fp32, read by position. Knows nothing of the kernels that apply them."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model_config import Llama3Scaling, ModelConfig


@dataclass(frozen=True, slots=True)
class Rotary:
    """cos and sin, fp32 [max_positions, head_dim / 2], of position * frequency."""

    cos: Tensor
    sin: Tensor

    @staticmethod
    def of(config: ModelConfig) -> "Rotary":
        frequencies = 1.0 / config.rope_theta ** (torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim)
        if config.rope_scaling is not None:
            frequencies = _stretch(frequencies, config.rope_scaling)
        angles = torch.arange(config.max_position_embeddings).float()[:, None] * frequencies[None, :]
        return Rotary(angles.cos(), angles.sin())


def _stretch(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Llama 3's rule: long wavelengths are divided by the factor, short ones kept, those between blended."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)  # over the original context
    blend = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0.0, 1.0)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies
