"""A runner without a model: the next token is a hash of the whole context *as read through the block tables*. For tests of everything around the model.

Invariant: a wrong, missing or foreign block changes the answer, as with a real model; rows do not influence each other.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import Batch
from engine.config import EngineConfig
from engine.model_config import ModelConfig
from protocol.errors import ConfigError


class FakeRunner:
    """The token id is written over all elements of its position; layout and vocabulary are the model's."""

    def __init__(self, config: EngineConfig, model_path: Path, model: ModelConfig, pool: npt.NDArray[np.uint8]) -> None:
        layout = model.layout(config.block_tokens, config.dtype)
        self.vocab_size = model.vocab_size
        self._block_tokens = config.block_tokens
        planes = layout.num_kv_heads * layout.num_layers * 2
        self._pool = pool.view(np.int32).reshape(-1, planes, layout.block_tokens, layout.token_bytes // 4 // planes)

    def run(self, batch: Batch) -> torch.Tensor:
        if batch.adapters:
            raise ConfigError("the fake runner knows no adapters")
        slots, tokens = batch.slots.numpy(), batch.tokens.numpy()
        written = slots >= 0
        blocks, offsets = np.divmod(slots[written], self._block_tokens)
        self._pool[blocks, :, offsets, :] = tokens[written, None, None]
        starts, lengths, tables = batch.query_starts.numpy(), batch.context_lens.numpy(), batch.block_tables.numpy()
        logits = torch.zeros(len(batch.logit_rows), self.vocab_size)
        for index, row in enumerate(batch.logit_rows.tolist()):
            sequence = int(np.searchsorted(starts, row, side="right")) - 1
            length = int(lengths[sequence]) - (int(starts[sequence + 1]) - 1 - row)
            logits[index, self._next_token(tables[sequence], length)] = 1.0
        if batch.hidden is not None:
            batch.hidden.values = torch.nn.functional.one_hot(batch.tokens[batch.hidden.rows] % 8, 8).float()
        return logits

    def _next_token(self, table: npt.NDArray[np.int32], length: int) -> int:
        num_blocks = -(-length // self._block_tokens)
        kv = self._pool[table[:num_blocks]]  # [blocks, planes, tokens, items]
        context = kv.transpose(0, 2, 1, 3).reshape(num_blocks * self._block_tokens, -1)[:length].astype(np.int64)
        weights = (np.arange(length) * 2654435761 + 12345) % 1000003
        return int((context.mean(axis=1).round().astype(np.int64) * weights).sum() % self.vocab_size)
