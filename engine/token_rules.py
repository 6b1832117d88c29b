"""What a request's own settings do to the odds of its next token: bias, bans and penalties. Owns the counting over one sequence and the batched edit of the
logits; knows nothing of how a token is then chosen, nor of grammars.

Invariant: the rules' state is a pure function of (request, answer so far), so a hand-off or a resume rebuilds it by pushing the answer again.
The order is vLLM's: bans and bias first, then the repetition penalty, then frequency and presence.
"""

from collections.abc import Collection, Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from protocol.request import GenerationRequest

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

NO_IDS: Ids = np.empty(0, np.int64)
NO_FLOATS: Floats = np.empty(0, np.float32)


class TokenRules:
    """`is_plain`: nothing is changed, now or later. `banned`: ids that must not come next. `counted`: ids that penalties touch, with their `counts`."""

    def __init__(self, request: GenerationRequest, eos_token_ids: Collection[int] = ()) -> None:
        sampling = request.sampling
        self._min_tokens = sampling.min_tokens
        self._enders = np.array(sorted({*eos_token_ids, *sampling.stop_token_ids}) if sampling.min_tokens else [], np.int64)
        self._never = np.array(sorted({word[0] for word in sampling.bad_words if len(word) == 1}), np.int64)
        self._words = [word for word in sampling.bad_words if len(word) > 1]
        self._tail: tuple[int, ...] = ()  # the answer's last tokens, as many as a bad word may begin with
        self._longest = max(map(len, self._words), default=1) - 1
        self.biased = np.array(list(sampling.logit_bias.keys()), np.int64)
        self.bias = np.array(list(sampling.logit_bias.values()), np.float32)
        self.repetition = sampling.repetition_penalty
        self.frequency = sampling.frequency_penalty
        self.presence = sampling.presence_penalty
        self.has_penalties = self.repetition != 1 or self.frequency != 0 or self.presence != 0
        self.is_plain = not (self.has_penalties or len(self.biased) or sampling.bad_words or len(self._enders))
        self.num_output = 0
        prompt = np.unique(np.array(request.prompt_tokens, np.int64)) if self.repetition != 1 else NO_IDS
        self._slots = {token: slot for slot, token in enumerate(prompt.tolist())}
        self._ids, self._counts = prompt, np.zeros(len(prompt), np.float32)
        self.banned = NO_IDS
        self._find_banned()
        for token in request.output_tokens:
            self.push(token)

    def push(self, token: int) -> None:
        """The answer's next token is `token`."""
        if self.is_plain:
            return
        self.num_output += 1
        if self.has_penalties:
            self._count(token)
        if self._words:
            self._tail = (*self._tail, token)[-self._longest :]
        if self._words or self.num_output == self._min_tokens:
            self._find_banned()

    @property
    def counted(self) -> Ids:
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> Floats:
        """How often each of `counted` is in the answer."""
        return self._counts[: len(self._slots)]

    def _count(self, token: int) -> None:
        slot = self._slots.setdefault(token, len(self._slots))
        if slot >= len(self._ids):
            spare = max(16, len(self._ids))
            self._ids = np.concatenate((self._ids, np.zeros(spare, np.int64)))
            self._counts = np.concatenate((self._counts, np.zeros(spare, np.float32)))
        self._ids[slot] = token
        self._counts[slot] += 1

    def _find_banned(self) -> None:
        completing = [word[-1] for word in self._words if self._tail[len(self._tail) - len(word) + 1 :] == word[:-1] and len(self._tail) >= len(word) - 1]
        enders = self._enders if self.num_output < self._min_tokens else NO_IDS
        self.banned = np.concatenate((self._never, np.array(completing, np.int64), enders))


def apply_rules(logits: torch.Tensor, rules: Sequence[TokenRules | None]) -> None:
    """Edit logits [R, V] float32, contiguous, in place; None and plain rules leave their row alone. One gather and one scatter for all rows together."""
    rows = [(row, rule) for row, rule in enumerate(rules) if rule is not None and not rule.is_plain]
    flat, width = logits.view(-1), logits.shape[1]
    biased = [(row, rule) for row, rule in rows if len(rule.biased)]
    if biased:
        flat[_places(biased, [rule.biased for _, rule in biased], width)] += torch.from_numpy(np.concatenate([rule.bias for _, rule in biased])).to(flat.device)
    penalised = [(row, rule) for row, rule in rows if rule.has_penalties and len(rule.counted)]
    if penalised:
        places = _places(penalised, [rule.counted for _, rule in penalised], width)
        flat[places] = torch.from_numpy(_penalised(flat[places].cpu().numpy(), [rule for _, rule in penalised])).to(flat.device)
    banning = [(row, rule) for row, rule in rows if len(rule.banned)]
    if banning:
        flat[_places(banning, [rule.banned for _, rule in banning], width)] = -torch.inf


def apply_masks(logits: torch.Tensor, masks: Sequence[torch.Tensor | None]) -> None:
    """Forbid in place what a row's mask does not allow. A mask is int32 [ceil(V / 32)], bit i of word w for token 32 w + i, 1: allowed; None: all."""
    rows = [row for row, mask in enumerate(masks) if mask is not None]
    if not rows:
        return
    words = torch.stack([mask for mask in masks if mask is not None]).numpy()
    forbidden = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little") == 0  # [rows, 32 words]
    for row, bits in zip(rows, torch.from_numpy(forbidden).to(logits.device), strict=True):
        known = min(logits.shape[1], len(bits))
        logits[row, :known].masked_fill_(bits[:known], -torch.inf)
        logits[row, known:] = -torch.inf  # ids beyond the vocabulary's end


def _places(rows: Iterable[tuple[int, TokenRules]], ids: Sequence[Ids], width: int) -> torch.Tensor:
    """Where the rows' ids are in the flattened logits; one index instead of two is much cheaper for torch."""
    return torch.from_numpy(np.concatenate(ids) + np.repeat([row * width for row, _ in rows], [len(some) for some in ids]))


def _penalised(values: Floats, rules: Sequence[TokenRules]) -> Floats:
    """The logits of all rules' counted tokens, side by side, after their penalties."""
    lengths = [len(rule.counted) for rule in rules]
    repetition, frequency, presence = np.repeat(np.array([(r.repetition, r.frequency, r.presence) for r in rules], np.float32), lengths, axis=0).T
    counts = np.concatenate([rule.counts for rule in rules])
    values = np.where(values > 0, values / repetition, values * repetition)
    penalised: Floats = values - frequency * counts - presence * (counts > 0)
    return penalised
