"""The Llama family's forward pass over a batch of any mix of sequences. Owns the weights; the KV pool is the caller's.

Knows nothing of requests, sampling or scheduling. Invariant: with native attention a token's logits depend on its sequence alone, bitwise:
not on the batch, the chunk or the number of threads that computed it.
"""

from pathlib import Path

import headrace_native
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention import Attention
from engine.batch import Batch
from engine.model_config import ModelConfig
from engine.rotary import Rotary
from engine.weights import LayerWeights, Linear, Weights, load_weights


class LlamaModel:
    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self._config = config
        self._weights = weights
        self._rotary = Rotary.of(config)
        self._threads = torch.get_num_threads()

    @staticmethod
    def load(folder: Path, config: ModelConfig, dtype: torch.dtype) -> "LlamaModel":
        """Computes in `dtype` (bf16 or fp32) on as many threads as torch has now. Raises ConfigError as load_weights does."""
        return LlamaModel(config, load_weights(folder, config, dtype))

    @torch.inference_mode()
    def forward(self, batch: Batch, pool: Tensor, attention: Attention) -> Tensor:
        """fp32 logits [R, vocabulary] of the batch's logit_rows; afterwards `pool` [num_blocks, KH, L, 2, B, D] holds the K/V of its tokens."""
        residual = F.embedding(batch.tokens, self._weights.embedding)
        hidden = torch.empty_like(residual)
        last = self._config.num_layers - 1
        headrace_native.rms_norm(hidden, residual, self._weights.layers[0].input_norm, self._config.rms_norm_eps, self._threads)
        for index, layer in enumerate(self._weights.layers):
            attended = self._attend(layer, index, hidden, batch, pool, attention)
            if index == last:
                residual, attended = residual[batch.logit_rows], attended[batch.logit_rows]
                hidden = torch.empty_like(residual)
            self._add_norm(hidden, residual, attended, layer.post_norm)
            next_norm = self._weights.norm if index == last else self._weights.layers[index + 1].input_norm
            self._add_norm(hidden, residual, self._feed_forward(layer, hidden), next_norm)
        return self._linear(hidden, self._weights.head, torch.float32)

    def _attend(self, layer: LayerWeights, index: int, hidden: Tensor, batch: Batch, pool: Tensor, attention: Attention) -> Tensor:
        config = self._config
        qkv = self._linear(hidden, layer.qkv)
        attention.store(qkv, self._rotary, pool, index, batch)
        q = qkv.view(qkv.shape[0], -1, config.head_dim)[:, : config.num_heads]
        out = q.new_empty(q.shape)
        attention.attend(out, q, pool, index, batch, config.head_dim**-0.5)
        return self._linear(out.view(out.shape[0], -1), layer.output)

    def _feed_forward(self, layer: LayerWeights, hidden: Tensor) -> Tensor:
        gate_up = self._linear(hidden, layer.gate_up)
        product = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        headrace_native.silu_mul(product, gate_up, self._threads)
        return self._linear(product, layer.down)

    def _linear(self, x: Tensor, layer: Linear, dtype: torch.dtype | None = None) -> Tensor:
        """x [T, K] -> [T, N], of x's dtype or the one named: the one place where matrices are multiplied."""
        out = x.new_empty((x.shape[0], layer.outputs), dtype=dtype)
        headrace_native.linear(out, x, layer.packed, layer.bias, self._threads)
        return out

    def _add_norm(self, hidden: Tensor, residual: Tensor, x: Tensor, weight: Tensor) -> None:
        headrace_native.add_rms_norm(hidden, residual, x, weight, self._config.rms_norm_eps, self._threads)
