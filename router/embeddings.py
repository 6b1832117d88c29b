"""OpenAI's /v1/embeddings: its body, the lives of its inputs, its reply. Knows nothing of workers or of how hidden states are pooled.

Invariant: a field is used, harmless, or refused by name; the vectors come in the order of the inputs, each of length 1.
"""

import asyncio
import base64
import math
import time
from array import array
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from protocol.errors import Cancelled, ContextTooLong, HeadraceError, InvalidRequest
from protocol.request import GenerationRequest, Sampling
from router.answer import Running
from router.life import Life
from router.metrics import RouterMetrics
from router.openai import PromptTokenizer, convert, decode, known
from router.replies import Usage
from router.sampling import INT32, check, token_ids

MAX_INPUTS = 2048  # OpenAI's
AT_ONCE = 32  # inputs of one request under way
HARMLESS = {"user", "request_id"}
NEUTRAL: dict[str, tuple[Any, ...]] = {"truncate_prompt_tokens": (), "normalize": (True,), "embed_dtype": ("float32",), "endianness": ("native", "little")}


class EmbeddingFields(msgspec.Struct, frozen=True, kw_only=True):
    """`pooling` and `add_special_tokens` are extensions; without `pooling` the router's configuration says how."""

    model: str
    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    pooling: Literal["mean", "last"] | None = None
    add_special_tokens: bool = True
    priority: int = 0


@dataclass(frozen=True, slots=True)
class EmbeddingInquiry:
    fields: EmbeddingFields
    inputs: tuple[str | tuple[int, ...], ...]

    @property
    def characters(self) -> int:
        return sum(len(one) for one in self.inputs if isinstance(one, str))

    def tokenize(self, tokenizer: PromptTokenizer) -> list[tuple[int, ...]]:
        """May take long: call it off the event loop for long texts."""
        return [
            tuple(tokenizer.encode(one, add_special_tokens=self.fields.add_special_tokens))
            if isinstance(one, str)
            else token_ids(one, tokenizer.vocab_size, f"input[{index}]")
            for index, one in enumerate(self.inputs)
        ]

    def requests(self, request_id: str, prompts: Sequence[tuple[int, ...]], deadline: float, max_context_tokens: int, pooling: str) -> list[GenerationRequest]:
        """One for each input, with an id of its own."""
        for index, tokens in enumerate(prompts):
            if len(tokens) >= max_context_tokens:
                raise ContextTooLong(f"input[{index}]: {len(tokens)} tokens; this model takes {max_context_tokens - 1}", field=f"input[{index}]")
        return [
            GenerationRequest(
                request_id=f"{request_id}.{index}",
                prompt_tokens=tokens,
                sampling=Sampling(max_tokens=0),
                deadline=deadline,
                priority=self.fields.priority,
                pooling=self.fields.pooling or pooling,
            )
            for index, tokens in enumerate(prompts)
        ]

    def body(self, vectors: Sequence[Sequence[float]], usage: Usage) -> dict[str, Any]:
        data = [{"object": "embedding", "index": index, "embedding": self._shown(vector)} for index, vector in enumerate(vectors)]
        tokens = {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
        return {"object": "list", "data": data, "model": self.fields.model, "usage": tokens}

    def _shown(self, vector: Sequence[float]) -> str | list[float]:
        """base64: little-endian float32."""
        values = shortened(vector, self.fields.dimensions)
        return base64.b64encode(array("f", values).tobytes()).decode() if self.fields.encoding_format == "base64" else values


def parse_embedding(body: bytes) -> EmbeddingInquiry:
    """Raises InvalidRequest, which names the field."""
    fields = convert(known(decode(body), set(EmbeddingFields.__struct_fields__), NEUTRAL, HARMLESS), EmbeddingFields)
    check(fields.dimensions is None or fields.dimensions >= 1, "dimensions", "must be at least 1")
    check(-(2**31) <= fields.priority <= INT32, "priority", "must fit 32 bits")
    check(bool(fields.input), "input", "empty")
    if isinstance(fields.input, str):
        return EmbeddingInquiry(fields, (fields.input,))
    tokens = tuple(item for item in fields.input if isinstance(item, int))
    check(len(tokens) in (0, len(fields.input)), "input", "a list is of texts, of token lists, or of tokens")
    inputs = (tokens,) if tokens else tuple(tuple(item) if isinstance(item, list) else item for item in fields.input if not isinstance(item, int))
    check(len(inputs) <= MAX_INPUTS, "input", f"at most {MAX_INPUTS}")
    for index, one in enumerate(inputs):
        check(bool(one), f"input[{index}]", "empty")
    return EmbeddingInquiry(fields, inputs)


def shortened(vector: Sequence[float], dimensions: int | None) -> list[float]:
    """The first `dimensions` values, again of length 1, as OpenAI shortens its own."""
    if dimensions is None:
        return list(vector)
    if dimensions > len(vector):
        raise InvalidRequest(f"dimensions: this model's embeddings have {len(vector)}", field="dimensions")
    head = vector[:dimensions]
    norm = math.sqrt(sum(value * value for value in head)) or 1.0
    return [value / norm for value in head]


class Embedding:
    """One running request: a life for each input."""

    def __init__(self, running: Running, metrics: RouterMetrics, lives: Sequence[Life]) -> None:
        self._running = running
        self._metrics = metrics
        self._lives = lives
        self._gate = asyncio.Semaphore(AT_ONCE)

    @property
    def usage(self) -> Usage:
        usages = [life.usage for life in self._lives]
        return Usage(sum(usage.prompt_tokens for usage in usages), 0, sum(usage.cached_tokens for usage in usages))

    async def vectors(self) -> list[tuple[float, ...]]:
        """All of them, or the first error."""
        self._running.enter(len(self._lives))
        self._metrics.started()
        started = time.perf_counter()
        outcome = Cancelled.code
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._vector(life)) for life in self._lives]
            outcome = "ok"
            self._metrics.finished("stop", self.usage, time.perf_counter() - started)
            return [task.result() for task in tasks]
        except* HeadraceError as errors:
            first = errors.exceptions[0]
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            assert isinstance(first, HeadraceError)
            outcome = first.code
            failure = first
        finally:
            self._running.leave(len(self._lives))
            self._metrics.ended(outcome)
        raise failure

    async def _vector(self, life: Life) -> tuple[float, ...]:
        vector: tuple[float, ...] = ()
        async with self._gate, aclosing(life.chunks()) as chunks:
            async for chunk in chunks:
                vector += chunk.embedding
        if not vector:
            raise HeadraceError("a worker answered without an embedding")
        return vector
