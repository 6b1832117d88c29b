"""Every row of LINEARS on every instruction set of this machine: near the exact product, a row bitwise the same in any company."""

from collections.abc import Iterator

import headrace_native
import pytest
import torch
from headrace_native import Array
from torch import Tensor

from engine.arena import Arena
from engine.config import EngineConfig
from engine.linear import LINEARS, LinearFormat, load_format
from protocol.errors import ConfigError

ROWS = 70
SHAPES = [(576, 960), (96, 70), (1536, 33), (6, 5), (130, 64)]
TOLERANCE = {"fp32": 2e-6, "bf16": 2e-6, "w8a8": 2e-2}  # of the outputs' typical size, before they are rounded to the activations' dtype


@pytest.fixture(params=headrace_native.instruction_sets())
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    fastest = headrace_native.instruction_set()
    headrace_native.use_instruction_set(request.param)
    yield request.param
    headrace_native.use_instruction_set(fastest)


@pytest.fixture(params=LINEARS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Product:
    """A random matrix in one format, and the exact product beside it."""

    def __init__(self, weights: LinearFormat, width: int, outputs: int, biased: bool = False) -> None:
        torch.manual_seed(width)
        self.dtype = weights.dtype
        self.x, weight = torch.randn(ROWS, width).to(self.dtype), torch.randn(outputs, width).to(self.dtype)
        self.bias = torch.randn(outputs).to(self.dtype) if biased else None
        self.exact = self.x.double() @ weight.double().T
        self.outputs = outputs
        self.linear = weights.pack(weight, self.bias, Arena())

    def rows(self, first: int, last: int, threads: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
        out = torch.full((last - first, self.outputs), float("nan"), dtype=dtype)
        self.linear(Array(out), Array(self.x[first:last]), threads)
        return out


@pytest.mark.parametrize(("width", "outputs"), SHAPES)
def test_near_the_exact_product(name: str, instruction_set: str, width: int, outputs: int) -> None:
    product = Product(load_format(name), width, outputs)
    error = (product.rows(0, ROWS).double() - product.exact).abs().max().item()
    assert error < TOLERANCE[name] * width**0.5 * 4


@pytest.mark.parametrize(("width", "outputs"), SHAPES)
def test_rows_are_bitwise_the_same_alone_in_chunks_and_on_threads(name: str, instruction_set: str, width: int, outputs: int) -> None:
    product = Product(load_format(name), width, outputs)
    whole = product.rows(0, ROWS, threads=2)
    assert torch.equal(torch.cat([product.rows(i, i + 1) for i in range(ROWS)]), whole)
    for size in range(2, 10):
        assert torch.equal(torch.cat([product.rows(i, min(i + size, ROWS), threads=size % 2 + 1) for i in range(0, ROWS, size)]), whole)


def test_bias_is_added_before_the_one_rounding(name: str, instruction_set: str) -> None:
    weights = load_format(name)
    plain, biased = Product(weights, 96, 70), Product(weights, 96, 70, biased=True)
    assert biased.bias is not None
    assert torch.equal(biased.rows(0, ROWS, dtype=weights.dtype), (plain.rows(0, ROWS) + biased.bias.float()).to(weights.dtype))


def test_instruction_sets_agree_bitwise_in_int8() -> None:
    """Sums are exact, so the machine that computes does not matter."""
    fastest, results = headrace_native.instruction_set(), []
    for one in headrace_native.instruction_sets():
        headrace_native.use_instruction_set(one)
        product = Product(load_format("w8a8"), 576, 200)
        results.append(product.rows(0, ROWS))
    headrace_native.use_instruction_set(fastest)
    assert all(torch.equal(result, results[0]) for result in results)


def test_int8_sums_do_not_saturate(instruction_set: str) -> None:
    """The largest magnitudes that rounding makes, all of one sign: a 16-bit intermediate of unsigned times signed would overflow."""
    width = 1536
    for sign in (1.0, -1.0):
        weight, x, out = torch.full((64, width), sign), torch.full((2, width), 1.0), torch.empty(2, 64)
        load_format("w8a8").pack(weight.bfloat16(), None, Arena())(Array(out), Array(x.bfloat16()), 1)
        torch.testing.assert_close(out, torch.full_like(out, sign * width), rtol=1e-5, atol=0)


def hadamard() -> Tensor:
    """[64, 64], orthogonal: what rows are rotated by before they are rounded."""
    matrix = torch.ones(1, 1)
    while len(matrix) < headrace_native.ROTATED:
        matrix = torch.cat((torch.cat((matrix, matrix), dim=1), torch.cat((matrix, -matrix), dim=1)))
    return matrix / len(matrix) ** 0.5


def test_rounding_to_int8(instruction_set: str) -> None:
    x = torch.randn(5, 70) * torch.tensor([1e-30, 1e-3, 1.0, 1e30, 0.0])[:, None]
    rounded, scales = torch.empty(5, 128, dtype=torch.int8), torch.empty(5)
    headrace_native.quantize_rows(rounded, scales, x)
    rotated = (torch.nn.functional.pad(x, (0, 58)).view(5, 2, 64) @ hadamard()).view(5, 128)
    assert rounded.abs().amax(1).tolist() == [127, 127, 127, 127, 0]
    assert ((rounded * scales[:, None] - rotated).abs() <= 0.501 * scales[:, None]).all()


def test_one_channel_far_above_the_others_costs_them_little() -> None:
    """What rotation is for: rounded by the row's largest value alone, the others would lose all their digits."""
    torch.manual_seed(0)
    x, weight, out = torch.randn(4, 512), torch.randn(64, 512), torch.empty(4, 64)
    x[:, 7] = 60.0
    weight[:, 7] = 0.0
    load_format("w8a8").pack(weight.bfloat16(), None, Arena())(Array(out), Array(x.bfloat16()), 1)
    error = (out - x @ weight.T).std() / out.std()
    assert error < 0.03, error


@pytest.mark.parametrize("special", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_stays_so(name: str, instruction_set: str, special: float) -> None:
    product = Product(load_format(name), 96, 70)
    product.x[1, 5] = special
    out = product.rows(0, 3)
    assert not out[1].isfinite().any() and out[[0, 2]].isfinite().all()


def test_names_that_configurations_mean() -> None:
    meant = [EngineConfig(dtype=dtype, weights=weights).weight_format for dtype, weights in (("bfloat16", "auto"), ("float32", "auto"), ("bfloat16", "w8a8"))]
    assert meant == ["bf16", "fp32", "w8a8"] == [name for name in meant if name in LINEARS]
    with pytest.raises(ConfigError, match="int3"):
        load_format("int3")


def test_what_does_not_fit_is_refused(name: str) -> None:
    product = Product(load_format(name), 64, 32)
    out = Array(torch.empty(3, 32))
    for wrong in (product.x[:3, :32].contiguous(), product.x[:2]):
        with pytest.raises(ValueError, match="wrong shape"):
            product.linear(out, Array(wrong), 1)
