"""The committed golden file belongs to the committed prompts, the present model files and our own tokenizer."""

import json
from collections import Counter
from pathlib import Path

from engine.checkpoint import revision
from engine.tokenizer import Tokenizer

GOLDEN = Path(__file__).parents[2] / "golden"


def test_golden_prompts_are_what_our_tokenizer_gives(smollm2_path: Path) -> None:
    tokenizer = Tokenizer(smollm2_path)
    prompts = json.loads((GOLDEN / "prompts.json").read_text(encoding="utf-8"))
    golden = json.loads((GOLDEN / "golden.json").read_text())
    assert golden["revision"] == revision(smollm2_path)
    assert [entry["name"] for entry in golden["answers"]] == [prompt["name"] for prompt in prompts]
    for prompt, entry in zip(prompts, golden["answers"], strict=True):
        ours = tokenizer.encode_chat(prompt["messages"]) if "messages" in prompt else tokenizer.encode(prompt["text"])
        assert ours == entry["prompt"], prompt["name"]
        assert len(entry["answer"]) == len(entry["margins"])
        assert len(entry["answer"]) == golden["new_tokens"] or entry["answer"][-1] in tokenizer.stop_token_ids
    assert Counter(prompt["kind"] for prompt in prompts) == {"short": 10, "chat": 15, "code": 10, "language": 11, "emoji": 2, "long": 2}
    assert sum(min(entry["margins"]) < golden["tie"] for entry in golden["answers"]) <= 2
