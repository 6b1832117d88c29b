"""Every row of ATTENTION against dense attention in fp64: mixed batches, partial blocks, sliding windows and sinks, garbage in unused slots."""

import random
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.attention import ATTENTION, Attention, Step, load_attention
from engine.batch import Batch
from engine.rotary import Rotary
from protocol.errors import ConfigError

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
UNROTATED = Rotary(torch.ones(8192, 128), torch.zeros(8192, 128))


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    dim: int
    block_tokens: int = 32
    layers: int = 2

    def rotary(self) -> Rotary:
        half = self.dim // 2
        return Rotary(UNROTATED.cos[:, :half].contiguous(), UNROTATED.sin[:, :half].contiguous())


SMOL = Shape(heads=9, kv_heads=3, dim=64)
SHAPES = [SMOL, Shape(4, 4, 32), Shape(8, 1, 128), Shape(4, 2, 16, block_tokens=64), Shape(3, 1, 80), Shape(2, 2, 18)]


@dataclass
class Case:
    """Sequences (context, queries) whose q, k, v are known; the pool starts as NaN and is written through the seam only."""

    shape: Shape
    dtype: torch.dtype
    sequences: list[tuple[int, int]]
    seed: int = 0
    window: int = 0
    sinks: int = 0

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        shape = self.shape
        width = (shape.heads + 2 * shape.kv_heads) * shape.dim
        self.qkv = [torch.randn(context, width).to(self.dtype) for context, _ in self.sequences]
        counts = [-(-context // shape.block_tokens) for context, _ in self.sequences]
        blocks = random.Random(self.seed).sample(range(sum(counts) + 3), sum(counts))
        self.tables = [[blocks.pop() for _ in range(count)] for count in counts]
        pool_shape = (sum(counts) + 3, shape.kv_heads, shape.layers, 2, shape.block_tokens, shape.dim)
        self.pool = torch.full(pool_shape, float("nan"), dtype=self.dtype)

    def batch(self, ranges: list[tuple[int, int, int]], stored: bool = False) -> Batch:
        """Tokens [first, last) of each (sequence, first, last); `stored` leaves the pool as it is (slots of -1)."""
        size = self.shape.block_tokens
        positions = [p for _, first, last in ranges for p in range(first, last)]
        slots = [self.tables[s][p // size] * size + p % size for s, first, last in ranges for p in range(first, last)]
        starts = [0]
        for _, first, last in ranges:
            starts.append(starts[-1] + last - first)
        width = max(len(self.tables[s]) for s, _, _ in ranges) + 1
        return Batch(
            tokens=torch.zeros(len(positions), dtype=torch.int64),
            positions=torch.tensor(positions, dtype=torch.int64),
            slots=torch.tensor([-1] * len(slots) if stored else slots, dtype=torch.int64),
            block_tables=torch.tensor([self.tables[s] + [-9] * (width - len(self.tables[s])) for s, _, _ in ranges], dtype=torch.int32),
            query_starts=torch.tensor(starts, dtype=torch.int32),
            context_lens=torch.tensor([last for _, _, last in ranges], dtype=torch.int32),
            logit_rows=torch.zeros(0, dtype=torch.int64),
        )

    def run(self, attention: Attention, ranges: list[tuple[int, int, int]], stored: bool = False) -> list[Tensor]:
        """The attended rows of each range."""
        shape, batch = self.shape, self.batch(ranges, stored)
        qkv = torch.cat([self.qkv[s][first:last] for s, first, last in ranges])
        out = torch.full((len(qkv), shape.heads, shape.dim), float("nan"), dtype=self.dtype)
        attention.begin(Step(batch, self.pool, shape.rotary(), qkv, out, shape.dim**-0.5, self.window, self.sinks))(1)
        return list(out.split([last - first for _, first, last in ranges]))

    def dense(self, sequence: int) -> Tensor:
        """All rows of a sequence, in fp64."""
        shape = self.shape
        heads = self.qkv[sequence].double().view(-1, shape.heads + 2 * shape.kv_heads, shape.dim).transpose(0, 1)
        q, k, v = heads.split([shape.heads, shape.kv_heads, shape.kv_heads])
        k, v = (x.repeat_interleave(shape.heads // shape.kv_heads, dim=0) for x in (k, v))
        length = q.shape[1]
        positions, tokens = torch.arange(length)[:, None], torch.arange(length)[None, :]
        hidden = tokens > positions
        if self.window:
            hidden |= (tokens <= positions - self.window) & (tokens >= self.sinks)
        return ((q @ k.transpose(1, 2) * shape.dim**-0.5).masked_fill(hidden, float("-inf")).softmax(-1) @ v).transpose(0, 1)

    def prefill_then_query(self, attention: Attention, stored: bool = False) -> None:
        """Everything before the queries in a first batch, the queries in a second; the queries must equal dense attention."""
        before = [(s, 0, context if stored else context - queries) for s, (context, queries) in enumerate(self.sequences)]
        if any(last for _, _, last in before):
            self.run(attention, [r for r in before if r[2] > 0])
        results = self.run(attention, [(s, context - queries, context) for s, (context, queries) in enumerate(self.sequences)], stored)
        for s, (_, queries) in enumerate(self.sequences):
            expected = self.dense(s)[-queries:]
            error = (results[s].double() - expected).abs().max().item()
            assert error < TOLERANCE[self.dtype], f"sequence {s}: off by {error}"


@pytest.fixture(params=ATTENTION)
def attention(request: pytest.FixtureRequest) -> Attention:
    return load_attention(request.param, 2)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_mixed_batches_equal_dense_attention(attention: Attention, shape: Shape, dtype: torch.dtype) -> None:
    rng = random.Random(shape.heads)
    for seed in range(3):
        sequences = [(1, 1), (32, 1), (33, 33), (31, 31)]
        for _ in range(3):
            context = rng.randint(1, 200)
            sequences.append((context, rng.choice([1, context, rng.randint(1, context)])))
        rng.shuffle(sequences)
        Case(shape, dtype, sequences, seed).prefill_then_query(attention)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_long_contexts(attention: Attention, dtype: torch.dtype) -> None:
    Case(SMOL, dtype, [(1500, 1), (1025, 130)]).prefill_then_query(attention)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (20, 4), (100, 70), (600, 4), (5000, 1)])
def test_windows_and_sinks(attention: Attention, dtype: torch.dtype, window: int, sinks: int) -> None:
    Case(SMOL, dtype, [(1100, 1), (180, 75), (40, 40), (1, 1)], window=window, sinks=sinks).prefill_then_query(attention)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    shape = Shape(
        heads=kv_heads * draw(st.integers(1, 9)),
        kv_heads=kv_heads,
        dim=draw(st.sampled_from([2, 16, 32, 48, 64, 96])),
        block_tokens=draw(st.sampled_from([32, 96, 128])),
    )
    contexts = st.integers(1, 150) | st.sampled_from([511, 512, 513, 640])
    sequences = [(context, draw(st.integers(1, min(context, 70)))) for context in draw(st.lists(contexts, min_size=1, max_size=3))]
    window = draw(st.sampled_from([0, 0, 1, 33, 200, 600]))
    return Case(shape, draw(st.sampled_from(list(TOLERANCE))), sequences, draw(st.integers(0, 99)), window, draw(st.integers(0, 100)))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(case=cases(), name=st.sampled_from(list(ATTENTION)))
def test_any_shape_equals_dense_attention(case: Case, name: str) -> None:
    case.prefill_then_query(load_attention(name, 2))


def test_a_slot_of_minus_one_reads_the_pool_and_leaves_it(attention: Attention) -> None:
    case = Case(SMOL, torch.bfloat16, [(70, 1), (64, 40)])
    case.prefill_then_query(attention, stored=True)
    before = case.pool.clone()
    case.run(attention, [(0, 69, 70)], stored=True)
    assert torch.equal(case.pool.view(torch.int16), before.view(torch.int16))


def test_scores_far_apart_do_not_overflow(attention: Attention) -> None:
    case = Case(SMOL, torch.float32, [(100, 1)])
    case.qkv[0] *= 40
    case.prefill_then_query(attention)


def test_the_step_rotates_as_the_table_says(attention: Attention) -> None:
    """One head of dim 4 at position 1, by hand: pairs are (i, i + 2)."""
    cos, sin = torch.tensor([[1.0, 1.0], [0.5, 0.25]]), torch.tensor([[0.0, 0.0], [2.0, 3.0]])
    qkv = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0]])
    pool = torch.zeros(2, 1, 1, 2, 32, 4)
    batch = Case(Shape(1, 1, 4), torch.float32, [(2, 1)]).batch([(0, 1, 2)])
    slot = int(batch.slots[0]) % 64
    batch = replace(batch, slots=torch.tensor([slot]), block_tables=torch.tensor([[slot // 32]], dtype=torch.int32))
    attention.begin(Step(batch, pool, Rotary(cos, sin), qkv, torch.empty(1, 1, 4), 1.0))(0)
    assert qkv[0, :4].tolist() == [0.5 - 6.0, 0.5 - 12.0, 1.5 + 2.0, 1.0 + 6.0]
    block, offset = divmod(slot, 32)
    assert pool[block, 0, 0, 0, offset].tolist() == [2.5 - 14.0, 1.5 - 24.0, 3.5 + 10.0, 2.0 + 18.0]
    assert pool[block, 0, 0, 1, offset].tolist() == [9.0, 10.0, 11.0, 12.0]
    assert pool.count_nonzero() == 8


def test_an_unknown_row_is_refused() -> None:
    with pytest.raises(ConfigError, match="native"):
        load_attention("none", 1)
