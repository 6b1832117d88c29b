"""A generation request as the engine and the router know it. Owns its meaning and its wire form; knows nothing of tensors or HTTP.

Invariant: everything about a generation but its KV is a pure function of a GenerationRequest, so any worker can go on with one.
"""

from dataclasses import dataclass, replace

from protocol import headrace_pb2 as pb


@dataclass(frozen=True, slots=True)
class Sampling:
    """`temperature` 0 is greedy; `top_k` 0 is off; `max_tokens` counts the whole answer."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """`deadline` in unix seconds, absolute, the same everywhere the request goes. `output_tokens`: the answer so far."""

    request_id: str
    prompt_tokens: tuple[int, ...]
    sampling: Sampling
    deadline: float
    attempt: int = 0
    output_tokens: tuple[int, ...] = ()
    priority: int = 0
    tenant: str = ""

    @property
    def key(self) -> tuple[str, int]:
        return self.request_id, self.attempt

    def resumed(self, attempt: int, output_tokens: tuple[int, ...]) -> "GenerationRequest":
        """The same request, to be gone on with by another dispatch."""
        return replace(self, attempt=attempt, output_tokens=output_tokens)

    def to_message(self) -> pb.Request:
        s = self.sampling
        return pb.Request(
            request_id=self.request_id,
            attempt=self.attempt,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            deadline=self.deadline,
            priority=self.priority,
            tenant=self.tenant,
            sampling=pb.Sampling(
                temperature=s.temperature,
                top_p=s.top_p,
                top_k=s.top_k,
                seed=s.seed,
                max_tokens=s.max_tokens,
                stop=s.stop,
                stop_token_ids=s.stop_token_ids,
                ignore_eos=s.ignore_eos,
                include_stop=s.include_stop,
            ),
        )

    @classmethod
    def from_message(cls, message: pb.Request) -> "GenerationRequest":
        s = message.sampling
        return cls(
            request_id=message.request_id,
            attempt=message.attempt,
            prompt_tokens=tuple(message.prompt_tokens),
            output_tokens=tuple(message.output_tokens),
            deadline=message.deadline,
            priority=message.priority,
            tenant=message.tenant,
            sampling=Sampling(
                temperature=s.temperature,
                top_p=s.top_p,
                top_k=s.top_k,
                seed=s.seed,
                max_tokens=s.max_tokens,
                stop=tuple(s.stop),
                stop_token_ids=tuple(s.stop_token_ids),
                ignore_eos=s.ignore_eos,
                include_stop=s.include_stop,
            ),
        )
