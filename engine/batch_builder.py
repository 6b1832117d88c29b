"""Plan -> tensors of one step. Knows sequences and blocks, nothing of who chose them."""

from collections.abc import Sequence as Many

import numpy as np
import torch

from engine.adapters import adapter_rows
from engine.batch import Batch
from engine.pooling import hidden_rows
from engine.sequence import Sequence


def build_batch(scheduled: Many[tuple[Sequence, int]], block_tokens: int) -> Batch:
    """The next so many tokens of each sequence. A position whose KV is stored already gets slot -1: its block may be shared and is not written again.
    The logits wanted: one row for each sequence that samples, in the plan's order, then the prompt positions to score."""
    tokens: list[int] = []
    for sequence, count in scheduled:
        tokens += sequence.tokens[sequence.num_computed : sequence.num_computed + count]
    counts, firsts, stored, totals = np.array([(count, it.num_computed, it.num_stored, it.num_tokens) for it, count in scheduled]).T
    tables = np.zeros((len(scheduled), max(len(sequence.blocks) for sequence, _ in scheduled)), np.int32)
    for row, (sequence, _) in enumerate(scheduled):
        tables[row, : len(sequence.blocks)] = sequence.blocks
    ends = np.cumsum(counts)
    rows = np.repeat(np.arange(len(counts)), counts)
    positions = np.arange(len(tokens)) + (firsts - ends + counts)[rows]
    slots = tables[rows, positions // block_tokens].astype(np.int64) * block_tokens + positions % block_tokens
    slots[positions < stored[rows]] = -1
    context_lens = firsts + counts
    samples = np.array([sequence.pooling is None for sequence, _ in scheduled])
    scored = [
        position + end - it.num_computed - count for (it, count), end in zip(scheduled, ends.tolist(), strict=True) for position in it.positions_to_score(count)
    ]
    return Batch(
        tokens=torch.tensor(tokens),
        positions=torch.from_numpy(positions),
        slots=torch.from_numpy(slots),
        block_tables=torch.from_numpy(tables),
        query_starts=torch.from_numpy(np.concatenate(([0], ends)).astype(np.int32)),
        context_lens=torch.from_numpy(context_lens.astype(np.int32)),
        logit_rows=torch.from_numpy(np.concatenate((ends[(context_lens == totals) & samples] - 1, np.array(scored, np.int64)))),
        adapters=adapter_rows(scheduled),
        hidden=hidden_rows(scheduled),
    )
