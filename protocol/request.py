"""A generation request as the engine and the router know it. Owns its meaning and its wire form; knows nothing of tensors or HTTP.

Invariant: everything about a generation but its KV is a pure function of a GenerationRequest, so any worker can go on with one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from protocol import headrace_pb2 as pb


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the answer must match. `kind`: json_schema, regex, ebnf, choice or json_object. `text`: in the kind's own notation; for choice a JSON
    list of strings, for json_object empty. `field`: where the client's body has it, for the words of a refusal."""

    kind: str
    text: str
    field: str = field(default="grammar", compare=False)


@dataclass(frozen=True, slots=True)
class Sampling:
    """`temperature` 0 is greedy; `top_k` 0 and `min_p` 0 are off; `max_tokens` counts the whole answer. Penalties as in vLLM: repetition over prompt and
    answer, presence and frequency over the answer. `bad_words`: token sequences whose last token may not follow the others. Until `min_tokens` nothing
    but a limit ends the answer. `logprobs`: so many of the likeliest tokens beside each token's own; None: no logprobs at all."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None

    def to_message(self) -> pb.Sampling:
        return pb.Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            max_tokens=self.max_tokens,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            include_stop=self.include_stop,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias,
            bad_words=[pb.TokenIds(tokens=word) for word in self.bad_words],
            min_tokens=self.min_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            grammar=None if self.grammar is None else pb.Grammar(kind=self.grammar.kind, text=self.grammar.text, field=self.grammar.field),
        )

    @classmethod
    def from_message(cls, message: pb.Sampling) -> "Sampling":
        return cls(
            temperature=message.temperature,
            top_p=message.top_p,
            top_k=message.top_k,
            seed=message.seed,
            max_tokens=message.max_tokens,
            stop=tuple(message.stop),
            stop_token_ids=tuple(message.stop_token_ids),
            ignore_eos=message.ignore_eos,
            include_stop=message.include_stop,
            min_p=message.min_p,
            presence_penalty=message.presence_penalty,
            frequency_penalty=message.frequency_penalty,
            repetition_penalty=message.repetition_penalty or 1.0,
            logit_bias=dict(message.logit_bias),
            bad_words=tuple(tuple(word.tokens) for word in message.bad_words),
            min_tokens=message.min_tokens,
            logprobs=message.logprobs if message.HasField("logprobs") else None,
            prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
            grammar=Grammar(message.grammar.kind, message.grammar.text, message.grammar.field) if message.HasField("grammar") else None,
        )


ADAPTER_NAME = r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}"  # of the names that clients may give as their model


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """`deadline` in unix seconds, absolute, the same everywhere the request goes. `output_tokens`: the answer so far.
    `sample`: which of the client's n answers this is; each is a request with an id of its own. `adapter`: LoRA name, empty for the model itself;
    `adapter_revision`: the weights it must have, empty for any. `pooling`: "mean" or "last": an embedding of the prompt is wanted, no answer."""

    request_id: str
    prompt_tokens: tuple[int, ...]
    sampling: Sampling
    deadline: float
    attempt: int = 0
    output_tokens: tuple[int, ...] = ()
    priority: int = 0
    tenant: str = ""
    sample: int = 0
    adapter: str = ""
    adapter_revision: str = ""
    pooling: str = ""

    @property
    def key(self) -> tuple[str, int]:
        return self.request_id, self.attempt

    @property
    def wants_prompt_logprobs(self) -> bool:
        """They come with the first token, so whoever goes on with a begun answer owes none."""
        return self.sampling.prompt_logprobs is not None and not self.output_tokens

    def resumed(self, attempt: int, output_tokens: tuple[int, ...]) -> "GenerationRequest":
        """The same request, to be gone on with by another dispatch."""
        return replace(self, attempt=attempt, output_tokens=output_tokens)

    def samples(self, count: int) -> tuple["GenerationRequest", ...]:
        """The request `count` times, with an id and random numbers of its own each."""
        if count == 1:
            return (self,)
        return tuple(replace(self, request_id=f"{self.request_id}.{index}", sample=index) for index in range(count))

    def to_message(self) -> pb.Request:
        return pb.Request(
            request_id=self.request_id,
            attempt=self.attempt,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            deadline=self.deadline,
            priority=self.priority,
            tenant=self.tenant,
            sampling=self.sampling.to_message(),
            sample=self.sample,
            adapter=self.adapter,
            adapter_revision=self.adapter_revision,
            pooling=self.pooling,
        )

    @classmethod
    def from_message(cls, message: pb.Request) -> "GenerationRequest":
        return cls(
            request_id=message.request_id,
            attempt=message.attempt,
            prompt_tokens=tuple(message.prompt_tokens),
            output_tokens=tuple(message.output_tokens),
            deadline=message.deadline,
            priority=message.priority,
            tenant=message.tenant,
            sampling=Sampling.from_message(message.sampling),
            sample=message.sample,
            adapter=message.adapter,
            adapter_revision=message.adapter_revision,
            pooling=message.pooling,
        )
