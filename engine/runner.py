"""The seam between scheduling and computing: a runner takes a batch and gives logits. Owns nothing; knows nothing of requests."""

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from engine.attention import load_attention
from engine.batch import Batch
from engine.config import EngineConfig
from engine.model import LlamaModel
from engine.model_config import ModelConfig
from protocol.errors import ConfigError


class Runner(Protocol):
    vocab_size: int  # of the logits

    def run(self, batch: Batch) -> torch.Tensor:
        """Logits [R, vocabulary] in fp32 for the batch's `logit_rows`; the KV of its tokens is in the pool afterwards."""
        ...


RUNNERS = {
    "torch": "engine.runner:TorchRunner",
    "fake": "engine.fake_runner:FakeRunner",
}


def open_runner(config: EngineConfig, model_path: Path, model: ModelConfig, pool: npt.NDArray[np.uint8]) -> Runner:
    """A runner over `pool` (raw bytes, whole blocks). Raises ConfigError for an unknown row or a model that it cannot run."""
    if config.runner not in RUNNERS:
        raise ConfigError(f"engine.runner: {config.runner!r} is none of {', '.join(RUNNERS)}", field="engine.runner")
    module, _, attribute = RUNNERS[config.runner].partition(":")
    runner: Runner = getattr(import_module(module), attribute)(config, model_path, model, pool)
    return runner


class TorchRunner:
    """Llama-family models on torch and the configured attention."""

    def __init__(self, config: EngineConfig, model_path: Path, model: ModelConfig, pool: npt.NDArray[np.uint8]) -> None:
        torch.set_num_threads(config.threads)
        layout = model.layout(config.block_tokens, config.dtype)
        dtype = getattr(torch, config.dtype)
        self._pool = torch.from_numpy(pool).view(dtype).view(-1, *layout.shape)
        self._attention = load_attention(config.attention, config.threads)
        positions = min(model.max_position_embeddings, config.max_context_tokens)  # a table of those that a sequence here can have
        self.vocab_size = model.vocab_size
        self._model = LlamaModel.load(model_path, replace(model, max_position_embeddings=positions), config.weight_format)

    def run(self, batch: Batch) -> torch.Tensor:
        return self._model.forward(batch, self._pool, self._attention)
