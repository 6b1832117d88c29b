"""A script of its own: GGUF file -> checkpoint folder in float32. Run once per file by gguf_conversion in a process of its own, which keeps torch,
two copies of the weights and the libraries' own progress bars out of the caller. Knows nothing of caches, locks or the rest of Headrace.

Invariant: the tensors equal what transformers loads from the file; tied weights are written once; no quantisation settings remain.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

_STEPS = 3
_NOT_OF_THE_MODEL = ("quantization_config", "_name_or_path", "_model_name_or_path", "transformers_version")


def convert(gguf: Path, folder: Path) -> None:
    """Write config.json, generation_config.json, model.safetensors, tokenizer.json, tokenizer_config.json and the chat template into `folder`."""
    where: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer: Any = AutoTokenizer.from_pretrained(**where)
    tokenizer.save_pretrained(folder)
    _tell(1)
    model: Any = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True))
    _tell(2)
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    config = {name: value for name, value in model.config.to_dict().items() if name not in _NOT_OF_THE_MODEL}
    config["architectures"] = [type(model).__name__]
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    model.generation_config.save_pretrained(folder)
    _tell(3)


def _tell(step: int) -> None:
    """The line format of pip's raw progress bar, so that the caller reads both alike."""
    print(f"Progress {step} of {_STEPS}", flush=True)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
