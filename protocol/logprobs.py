"""How likely a model found a token: what engines measure, workers send and routers show. Knows nothing of tensors or HTTP.

Invariant: values are of the model's own distribution (log-softmax of the logits), before temperature, penalties, bias or masks; as vLLM's raw_logprobs.
"""

from dataclasses import dataclass

from protocol import headrace_pb2 as pb


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """`rank` 1: the likeliest token. `top`: the likeliest tokens with their logprobs, likeliest first."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()

    def to_message(self) -> pb.TokenLogprob:
        return pb.TokenLogprob(
            token=self.token,
            logprob=self.logprob,
            rank=self.rank,
            top_tokens=[token for token, _ in self.top],
            top_logprobs=[logprob for _, logprob in self.top],
        )

    @classmethod
    def from_message(cls, message: pb.TokenLogprob) -> "TokenLogprob":
        top = tuple(zip(message.top_tokens, message.top_logprobs, strict=True))
        return cls(message.token, message.logprob, message.rank, top)
