"""A tiny model folder, made in milliseconds: a random two-layer Llama and a byte-level tokenizer. The real loading code reads it."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 264,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "bos_token_id": 256,
    "eos_token_id": 257,
    "torch_dtype": "float32",
}
TEMPLATE = "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"


def write_tiny_model(folder: Path, seed: int = 0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 257}))
    generator = torch.Generator().manual_seed(seed)
    save_file({name: torch.randn(shape, generator=generator) * scale for name, (shape, scale) in _shapes().items()}, folder / "model.safetensors")
    _tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|eos|>", "bos_token": "<|bos|>", "chat_template": TEMPLATE}))
    return folder


def _shapes() -> dict[str, tuple[tuple[int, ...], float]]:
    hidden, inner, heads, kv_heads, dim, vocabulary = 64, 96, 4, 2, 16, 264
    shapes: dict[str, tuple[tuple[int, ...], float]] = {"model.embed_tokens.weight": ((vocabulary, hidden), 1.0), "model.norm.weight": ((hidden,), 1.0)}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": ((hidden,), 1.0),
            prefix + "post_attention_layernorm.weight": ((hidden,), 1.0),
            prefix + "self_attn.q_proj.weight": ((heads * dim, hidden), 0.2),
            prefix + "self_attn.k_proj.weight": ((kv_heads * dim, hidden), 0.2),
            prefix + "self_attn.v_proj.weight": ((kv_heads * dim, hidden), 0.2),
            prefix + "self_attn.o_proj.weight": ((hidden, heads * dim), 0.2),
            prefix + "mlp.gate_proj.weight": ((inner, hidden), 0.2),
            prefix + "mlp.up_proj.weight": ((inner, hidden), 0.2),
            prefix + "mlp.down_proj.weight": ((hidden, inner), 0.2),
        }
    return shapes


def _tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = ["<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|pad|>", "<|x|>", "<|y|>"]
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    return tokenizer
