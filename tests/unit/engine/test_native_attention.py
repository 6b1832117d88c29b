"""Native attention on every instruction set of this machine: right, bitwise independent of company and chunking, and strict in what it takes."""

import random
from collections.abc import Iterator
from itertools import pairwise

import headrace_native
import pytest
import torch
from torch import Tensor

from engine import reference

HEADS, KV_HEADS, DIM, BLOCK = 9, 3, 64, 32


@pytest.fixture(params=headrace_native.instruction_sets())
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    fastest = headrace_native.instruction_set()
    headrace_native.use_instruction_set(request.param)
    yield request.param
    headrace_native.use_instruction_set(fastest)


class Sequences:
    """Random K/V of several sequences in one pool, with unused slots NaN, and a query for each of their tokens."""

    def __init__(self, dtype: torch.dtype, contexts: list[int]) -> None:
        torch.manual_seed(1)
        counts = [-(-context // BLOCK) for context in contexts]
        order = random.Random(1).sample(range(sum(counts)), sum(counts))
        self.tables = [torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32) for count in counts]
        self.pool = torch.full((sum(counts), KV_HEADS, 2, 2, BLOCK, DIM), float("nan"), dtype=dtype)
        self.queries = [torch.randn(context, HEADS, DIM).to(dtype) for context in contexts]
        for context, table in zip(contexts, self.tables, strict=True):
            slots = torch.tensor([int(table[i // BLOCK]) * BLOCK + i % BLOCK for i in range(context)])
            k, v = torch.randn(2, context, KV_HEADS, DIM).to(dtype)
            headrace_native.write_kv(self.pool, 1, k, v, slots)

    def arguments(self, ranges: list[tuple[int, int, int]]) -> tuple[Tensor, ...]:
        width = max(len(self.tables[s]) for s, _, _ in ranges)
        tables = torch.zeros(len(ranges), width, dtype=torch.int32)
        starts = [0]
        for row, (s, first, last) in enumerate(ranges):
            tables[row, : len(self.tables[s])] = self.tables[s]
            starts.append(starts[-1] + last - first)
        queries = torch.cat([self.queries[s][first:last] for s, first, last in ranges])
        return queries, self.pool, tables, torch.tensor(starts, dtype=torch.int32), torch.tensor([last for _, _, last in ranges], dtype=torch.int32)

    def attend(self, ranges: list[tuple[int, int, int]], threads: int = 1, window: int = 0, sinks: int = 0) -> list[Tensor]:
        q, pool, tables, starts, lens = self.arguments(ranges)
        out = torch.full_like(q, float("nan"))
        headrace_native.paged_attention(out, q, pool, 1, tables, starts, lens, 0.125, threads, window, sinks)
        return list(out.split([last - first for _, first, last in ranges]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_the_reference(instruction_set: str, dtype: torch.dtype) -> None:
    sequences = Sequences(dtype, [1, 100, 333])
    ranges = [(0, 0, 1), (1, 37, 100), (2, 332, 333)]
    q, pool, tables, starts, lens = sequences.arguments(ranges)
    expected = torch.empty_like(q)
    reference.paged_attention(expected, q, pool, 1, tables, starts, lens, 0.125)
    torch.testing.assert_close(torch.cat(sequences.attend(ranges)), expected, atol=2e-5 if dtype == torch.float32 else 1e-2, rtol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_query_is_bitwise_the_same_alone_batched_and_chunked(instruction_set: str, dtype: torch.dtype) -> None:
    contexts = [3, 64, 200, 131]
    sequences = Sequences(dtype, contexts)
    whole = sequences.attend([(s, 0, context) for s, context in enumerate(contexts)], threads=2)
    for s, context in enumerate(contexts):
        alone = [sequences.attend([(s, i, i + 1)])[0] for i in range(context)]
        assert torch.equal(torch.cat(alone), whole[s])
        for seed in range(3):
            cuts = sorted({0, context, *(random.Random(seed).randrange(context + 1) for _ in range(3))})
            chunks = [sequences.attend([(s, a, b), (1, 10, 20)])[0] for a, b in pairwise(cuts)]
            assert torch.equal(torch.cat(chunks), whole[s])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("window", "sinks"), [(0, 0), (700, 5)])
def test_threads_company_and_chunks_leave_no_trace_in_long_contexts(instruction_set: str, dtype: torch.dtype, window: int, sinks: int) -> None:
    """Contexts of several ranges: cut for 1, 2, 3, 7 or 16 threads, alone and in company, in chunks, row by row."""
    sequences = Sequences(dtype, [2600, 900, 40])
    sampled = [0, 511, 512, 513, 1023, 1900, 2599]
    single = {(s, i): sequences.attend([(s, i, i + 1)], 1, window, sinks)[0] for s, context in enumerate((2600, 900)) for i in sampled if i < context}
    for threads in (2, 3, 7, 16):
        for (s, i), expected in single.items():
            alone, beside = (
                sequences.attend([(s, i, i + 1)], threads, window, sinks),
                sequences.attend([(2, 0, 40), (s, i, i + 1), (1, 0, 33)], threads, window, sinks),
            )
            assert torch.equal(alone[0], expected) and torch.equal(beside[1], expected)
    for first, last in [(500, 600), (1890, 1903), (2560, 2600)]:
        for threads in (1, 3):
            chunk = sequences.attend([(0, first, last)], threads, window, sinks)[0]
            assert all(torch.equal(chunk[i - first], single[0, i][0]) for i in sampled if first <= i < last)


def test_queries_may_be_part_of_wider_rows() -> None:
    sequences = Sequences(torch.bfloat16, [50])
    q, pool, tables, starts, lens = sequences.arguments([(0, 0, 50)])
    wide = torch.zeros(50, HEADS + 6, DIM, dtype=torch.bfloat16)
    wide[:, :HEADS] = q
    out = torch.empty_like(q)
    headrace_native.paged_attention(out, wide[:, :HEADS], pool, 1, tables, starts, lens, 0.125)
    assert torch.equal(out, sequences.attend([(0, 0, 50)])[0])


def test_write_kv_equals_the_reference_and_skips_minus_one() -> None:
    slots = torch.tensor([5, -1, 64, 33])
    k, v = torch.randn(2, 4, KV_HEADS, DIM).bfloat16()
    ours, theirs = torch.zeros(2, 3, KV_HEADS, 2, 2, BLOCK, DIM, dtype=torch.bfloat16)
    headrace_native.write_kv(ours, 0, k, v, slots)
    reference.write_kv(theirs, 0, k, v, slots)
    assert torch.equal(ours, theirs) and ours.count_nonzero() > 0


def _valid() -> dict[str, object]:
    sequences = Sequences(torch.bfloat16, [40])
    q, pool, tables, starts, lens = sequences.arguments([(0, 30, 40)])
    names = ("out", "q", "pool", "layer", "block_tables", "query_starts", "context_lens", "scale", "window")
    return dict(zip(names, (torch.empty_like(q), q, pool, 1, tables, starts, lens, 0.125, 0), strict=True))


BAD = {
    "dtype of out": ("out", lambda a: a.float(), TypeError),
    "out not contiguous": ("out", lambda a: a.repeat(1, 2, 1)[:, :HEADS], ValueError),
    "q int": ("q", lambda a: a.to(torch.int16), TypeError),
    "heads": ("q", lambda a: a[:, :8].contiguous(), ValueError),
    "layer": ("layer", lambda a: 2, ValueError),
    "table int64": ("block_tables", lambda a: a.long(), TypeError),
    "block outside": ("block_tables", lambda a: a + 2, ValueError),
    "short table": ("block_tables", lambda a: a[:, :1].contiguous(), ValueError),
    "rows uncovered": ("query_starts", lambda a: a - torch.tensor([0, 1], dtype=torch.int32), ValueError),
    "context shorter than queries": ("context_lens", lambda a: a * 0 + 9, ValueError),
    "scale": ("scale", lambda a: 0.0, ValueError),
    "window": ("window", lambda a: -1, ValueError),
    "lists": ("q", lambda a: a.float().tolist(), TypeError),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused(name: str) -> None:
    argument, spoil, error = BAD[name]
    arguments = _valid()
    headrace_native.paged_attention(**arguments)
    arguments[argument] = spoil(arguments[argument])
    with pytest.raises(error):
        headrace_native.paged_attention(**arguments)


def test_slots_outside_the_pool_are_refused() -> None:
    pool = torch.zeros(2, KV_HEADS, 1, 2, BLOCK, DIM)
    k = torch.zeros(1, KV_HEADS, DIM)
    for slot in (64, -2):
        with pytest.raises(ValueError, match="slots"):
            headrace_native.write_kv(pool, 0, k, k, torch.tensor([slot]))
