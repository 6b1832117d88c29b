"""Writes golden.json: what transformers answers in float32, greedy, to the prompts of prompts.json. Run again only for another model or other prompts:

    .venv/bin/python tests/golden/generate.py

Each prompt goes through `generate` alone: at most 32 new tokens; an answer that ends earlier is recorded up to and including its end-of-answer token.
A prompt with "messages" is rendered by the model's chat template, one with "text" is encoded as it is.
golden.json, one line per prompt: name, kind, "prompt" and "answer" (token ids), "margins" (by how much the largest logit led, per answer token).
A margin below `TIE` is a tie: another order of summation may choose the other token, and what follows may differ.
"""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.checkpoint import resolve, revision
from engine.sampler import top2_margin

MODEL = "smollm2-135m-instruct"
NEW_TOKENS = 32
TIE = 5e-4
FOLDER = Path(__file__).parent


def main() -> None:
    torch.set_num_threads(2)
    folder = resolve(MODEL, Path("~/.cache/headrace/models"))
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    prompts = json.loads((FOLDER / "prompts.json").read_text(encoding="utf-8"))
    answers = [answer(model, tokenizer, prompt) for prompt in prompts]
    lines = ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in answers)
    head = json.dumps({"model": MODEL, "revision": revision(folder), "new_tokens": NEW_TOKENS, "tie": TIE})[:-1]
    (FOLDER / "golden.json").write_text(f'{head}, "answers": [\n{lines}\n]}}\n')
    report(answers)


def answer(model: Any, tokenizer: Any, prompt: dict[str, Any]) -> dict[str, Any]:
    if "messages" in prompt:
        ids = tokenizer.apply_chat_template(prompt["messages"], add_generation_prompt=True, return_dict=False)
    else:
        ids = tokenizer(prompt["text"])["input_ids"]
    result = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        output_logits=True,
        return_dict_in_generate=True,
    )
    margins = top2_margin(torch.cat(result.logits))
    return {
        "name": prompt["name"],
        "kind": prompt["kind"],
        "prompt": ids,
        "answer": result.sequences[0, len(ids) :].tolist(),
        "margins": [round(margin, 6) for margin in margins.tolist()],
    }


def report(answers: list[dict[str, Any]]) -> None:
    margins = [margin for entry in answers for margin in entry["margins"]]
    ties = [entry["name"] for entry in answers if min(entry["margins"]) < TIE]
    print(f"{len(answers)} prompts, {sum(len(entry['prompt']) for entry in answers)} prompt tokens, {len(margins)} answer tokens")
    print(f"smallest margins {sorted(margins)[:5]}, prompts with a tie: {ties or 'none'}")


if __name__ == "__main__":
    main()
