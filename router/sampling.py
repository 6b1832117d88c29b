"""A body's sampling fields -> Sampling. Owns their ranges and the words of refusal; knows nothing of prompts or endpoints.

Invariant: what passes here, every worker can do.
"""

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from protocol.errors import InvalidRequest
from protocol.request import Sampling
from router.fields import SharedFields
from router.structured import grammar_of

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKENS = 128
MAX_BIASES = 1024
MAX_BAD_WORDS = 128
MAX_LOGPROBS = 20
MAX_SAMPLES = 128
INT32 = 2**31 - 1
_TOKEN_ID = re.compile(r"[0-9]{1,10}")


class WordTokenizer(Protocol):
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


def check(holds: bool, field: str, words: str) -> None:
    if not holds:
        raise InvalidRequest(f"{field}: {words}", field=field)


def token_ids(tokens: Iterable[Any], vocab_size: int, field: str) -> tuple[int, ...]:
    """The ids, all of them in the vocabulary."""
    ids = tuple(tokens)
    for index, token in enumerate(ids):
        check(0 <= token < vocab_size, f"{field}[{index}]", f"token {token} lies outside the vocabulary of {vocab_size}")
    return ids


def sampling_of(shared: SharedFields, logprobs: int | None, prompt_logprobs: int | None) -> Sampling:
    """All but `max_tokens` (0 here), `bad_words` and what only the vocabulary can tell."""
    _check_ranges(shared)
    for field, value in (("logprobs", logprobs), ("prompt_logprobs", prompt_logprobs)):
        check(value is None or 0 <= value <= MAX_LOGPROBS, field, f"must lie between 0 and {MAX_LOGPROBS}")
    return Sampling(
        max_tokens=0,
        temperature=shared.temperature,
        top_p=shared.top_p,
        top_k=max(shared.top_k, 0),
        seed=secrets.randbits(63) if shared.seed is None else shared.seed % 2**64,
        stop=_stop_strings(shared.stop),
        stop_token_ids=_stop_tokens(shared.stop_token_ids),
        ignore_eos=shared.ignore_eos,
        include_stop=shared.include_stop_str_in_output,
        min_p=shared.min_p,
        presence_penalty=shared.presence_penalty,
        frequency_penalty=shared.frequency_penalty,
        repetition_penalty=shared.repetition_penalty,
        logit_bias=_biases(shared.logit_bias),
        min_tokens=shared.min_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar_of(shared),
    )


def _check_ranges(shared: SharedFields) -> None:
    check(0 <= shared.temperature <= 2, "temperature", "must lie between 0 and 2")
    check(0 < shared.top_p <= 1, "top_p", "must lie above 0 and at most at 1")
    check(-1 <= shared.top_k <= INT32, "top_k", "must be at least -1 (-1 and 0: off)")
    check(0 <= shared.min_p <= 1, "min_p", "must lie between 0 and 1")
    check(-2 <= shared.presence_penalty <= 2, "presence_penalty", "must lie between -2 and 2")
    check(-2 <= shared.frequency_penalty <= 2, "frequency_penalty", "must lie between -2 and 2")
    check(0.01 <= shared.repetition_penalty <= 100, "repetition_penalty", "must lie between 0.01 and 100 (1: off)")
    check(0 <= shared.min_tokens <= INT32, "min_tokens", "must be at least 0")
    check(1 <= shared.n <= MAX_SAMPLES, "n", f"must lie between 1 and {MAX_SAMPLES}")
    check(-(2**63) <= (shared.seed or 0) < 2**64, "seed", "must fit 64 bits")
    check(-(2**31) <= shared.priority <= INT32, "priority", "must fit 32 bits")
    check(len(shared.bad_words) <= MAX_BAD_WORDS, "bad_words", f"at most {MAX_BAD_WORDS} words")
    for index, word in enumerate(shared.bad_words):
        check(bool(word.strip()), f"bad_words[{index}]", "must not be blank")
        check(len(word) <= MAX_STOP_CHARACTERS, f"bad_words[{index}]", f"at most {MAX_STOP_CHARACTERS} characters")


def bad_word_tokens(words: Sequence[str], tokenizer: WordTokenizer) -> tuple[tuple[int, ...], ...]:
    """Each word as the start of a text and, where that is another token of the same length, after a space; as vLLM has it."""
    banned: list[tuple[int, ...]] = []
    for word in words:
        plain, spaced = (tuple(tokenizer.encode(prefix + word.lstrip(), add_special_tokens=False)) for prefix in ("", " "))
        banned.append(plain)
        if spaced[0] != plain[0] and len(spaced) == len(plain):
            banned.append(spaced)
    return tuple(banned)


def _biases(given: Mapping[str, float]) -> dict[int, float]:
    check(len(given) <= MAX_BIASES, "logit_bias", f"at most {MAX_BIASES} tokens")
    for key, bias in given.items():
        check(_TOKEN_ID.fullmatch(key) is not None and int(key) <= INT32, "logit_bias", f"{key[:32]!r} is no token id")
        check(-100 <= bias <= 100, f"logit_bias.{key}", "must lie between -100 and 100")
    return {int(key): bias for key, bias in given.items()}


def _stop_strings(stop: str | list[str]) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    check(len(strings) <= MAX_STOP_STRINGS, "stop", f"at most {MAX_STOP_STRINGS} strings")
    check(all(strings), "stop", "a stop string must not be empty")
    check(all(len(text) <= MAX_STOP_CHARACTERS for text in strings), "stop", f"at most {MAX_STOP_CHARACTERS} characters each")
    return strings


def _stop_tokens(tokens: Iterable[int]) -> tuple[int, ...]:
    ids = tuple(tokens)
    check(len(ids) <= MAX_STOP_TOKENS, "stop_token_ids", f"at most {MAX_STOP_TOKENS} tokens")
    return token_ids(ids, INT32, "stop_token_ids")
