import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from engine.detokenizer import Detokenizer
from engine.tokenizer import Tokenizer

FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def save(folder: Path, tokenizer: tokenizers.Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.add_tokens(["<tool call>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    return Tokenizer(folder)


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Every single byte, plus a few pieces that cut characters in the middle."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("ð", "Ł"), ("ðŁ", "ĺ"), ("ä", "½"), ("Ġ", "t"), ("Ġt", "h"), ("Ġth", "e"), ("S", "T"), ("ST", "O")]
    vocabulary = {piece: index for index, piece in enumerate([*alphabet, *(left + right for left, right in merges)])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return save(tmp_path_factory.mktemp("byte_level"), tokenizer)


@pytest.fixture(scope="session")
def metaspace(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "a", "b", "é", "▁你", "好", "ST", "O", "P"]
    tokenizer = tokenizers.Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return save(tmp_path_factory.mktemp("metaspace"), tokenizer)


def split(tokens: Sequence[int], cuts: Sequence[int]) -> list[Sequence[int]]:
    edges = [0, *sorted(cut % (len(tokens) + 1) for cut in cuts), len(tokens)]
    return [tokens[start:end] for start, end in itertools.pairwise(edges)]


def stream(detokenizer: Detokenizer, pushes: Sequence[Sequence[int]]) -> list[str]:
    return [*(detokenizer.push(tokens) for tokens in pushes), detokenizer.finish()]


CUTS = st.lists(st.integers(0, 1000), max_size=8)


@FUZZ
@given(tokens=st.lists(st.integers(0, 400), max_size=60), cuts=CUTS)
def test_random_tokens_give_the_whole_decode_however_they_are_split(byte_level: Tokenizer, tokens: list[int], cuts: list[int]) -> None:
    assert "".join(stream(Detokenizer(byte_level), split(tokens, cuts))) == byte_level.decode(tokens)


@FUZZ
@given(text=st.text(max_size=40), cuts=CUTS)
def test_text_comes_back_and_never_as_half_characters(byte_level: Tokenizer, text: str, cuts: list[int]) -> None:
    deltas = stream(Detokenizer(byte_level), split(byte_level.encode(text), cuts))
    assert "".join(deltas) == text
    assert "\ufffd" in text or not any("\ufffd" in delta for delta in deltas)


@FUZZ
@given(tokens=st.lists(st.integers(0, 49_200), max_size=50), cuts=CUTS)
def test_random_tokens_of_the_real_vocabulary(real: Tokenizer, tokens: list[int], cuts: list[int]) -> None:
    assert "".join(stream(Detokenizer(real), split(tokens, cuts))) == real.decode(tokens)


@FUZZ
@given(prompt=st.lists(st.integers(0, 280), max_size=12), text=st.text(max_size=20), cuts=CUTS)
def test_nothing_of_the_prompt_is_shown(byte_level: Tokenizer, prompt: list[int], text: str, cuts: list[int]) -> None:
    """A whole answer is shown as it is, whatever half characters the prompt ends with."""
    assert "".join(stream(Detokenizer(byte_level, prompt), split(byte_level.encode(text), cuts))) == text


@FUZZ
@given(text=st.text("abé你好 \u2581", max_size=30).filter(lambda text: "\u2581" not in text), cuts=CUTS)
def test_metaspace_and_byte_pieces(metaspace: Tokenizer, text: str, cuts: list[int]) -> None:
    tokens = metaspace.encode(text.replace(" ", "\u2581"))
    context = metaspace.encode("a")  # a whole decode strips the first space of the text, not of an answer
    assert "".join(stream(Detokenizer(metaspace, context), split(tokens, cuts))) == text == metaspace.decode([*context, *tokens])[1:]


def test_a_character_that_the_prompt_began_is_shown_whole_once(byte_level: Tokenizer) -> None:
    tokens = byte_level.encode("😀")
    assert len(tokens) > 1
    for cut in range(1, len(tokens)):
        assert "".join(stream(Detokenizer(byte_level, [*byte_level.encode("secret "), *tokens[:cut]]), [tokens[cut:]])) == "😀"
    assert stream(Detokenizer(byte_level, tokens[:-1]), [byte_level.encode("ok")]) == ["ok", ""]
    assert stream(Detokenizer(byte_level, tokens[:-1]), [[]]) == ["", ""]


def test_characters_are_shown_as_soon_as_they_are_whole(byte_level: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_level)
    shown = [detokenizer.push([token]) for token in byte_level.encode("é€😀")]
    assert [delta for delta in shown if delta] == ["é", "€", "😀"]
    assert shown[-1] == "😀"


def test_special_tokens_are_hidden_and_other_added_tokens_are_text(byte_level: Tokenizer) -> None:
    end, tool = byte_level.encode("<end>")[0], byte_level.encode("<tool call>")[0]
    assert stream(Detokenizer(byte_level), [[tool, end, 10_000_000]]) == ["<tool call>", ""]


def expected_with_stop(text: str, stop: Sequence[str], include_stop: bool) -> tuple[str, str | None]:
    """Character by character: the first stop string completed ends the answer."""
    for end in range(1, len(text) + 1):
        completed = [candidate for candidate in stop if candidate and text[:end].endswith(candidate)]
        if completed:
            longest = max(completed, key=len)
            return text[: end if include_stop else end - len(longest)], longest
    return text, None


@FUZZ
@given(text=st.text("ab😀S", max_size=24), stop=st.lists(st.text("ab😀S", min_size=1, max_size=4), min_size=1, max_size=3), include=st.booleans(), cuts=CUTS)
def test_stop_strings_over_token_boundaries(byte_level: Tokenizer, text: str, stop: list[str], include: bool, cuts: list[int]) -> None:
    tokens = byte_level.encode(text)
    detokenizer = Detokenizer(byte_level, (), stop, include)
    deltas = stream(detokenizer, split(tokens, cuts))
    assert ("".join(deltas), detokenizer.stopped) == expected_with_stop(text, stop, include)
    if detokenizer.stopped:
        used = tokens[: detokenizer.num_tokens]
        assert detokenizer.stopped in byte_level.decode(used)
        assert detokenizer.stopped not in byte_level.decode(used[:-1])
    else:
        assert detokenizer.num_tokens == len(tokens)


@FUZZ
@given(tokens=st.lists(st.integers(0, 270), max_size=40), stop=st.lists(st.text("abST", min_size=1, max_size=3), max_size=2), cuts=CUTS, data=st.data())
def test_replay_rebuilds_the_state(byte_level: Tokenizer, tokens: list[int], stop: list[str], cuts: list[int], data: st.DataObject) -> None:
    """What is shown up to any token, and after it, does not depend on how the answer so far was pushed."""
    resume = data.draw(st.integers(0, len(tokens)))
    first, second = Detokenizer(byte_level, [1, 2], stop), Detokenizer(byte_level, [1, 2], stop)
    before = "".join(first.push([token]) for token in tokens[:resume])
    assert second.push(tokens[:resume]) == before
    assert stream(first, [tokens[resume:]]) == stream(second, [tokens[resume:]])
    assert (first.stopped, first.num_tokens) == (second.stopped, second.num_tokens)


def test_what_may_become_a_stop_string_is_held_back(byte_level: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_level, (), ["STOP"])
    assert [detokenizer.push(byte_level.encode(piece)) for piece in ("aS", "T", "O", "b", "S")] == ["a", "", "", "STOb", ""]
    assert detokenizer.finish() == "S"
    assert detokenizer.finish() == ""


def test_work_per_token_does_not_grow_with_the_answer(byte_level: Tokenizer) -> None:
    """A recorder in place of the tokenizer: each token is looked at once."""
    seen: list[int] = []

    class Recorder:
        def token_bytes(self, token: int) -> bytes:
            seen.append(token)
            return b"a"

    detokenizer = Detokenizer(Recorder(), (), ["aab"])  # type: ignore[arg-type]
    for token in range(5_000):
        detokenizer.push([token])
    assert seen == list(range(5_000))


@pytest.fixture(scope="session")
def real(smollm2_path: Path) -> Tokenizer:
    return Tokenizer(smollm2_path)


@FUZZ
@given(tokens=st.lists(st.integers(0, 255), min_size=1, max_size=30), cuts=CUTS, start=st.integers(0, 28), length=st.integers(1, 3), least=st.integers(0, 30))
def test_stops_count_from_min_tokens_on(byte_level: Tokenizer, tokens: list[int], cuts: list[int], start: int, length: int, least: int) -> None:
    """By the definition: the first token after `least` at which the text, shown or not, holds a stop string that ends in that token's text."""
    whole = Detokenizer(byte_level)
    texts = [whole.push([token]) for token in tokens]
    stop = "".join(texts)[start : start + length] or "x"
    detokenizer = Detokenizer(byte_level, stop=(stop, "never there"), min_tokens=least)
    shown = "".join(stream(detokenizer, split(tokens, cuts)))
    before = ""
    for index, text in enumerate(texts):
        found = (before + text).find(stop, max(0, len(before) - len(stop) + 1))
        if found >= 0 and index + 1 > least:
            assert (detokenizer.stopped, detokenizer.num_tokens, shown) == (stop, index + 1, (before + text)[:found])
            return
        before += text
    rest = whole.finish()
    assert shown == (before + rest if detokenizer.stopped is None else (before + rest)[: (before + rest).find(stop, max(0, len(before) - len(stop) + 1))])
