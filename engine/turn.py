"""What a sequence does once its logits are there: draw a token, take tokens that must come, or wait for its grammar. Owns that decision alone.

Invariant: it depends on the request and the answer so far, but for waiting, which changes no token.
"""

from dataclasses import dataclass

from engine.guide import mask_of
from engine.sampler import Choice
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Turn:
    """What follows a sequence's logits: a choice, tokens that must come, or neither while its guide is behind."""

    choice: Choice | None = None
    forced: tuple[int, ...] = ()

    @property
    def is_held(self) -> bool:
        return self.choice is None and not self.forced


def turn_of(sequence: Sequence, vocab_size: int) -> Turn:
    request, mask = sequence.request, None
    if sequence.guide is not None:
        sequence.guide.is_overdue = True  # before the look: guidance that comes after it wakes the engine
        if (guidance := sequence.guide.guidance) is None:
            return Turn()
        mask = guidance.mask
        if forced := forced_of(sequence):
            return Turn(forced=forced)
        if guidance.forced and guidance.forced[0] not in sequence.rules.banned:  # the forced token comes, and its logprobs are wanted
            mask = mask_of(guidance.forced[:1], vocab_size)
    return Turn(Choice(request.sampling, sequence.num_tokens, request.sample, sequence.rules, mask))


def forced_of(sequence: Sequence) -> tuple[int, ...]:
    """Tokens that may be appended without their logits; none where these are wanted."""
    guidance = sequence.guide.guidance if sequence.guide is not None else None
    if guidance is None or sequence.request.sampling.logprobs is not None or any(token in sequence.rules.banned for token in guidance.forced[:1]):
        return ()
    return guidance.forced
