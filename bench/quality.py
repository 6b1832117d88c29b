"""What a weight format costs in quality: perplexity of the model in each on text that nothing was calibrated on, in contexts of 512 tokens.

The text ships with Python: the help topics of `pydoc` and the licence of the distribution. Formats run over the same tokens, batched as in serving.
Prints a table, then one JSON line.

    python -m bench.quality [--model smollm2-135m-instruct] [--tokens 20480] [--formats bf16,w8a8,fp32]
"""

import argparse
import json
import math
import site
import time
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch

from engine.batch import Batch
from engine.checkpoint import resolve
from engine.config import EngineConfig
from engine.linear import LINEARS
from engine.model_config import ModelConfig
from engine.runner import Runner, open_runner
from engine.tokenizer import Tokenizer

CONTEXT = 512
CONFIGS = {
    "fp32": EngineConfig(dtype="float32"),
    "bf16": EngineConfig(dtype="bfloat16"),
    "w8a8": EngineConfig(dtype="bfloat16", weights="w8a8"),
}


def text() -> str:
    """Help topics in the order of their names, then the licences of the installed packages."""
    licences = sorted(path for folder in site.getsitepackages() for path in Path(folder).glob("*.dist-info/**/LICENSE*") if path.is_file())
    return "\n\n".join([topics[name] for name in sorted(topics)] + [path.read_text(errors="ignore") for path in licences[:20]])


def contexts(tokenizer: Tokenizer, tokens: int) -> torch.Tensor:
    """[contexts, CONTEXT] token ids, spread over the whole text."""
    ids = torch.tensor(tokenizer.encode(text()))
    pieces = ids[: len(ids) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    wanted = -(-tokens // CONTEXT)
    if wanted > len(pieces):
        raise SystemExit(f"the text has only {pieces.numel()} tokens")
    return pieces[torch.linspace(0, len(pieces) - 1, wanted).long()]


def open_model(config: EngineConfig, path: Path) -> Runner:
    model = ModelConfig.load(path)
    pool = np.zeros(CONTEXT // config.block_tokens * model.layout(config.block_tokens, config.dtype).block_bytes, np.uint8)
    return open_runner(config, path, model, pool)


def losses(runner: Runner, pieces: torch.Tensor, block_tokens: int) -> tuple[float, torch.Tensor]:
    """Sum of the negative log likelihood of every token after a context's first; and the likeliest tokens."""
    rows = torch.arange(CONTEXT)
    table = torch.arange(CONTEXT // block_tokens, dtype=torch.int32).view(1, -1)
    starts, length = torch.tensor([0, CONTEXT], dtype=torch.int32), torch.tensor([CONTEXT], dtype=torch.int32)
    total, likeliest = 0.0, []
    for piece in pieces:
        logits = runner.run(Batch(piece, rows, rows, table, starts, length, rows[:-1]))
        total += torch.nn.functional.cross_entropy(logits, piece[1:], reduction="sum").item()
        likeliest.append(logits.argmax(-1))
    return total, torch.cat(likeliest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--cache-dir", default="~/.cache/headrace")
    parser.add_argument("--tokens", type=int, default=20480)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--formats", default=",".join(LINEARS))
    options = parser.parse_args()
    path = resolve(options.model, Path(options.cache_dir).expanduser() / "models")
    pieces = contexts(Tokenizer(path), options.tokens)
    counted = len(pieces) * (CONTEXT - 1)
    perplexity, choices = {}, {}
    for name in options.formats.split(","):
        config = CONFIGS[name]
        torch.set_num_threads(options.threads)
        runner = open_model(config, path)
        start = time.perf_counter()
        total, choices[name] = losses(runner, pieces, config.block_tokens)
        perplexity[name] = math.exp(total / counted)
        print(f"{name:6} perplexity {perplexity[name]:9.4f}   {time.perf_counter() - start:6.1f} s", flush=True)
    result: dict[str, object] = {"bench": "quality", "tokens": counted, "context": CONTEXT, "perplexity": {n: round(p, 4) for n, p in perplexity.items()}}
    for name, other in (("w8a8", "bf16"), ("bf16", "fp32"), ("w8a8", "fp32")):
        if name in perplexity and other in perplexity:
            same = (choices[name] == choices[other]).float().mean().item()
            result[f"{name}_over_{other}"] = round(perplexity[name] / perplexity[other], 5)
            print(f"{name} over {other}: {perplexity[name] / perplexity[other]:.4f}, the same likeliest token in {100 * same:.2f} %")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
