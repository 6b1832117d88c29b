"""The Llama family's forward pass over a batch of any mix of sequences. Owns the weights; the KV pool is the caller's.

Knows nothing of requests, sampling or scheduling. Invariant: with native attention a token's logits depend on its sequence alone, bitwise:
not on the batch, the chunk or the number of threads that computed it.
"""

from dataclasses import dataclass
from pathlib import Path

import headrace_native
import torch
import torch.nn.functional as F
from headrace_native import Array
from torch import Tensor

from engine.adaptation import Adaptation
from engine.attention import Attention, Step
from engine.batch import Batch
from engine.model_config import ModelConfig
from engine.rotary import Rotary
from engine.weights import LayerWeights, Linear, Weights, load_weights


@dataclass(frozen=True, slots=True)
class Rows:
    """What flows between the layers, for some rows; every layer overwrites it."""

    residual: Array  # [T, hidden]
    hidden: Array  # [T, hidden]: normed, then a projection's result
    gate_up: Array  # [T, 2 intermediate]
    product: Array  # [T, intermediate]
    tensors: tuple[Tensor, Tensor, Tensor]  # hidden, gate_up, product: for adapters
    adaptation: Adaptation

    @staticmethod
    def of(residual: Tensor, hidden: Tensor, config: ModelConfig, adaptation: Adaptation) -> "Rows":
        gate_up, product = (residual.new_empty(len(residual), width * config.intermediate_size) for width in (2, 1))
        return Rows(Array(residual), Array(hidden), Array(gate_up), Array(product), (hidden, gate_up, product), adaptation)


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
        wanted = batch.logit_rows if batch.hidden is None else torch.cat((batch.logit_rows, batch.hidden.rows))
        config, layers = self._config, self._weights.layers
        residual = F.embedding(batch.tokens, self._weights.embedding)
        hidden = torch.empty_like(residual)
        rows = Rows.of(residual, hidden, config, Adaptation(batch.adapters, self._threads))
        step = self._step(batch, pool, residual)
        out = step.out.flatten(1)
        qkv, attended, attend = Array(step.qkv), Array(out), attention.begin(step)
        headrace_native.rms_norm(rows.hidden, rows.residual, layers[0].input_norm, config.rms_norm_eps, self._threads)
        for index, layer in enumerate(layers):
            self._linear(qkv, rows.hidden, layer.qkv)
            rows.adaptation.add(index, "qkv", step.qkv, hidden)
            attend(index)
            self._linear(rows.hidden, attended, layer.output)
            rows.adaptation.add(index, "output", hidden, out)
            if index + 1 == len(layers):  # from here on only the rows that somebody wants
                residual, hidden = residual[wanted], hidden[wanted]
                rows = Rows.of(residual, hidden, config, rows.adaptation.among(wanted))
            self._feed_forward(layer, rows, index)
            self._add_norm(rows, self._weights.norm if index + 1 == len(layers) else layers[index + 1].input_norm)
        logits = torch.empty(len(batch.logit_rows), config.vocab_size)
        self._linear(Array(logits), Array(hidden[: len(logits)]), self._weights.head)
        if batch.hidden is not None:
            batch.hidden.values = hidden[len(logits) :].float()
        return logits

    def _step(self, batch: Batch, pool: Tensor, like: Tensor) -> Step:
        config = self._config
        qkv = like.new_empty(len(like), (config.num_heads + 2 * config.num_kv_heads) * config.head_dim)
        out = like.new_empty(len(like), config.num_heads, config.head_dim)
        return Step(batch, pool, self._rotary, qkv, out, config.head_dim**-0.5)

    def _feed_forward(self, layer: LayerWeights, rows: Rows, index: int) -> None:
        """Adds rows.hidden (the attention's result) to the residual; rows.hidden is then what the layer adds next."""
        hidden, gate_up, product = rows.tensors
        self._add_norm(rows, layer.post_norm)
        self._linear(rows.gate_up, rows.hidden, layer.gate_up)
        rows.adaptation.add(index, "gate_up", gate_up, hidden)
        headrace_native.silu_mul(rows.product, rows.gate_up, self._threads)
        self._linear(rows.hidden, rows.product, layer.down)
        rows.adaptation.add(index, "down", hidden, product)

    def _add_norm(self, rows: Rows, weight: Array) -> None:
        headrace_native.add_rms_norm(rows.hidden, rows.residual, rows.hidden, weight, self._config.rms_norm_eps, self._threads)

    def _linear(self, out: Array, x: Array, layer: Linear) -> None:
        """x [T, K] -> out [T, N]: the one place where matrices are multiplied."""
        headrace_native.linear(out, x, layer.packed, layer.bias, self._threads)
