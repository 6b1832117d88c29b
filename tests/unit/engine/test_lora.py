"""Adapters: what is read and what is refused; many of them in one batch against transformers with the weights merged."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.lora import merged, write_adapter
from fakes.model import write_tiny_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from engine.attention import load_attention
from engine.batch import AdapterRows, Batch, HiddenRows
from engine.lora import Adapter, load_adapter
from engine.model import LlamaModel
from engine.model_config import ModelConfig
from protocol.errors import InvalidRequest

BLOCK = 32
VARIANTS: dict[str, dict[str, Any]] = {
    "all": {},
    "query and value, rank 3": {"modules": ("q_proj", "v_proj"), "rank": 3},
    "rslora": {"use_rslora": True, "rank": 8, "size": 0.2},
    "patterns": {"rank_pattern": {"k_proj": 5, "up_proj": 1}, "alpha_pattern": {"down_proj": 1.5}},
    "mlp": {"modules": ("gate_proj", "down_proj")},
}
LENGTHS = (21, 40, 1, 33, 9, 17, 5)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("lora") / "model")


@pytest.fixture(scope="module")
def adapter_paths(model_path: Path) -> dict[str, Path]:
    return {name: write_adapter(model_path.parent / name, model_path, seed=index, **variant) for index, (name, variant) in enumerate(VARIANTS.items())}


def load(path: Path, model_path: Path, dtype: torch.dtype = torch.float32, max_rank: int = 64) -> Adapter:
    return load_adapter(path.name, path, ModelConfig.load(model_path), dtype, max_rank)


class Served:
    """A sequence for each of LENGTHS, all prompts random, each with its own blocks."""

    def __init__(self, model_path: Path, dtype: torch.dtype) -> None:
        config = ModelConfig.load(model_path)
        torch.manual_seed(3)
        self.prompts = [torch.randint(0, 256, (length,)).tolist() for length in LENGTHS]
        self.model = LlamaModel.load(model_path, config, {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype])
        self.attention = load_attention("native", 1)
        self.pool = torch.zeros(2 * len(LENGTHS), *config.layout(BLOCK, "float32").shape, dtype=dtype)

    def run(self, chosen: dict[int, Adapter | None], hidden: bool = False) -> dict[int, Tensor]:
        """Logits, or last hidden states, of every token of the sequences chosen, in one batch."""
        starts, rows, tables = [0], [], []
        for index in chosen:
            rows += [(index, position) for position in range(LENGTHS[index])]
            starts.append(len(rows))
            tables.append([2 * index, 2 * index + 1])
        spans = {index: torch.arange(starts[place], starts[place + 1]) for place, index in enumerate(chosen)}
        adapters = {adapter.name: adapter for adapter in chosen.values() if adapter is not None}
        every = torch.arange(len(rows))
        batch = Batch(
            tokens=torch.tensor([self.prompts[s][position] for s, position in rows]),
            positions=torch.tensor([position for _, position in rows]),
            slots=torch.tensor([(2 * s + position // BLOCK) * BLOCK + position % BLOCK for s, position in rows]),
            block_tables=torch.tensor(tables, dtype=torch.int32),
            query_starts=torch.tensor(starts, dtype=torch.int32),
            context_lens=torch.tensor([LENGTHS[index] for index in chosen], dtype=torch.int32),
            logit_rows=every[:0] if hidden else every,
            adapters=tuple(AdapterRows(a, torch.cat([spans[i] for i, other in chosen.items() if other is a])) for a in adapters.values()),
            hidden=HiddenRows(every) if hidden else None,
        )
        logits = self.model.forward(batch, self.pool, self.attention)
        values = batch.hidden.values if batch.hidden is not None else logits
        assert values is not None
        return {index: values[span] for index, span in spans.items()}


def mixture(adapters: list[Adapter]) -> dict[int, Adapter | None]:
    return dict(enumerate([adapters[0], None, adapters[1], adapters[2], adapters[0], adapters[3], adapters[4]]))


def oracle(model_path: Path, adapter_path: Path | None, prompt: list[int], hidden: bool = False) -> Tensor:
    model = LlamaForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    if adapter_path is not None:
        model.load_state_dict(merged(model.state_dict(), adapter_path))
    with torch.no_grad():
        out = model(torch.tensor([prompt]), output_hidden_states=True)
    return out.hidden_states[-1][0] if hidden else out.logits[0]


@pytest.mark.parametrize("hidden", [False, True])
def test_one_batch_equals_the_merged_models(model_path: Path, adapter_paths: dict[str, Path], hidden: bool) -> None:
    served = Served(model_path, torch.float32)
    chosen = mixture([load(path, model_path) for path in adapter_paths.values()])
    values = served.run(chosen, hidden)
    for index, adapter in chosen.items():
        expected = oracle(model_path, adapter_paths[adapter.name] if adapter is not None else None, served.prompts[index], hidden)
        torch.testing.assert_close(values[index], expected, rtol=1e-3, atol=1e-3)
        if adapter is not None:
            assert (values[index] - oracle(model_path, None, served.prompts[index], hidden)).abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_do_not_depend_on_their_companions(model_path: Path, adapter_paths: dict[str, Path], dtype: torch.dtype) -> None:
    """Bitwise: the model's own rows beside adapters' and alone, and an adapter's rows beside others' and alone."""
    served = Served(model_path, dtype)
    chosen = mixture([load(path, model_path, dtype) for path in adapter_paths.values()])
    together = served.run(chosen)
    for index, adapter in chosen.items():
        assert torch.equal(together[index], served.run({index: adapter})[index])


def test_revision_follows_the_content(model_path: Path, adapter_paths: dict[str, Path], tmp_path: Path) -> None:
    first = load(adapter_paths["all"], model_path)
    assert first.revision == load(adapter_paths["all"], model_path, torch.bfloat16).revision
    assert first.revision == load(write_adapter(tmp_path / "same", model_path, seed=0, target_modules="all-linear"), model_path).revision
    others = [write_adapter(tmp_path / "seed", model_path, seed=9), write_adapter(tmp_path / "alpha", model_path, seed=0, lora_alpha=5)]
    assert len({first.revision, *(load(other, model_path).revision for other in others)}) == 3


@pytest.mark.parametrize(
    "config,words",
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"something_new": 1}, "something_new"),
        ({"peft_type": "IA3"}, "peft_type"),
        ({"r": 8}, "rank 4"),
        ({"lora_alpha": None}, "lora_alpha"),
        ({"alpha_pattern": {"(": 1}}, "pattern"),
    ],
)
def test_refused_by_name(model_path: Path, tmp_path: Path, config: dict[str, Any], words: str) -> None:
    path = write_adapter(tmp_path / "adapter", model_path, **config)
    with pytest.raises(InvalidRequest, match=words.replace("(", r"\(")):
        load(path, model_path)


def test_broken_folders(model_path: Path, tmp_path: Path) -> None:
    def refused(words: str, max_rank: int = 64) -> None:
        with pytest.raises(InvalidRequest, match=words):
            load(path, model_path, max_rank=max_rank)

    path = tmp_path / "absent"
    refused("adapter_config.json")
    path = write_adapter(tmp_path / "adapter", model_path)
    refused("lora.max_rank", max_rank=3)
    weights = path / "adapter_model.safetensors"
    good = load_file(weights)
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    for change, words in (
        ({"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 64)}, "lm_head"),
        ({"base_model.model.model.layers.2.mlp.up_proj.lora_A.weight": torch.zeros(4, 64)}, r"layers\.2"),
        ({key: torch.zeros(4, 65)}, "does not fit"),
        ({key: good[key] * float("nan")}, "not finite"),
        ({key: good[key].to(torch.int8)}, "of type I8"),
        ({key: good[key].unsqueeze(0)}, "does not fit"),
    ):
        save_file(good | change, weights)
        refused(words)
    save_file({name: tensor for name, tensor in good.items() if name != key}, weights)
    refused("does not fit")
    save_file({}, weights)
    refused("no adapter")
    weights.write_bytes(b"\x80\x04pickled")
    refused("not a safetensors file")
    weights.rename(path / "adapter_model.bin")
    refused("pickle")
    (path / "adapter_config.json").write_text("[]")
    refused("peft_type")
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"})[:-2])
    refused("not an adapter's configuration")
