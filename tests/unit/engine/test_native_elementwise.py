"""The kernels between the matrix products: equal to their torch oracles, a row bitwise the same in any company."""

from collections.abc import Callable, Iterator

import headrace_native
import pytest
import torch
from torch import Tensor

from engine import reference

DTYPES = [torch.float32, torch.bfloat16]
ROWS = 70


@pytest.fixture(params=headrace_native.instruction_sets(), autouse=True)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    fastest = headrace_native.instruction_set()
    headrace_native.use_instruction_set(request.param)
    yield request.param
    headrace_native.use_instruction_set(fastest)


def assert_near(ours: Tensor, theirs: Tensor) -> None:
    """Within rounding: 2e-6 in fp32, one unit of the last place in bf16."""
    tolerance = 2e-6 if ours.dtype == torch.float32 else 2**-7
    torch.testing.assert_close(ours.float(), theirs.float(), atol=tolerance / 2, rtol=tolerance)


def assert_rows_independent(run: Callable[[int, int, int], Tensor]) -> None:
    """run(first, last, threads) -> rows [first, last)."""
    whole = run(0, ROWS, 2)
    assert torch.equal(torch.cat([run(i, i + 1, 1) for i in range(ROWS)]), whole)
    assert torch.equal(torch.cat([run(0, 33, 1), run(33, ROWS, 1)]), whole)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [576, 2048, 70, 5])
def test_rms_norm(dtype: torch.dtype, size: int) -> None:
    x, weight = torch.randn(ROWS, size) * 3, torch.randn(size).to(dtype)

    def run(first: int, last: int, threads: int) -> Tensor:
        out = torch.empty(last - first, size, dtype=dtype)
        headrace_native.rms_norm(out, x[first:last], weight, 1e-5, threads)
        return out

    expected = torch.empty(ROWS, size, dtype=dtype)
    reference.rms_norm(expected, x, weight, 1e-5)
    assert_near(run(0, ROWS, 1), expected)
    assert_rows_independent(run)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [576, 70])
def test_add_rms_norm(dtype: torch.dtype, size: int) -> None:
    x, start, weight = torch.randn(ROWS, size), torch.randn(ROWS, size), torch.randn(size).to(dtype)
    ours, theirs = start.clone(), start.clone()
    out, expected = torch.empty(ROWS, size, dtype=dtype), torch.empty(ROWS, size, dtype=dtype)
    headrace_native.add_rms_norm(out, ours, x, weight, 1e-5, 2)
    reference.add_rms_norm(expected, theirs, x, weight, 1e-5)
    assert torch.equal(ours, theirs)
    assert_near(out, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1536, 70])
def test_silu_mul(dtype: torch.dtype, size: int) -> None:
    gate_up = (torch.randn(ROWS, 2 * size) * 4).to(dtype)
    gate_up[0, :4] = torch.tensor([-200.0, 200.0, 0.0, -88.0]).to(dtype)

    def run(first: int, last: int, threads: int) -> Tensor:
        out = torch.empty(last - first, size, dtype=dtype)
        headrace_native.silu_mul(out, gate_up[first:last], threads)
        return out

    expected = torch.empty(ROWS, size, dtype=dtype)
    reference.silu_mul(expected, gate_up)
    assert_near(run(0, ROWS, 1), expected)
    assert_rows_independent(run)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 18])
def test_rope_write_kv(dtype: torch.dtype, dim: int) -> None:
    angles = torch.randn(100, dim // 2) * 9
    cos, sin = angles.cos(), angles.sin()
    qkv, positions, slots = torch.randn(ROWS, 15 * dim).to(dtype), torch.randint(0, 100, (ROWS,)), torch.randperm(96)[:ROWS]
    slots[3] = -1

    def run(first: int, last: int, threads: int) -> Tensor:
        rows, pool = qkv[first:last].clone(), torch.zeros(3, 3, 2, 2, 32, dim, dtype=dtype)
        headrace_native.rope_write_kv(rows, positions[first:last], cos, sin, pool, 1, slots[first:last], threads)
        return torch.cat((rows, written(pool, slots[first:last])), dim=1)

    def written(pool: Tensor, slots: Tensor) -> Tensor:
        rows = pool[slots // 32, :, 1, :, slots % 32].flatten(1)
        return rows * (slots >= 0)[:, None]

    theirs, pool = qkv.clone(), torch.zeros(3, 3, 2, 2, 32, dim, dtype=dtype)
    reference.rope_write_kv(theirs, positions, cos, sin, pool, 1, slots)
    assert torch.equal(run(0, ROWS, 1), torch.cat((theirs, written(pool, slots)), dim=1))
    assert_rows_independent(run)


@pytest.mark.parametrize("special", [float("nan"), float("inf"), -0.0, 1e-40, 3.3e38])
def test_rounding_to_bf16_is_torchs(special: float) -> None:
    """Through the bias of a product of zeros, 16 at once and the 3 of a row's end."""
    bias = torch.tensor([special, 1.00390625, 1.01171875, 65280.0]).repeat(5)[:19]
    out, zeros = torch.empty(1, 19, dtype=torch.bfloat16), torch.zeros(1, 4, dtype=torch.bfloat16)
    headrace_native.linear(out, zeros, torch.zeros(1, 2, 2 * headrace_native.PANEL, dtype=torch.bfloat16), bias)
    expected = bias.bfloat16()[None]
    assert torch.equal(out.isnan(), expected.isnan()) and torch.equal(out.nan_to_num(7), expected.nan_to_num(7))
