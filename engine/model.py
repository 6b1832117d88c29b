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
from engine.linear import load_format
from engine.model_config import ModelConfig
from engine.rotary import Rotary
from engine.weights import LayerWeights, Weights, load_weights


@dataclass(frozen=True, slots=True)
class Flow:
    """What flows between the layers, for some rows; every layer overwrites it. The residual stream is fp32 whatever the activations are."""

    residual: Tensor  # [T, hidden], fp32
    update: Tensor  # [T, hidden], fp32: what is added to it next
    hidden: Tensor  # [T, hidden]: normed
    gate_up: Tensor  # [T, 2 intermediate]
    product: Tensor  # [T, intermediate]

    @staticmethod
    def of(residual: Tensor, update: Tensor, config: ModelConfig, dtype: torch.dtype) -> "Flow":
        widths = (config.hidden_size, 2 * config.intermediate_size, config.intermediate_size)
        return Flow(residual, update, *(torch.empty(len(residual), width, dtype=dtype) for width in widths))


class Rows:
    """A flow as the kernels take it, and what adapters add to it."""

    def __init__(self, flow: Flow, config: ModelConfig, adaptation: Adaptation) -> None:
        self.flow = flow
        self.adaptation = adaptation
        self._config = config
        self.residual, self.update, self.hidden = Array(flow.residual), Array(flow.update), Array(flow.hidden)
        self.gate_up, self.product = Array(flow.gate_up), Array(flow.product)

    def among(self, wanted: Tensor) -> "Rows":
        """The same where only the rows `wanted` are left, in that order."""
        flow = Flow.of(self.flow.residual[wanted], self.flow.update[wanted], self._config, self.flow.hidden.dtype)
        return Rows(flow, self._config, self.adaptation.among(wanted))


class LlamaModel:
    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self._config = config
        self._weights = weights
        self.rotary = Rotary.of(config)
        self._threads = torch.get_num_threads()

    @staticmethod
    def load(folder: Path, config: ModelConfig, weights: str) -> "LlamaModel":
        """`weights`: a row of LINEARS. Computes on as many threads as torch has now. Raises ConfigError as load_weights does."""
        return LlamaModel(config, load_weights(folder, config, load_format(weights)))

    @torch.inference_mode()
    def forward(self, batch: Batch, pool: Tensor, attention: Attention) -> Tensor:
        """fp32 logits [R, vocabulary] of the batch's logit_rows; afterwards `pool` [num_blocks, KH, L, 2, B, D] holds the K/V of its tokens."""
        wanted = batch.logit_rows if batch.hidden is None else torch.cat((batch.logit_rows, batch.hidden.rows))
        config, layers = self._config, self._weights.layers
        embedded = F.embedding(batch.tokens, self._weights.embedding)
        flow = Flow.of(embedded.float(), torch.empty(embedded.shape), config, embedded.dtype)
        rows = Rows(flow, config, Adaptation(batch.adapters, self._threads))
        step = self._step(batch, pool, embedded)
        out = step.out.flatten(1)
        qkv, attended, attend = Array(step.qkv), Array(out), attention.begin(step)
        headrace_native.rms_norm(rows.hidden, rows.residual, layers[0].input_norm, config.rms_norm_eps, self._threads)
        for index, layer in enumerate(layers):
            layer.qkv(qkv, rows.hidden, self._threads)
            rows.adaptation.add(index, "qkv", step.qkv, rows.flow.hidden)
            attend(index)
            layer.output(rows.update, attended, self._threads)
            rows.adaptation.add(index, "output", rows.flow.update, out)
            if index + 1 == len(layers):  # from here on only the rows that somebody wants
                rows = rows.among(wanted)
            self._feed_forward(layer, rows, index)
            self._add_norm(rows, self._weights.norm if index + 1 == len(layers) else layers[index + 1].input_norm)
        logits = torch.empty(len(batch.logit_rows), config.vocab_size)
        self._weights.head(Array(logits), Array(rows.flow.hidden[: len(logits)]), self._threads)
        if batch.hidden is not None:
            batch.hidden.values = rows.flow.hidden[len(logits) :].float()
        return logits

    def _step(self, batch: Batch, pool: Tensor, like: Tensor) -> Step:
        config = self._config
        qkv = like.new_empty(len(like), (config.num_heads + 2 * config.num_kv_heads) * config.head_dim)
        out = like.new_empty(len(like), config.num_heads, config.head_dim)
        return Step(batch, pool, self.rotary, qkv, out, config.head_dim**-0.5)

    def _feed_forward(self, layer: LayerWeights, rows: Rows, index: int) -> None:
        """Adds rows.update (the attention's result) to the residual; rows.update is then what the layer adds next."""
        self._add_norm(rows, layer.post_norm)
        layer.gate_up(rows.gate_up, rows.hidden, self._threads)
        rows.adaptation.add(index, "gate_up", rows.flow.gate_up, rows.flow.hidden)
        headrace_native.silu_mul(rows.product, rows.gate_up, self._threads)
        layer.down(rows.update, rows.product, self._threads)
        rows.adaptation.add(index, "down", rows.flow.update, rows.flow.product)

    def _add_norm(self, rows: Rows, weight: Array) -> None:
        headrace_native.add_rms_norm(rows.hidden, rows.residual, rows.update, weight, self._config.rms_norm_eps, self._threads)
