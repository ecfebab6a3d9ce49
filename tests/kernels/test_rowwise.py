"""Lists of instructions over rows: the numbers of torch's own operations, and of a row whatever its neighbours."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from kvshelf.errors import InvalidTensor
from kvshelf.kernels.compiling import levels
from kvshelf.kernels.native import LEVEL, library
from kvshelf.kernels.prefix_attention import LogitRules, causal_attention, eager
from kvshelf.kernels.rowwise import available, linear, multiplies_bf16, pack_weight, unpack_weight
from kvshelf.kernels.rowwise.instructions import Buffer, Instruction, Place
from kvshelf.kernels.rowwise.native import RowProgram

pytestmark = [
    pytest.mark.skipif(not available(), reason="no library was compiled for this CPU"),
    pytest.mark.usefixtures("threads"),
]

ROWS = [0, 1, 2, 3, 4, 5, 6, 7, 12, 13, 96, 97, 192, 193, 500]
"""Around the rows whose sums registers hold, and around blocks, with one thread and with two."""

ONE = {
    "copy": lambda x: x,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "tanh": torch.tanh,
    "relu": torch.relu,
    "rsqrt": lambda x: x.double().rsqrt(),
}
TWO = {"mul": torch.mul, "add": torch.add, "sub": torch.sub}


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def run(instructions: list[Instruction], widths: list[int | Tensor], inputs: dict[int, Tensor], out: int) -> Tensor:
    """The values of one buffer after a program over buffers of these widths, or of these constants."""
    rows = len(next(iter(inputs.values())))
    buffers = [Buffer(width.numel(), width) if isinstance(width, Tensor) else Buffer(width) for width in widths]
    values = inputs | {out: torch.full((rows, buffers[out].width), torch.nan)}
    RowProgram(instructions, buffers, list(values)).run(values, rows)
    return values[out]


@pytest.mark.parametrize("rows", ROWS)
def test_products_are_those_of_torch_and_a_row_has_no_neighbours(rows):
    torch.manual_seed(rows)
    weight, bias, x = torch.randn(96, 300) / 17, torch.randn(96), torch.randn(rows, 300)
    packed = pack_weight(weight)
    assert torch.equal(unpack_weight(packed), weight)
    for own in (bias, None):
        made = linear(x, packed, own)
        exact = F.linear(x.double(), weight.double(), None if own is None else own.double())
        torch.testing.assert_close(made.double(), exact, atol=4e-6, rtol=1e-5)
        for row in range(0, rows, 31):
            assert torch.equal(linear(x[row : row + 1], packed, own)[0], made[row])


@pytest.mark.parametrize("rows", ROWS)
def test_products_of_bytes_are_those_of_their_numbers_times_scales_and_a_row_has_no_neighbours(rows):
    """Over more inputs than a depth has; zero and the ends of the range are among the bytes."""
    torch.manual_seed(rows)
    numbers, scales = torch.randint(-127, 128, (96, 300), dtype=torch.int8), torch.rand(96) / 1000
    bias, x, packed = torch.randn(96), torch.randn(rows, 300), pack_weight(numbers)
    for own in (bias, None):
        made = linear(x, packed, own, scales)
        exact = F.linear(x.double(), numbers.double() * scales[:, None], None if own is None else own.double())
        torch.testing.assert_close(made.double(), exact, atol=4e-6, rtol=1e-5)
        for row in range(0, rows, 31):
            assert torch.equal(linear(x[row : row + 1], packed, own, scales)[0], made[row])


@pytest.mark.parametrize("rows", ROWS)
def test_products_of_weights_in_bf16_are_those_of_the_same_in_fp32_to_the_bit(rows):
    torch.manual_seed(rows)
    weight, bias, x = torch.randn(96, 300).bfloat16(), torch.randn(96), torch.randn(rows, 300)
    for own in (bias, None):
        expected = linear(x, pack_weight(weight.float()), own)
        assert torch.equal(linear(x, pack_weight(weight.view(torch.int16)), own), expected)


@pytest.fixture
def bf16():
    """At levels that multiply it."""
    if not multiplies_bf16():
        pytest.skip("no AVX512-BF16 at this level, or AMX")


@pytest.mark.usefixtures("bf16")
@pytest.mark.parametrize("rows", ROWS)
def test_products_in_bf16_are_those_of_the_same_numbers_rounded_once_and_a_row_has_no_neighbours(rows):
    """Over more inputs than a depth has. Nearer than half of the distance between two numbers of bf16, and what fp32
    sums are off by."""
    torch.manual_seed(rows)
    weight, bias, x = (torch.randn(*shape).bfloat16() for shape in ((96, 700), (96,), (rows, 700)))
    packed = pack_weight(weight)
    assert torch.equal(unpack_weight(packed), weight)
    for own in (bias, None):
        made = linear(x, packed, own)
        exact = F.linear(x.double(), weight.double(), None if own is None else own.double())
        assert made.dtype == torch.bfloat16
        assert bool(((made.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-4).all())
        for row in range(0, rows, 31):
            assert torch.equal(linear(x[row : row + 1], packed, own)[0], made[row])


@pytest.mark.parametrize("rows", [1, 40, 97, 200])
def test_a_list_narrows_a_value_and_multiplies_it_with_sums_in_fp32(rows):
    """Halves of a row change places as they become bf16. The product is for levels that have it."""
    x, weight = torch.randn(rows, 48), torch.randn(64, 48).bfloat16()
    half, line = (0, 0, 1), (0, 0, 1)
    narrowed = [
        Instruction("narrow", (1, 1, 24), Place(1, 0, (0, 0, 1)), Place(0, 24, half), Place(0, 24, half)),
        Instruction("narrow", (2, 3, 8), Place(3, 0, (24, 8, 1)), Place(0, 0, (24, 1, 3)), Place(0, 0, (24, 1, 3))),
        Instruction("linear", (2, 24, 1), Place(2, 0, line), Place(3, 0, line), Place(3, 0, line), pack_weight(weight)),
    ]
    buffers = [Buffer(48), Buffer(24, dtype=torch.bfloat16), Buffer(64), Buffer(48, dtype=torch.bfloat16)]
    values = {0: x, 1: torch.zeros(rows, 24, dtype=torch.bfloat16), 2: torch.full((rows, 64), torch.nan)}
    RowProgram(narrowed if multiplies_bf16() else narrowed[:2], buffers, list(values)).run(values, rows)
    assert torch.equal(values[1], x[:, 24:].bfloat16())
    if not multiplies_bf16():
        return
    turned = x.view(rows, 2, 8, 3).transpose(2, 3).reshape(rows, 48).bfloat16()
    torch.testing.assert_close(values[2].double(), turned.double() @ weight.double().T, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(len(levels()) < 2, reason="there is one level")
@pytest.mark.parametrize("rows", [1, 2, 3, 6, 8, 13, 97])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.int8])
def test_a_product_has_the_same_bits_at_every_level(rows, dtype, monkeypatch):
    """Over more inputs than a depth has. Where an answer is computed does not show in it."""
    torch.manual_seed(rows)
    numbers, bias, x = torch.randn(64, 700).mul(40), torch.randn(64), torch.randn(rows, 700)
    packed = pack_weight(numbers.bfloat16().view(dtype) if dtype == torch.int16 else numbers.to(dtype))
    scales = torch.rand(64) if dtype == torch.int8 else None
    made = []
    for level in levels():
        monkeypatch.setenv(LEVEL, level)
        library.cache_clear()
        if library() is not None:
            made.append(linear(x, packed, bias, scales))
    library.cache_clear()
    assert all(torch.equal(product, made[0]) for product in made)


def test_a_product_of_other_numbers_is_refused():
    packed = pack_weight(torch.randn(32, 8))
    for x in (torch.randn(2, 7), torch.randn(2, 8, dtype=torch.float64), torch.randn(2, 8).bfloat16()):
        with pytest.raises(InvalidTensor, match="fp32"):
            linear(x, packed, None)
    scales = torch.ones(32)
    for weight, beside in (
        (packed, scales),
        (packed.to(torch.int8), None),
        (packed.to(torch.int16), scales),
        (packed.double(), None),
        (pack_weight(torch.randn(32, 8).bfloat16()), None),
    ):
        with pytest.raises(InvalidTensor, match="int8 with scales"):
            linear(torch.randn(2, 8), weight, None, beside)


@pytest.mark.parametrize("rows", [1, 5, 300])
@pytest.mark.parametrize("operation", [*ONE, *TWO])
@pytest.mark.parametrize("size", [1, 15, 16, 70])
def test_pointwise_operations_are_those_of_torch(operation, size, rows):
    """Over three dimensions, of which the second value has the last alone: it lies backwards in its buffer."""
    torch.manual_seed(size)
    x, other = torch.randn(rows, 3 * 2 * size) * 4, torch.randn(size)
    if operation == "rsqrt":
        x = x.abs() + 1e-3
    line = (2 * size, size, 1)
    a, out = Place(0, 0, line), Place(2, 0, line)
    b = Place(1, 0, (0, 0, 1)) if operation in TWO else a
    made = run([Instruction(operation, (3, 2, size), out, a, b)], [6 * size, other, 6 * size], {0: x}, 2)
    shaped = x.view(rows, 3, 2, size)
    exact = TWO[operation](shaped, other) if operation in TWO else ONE[operation](shaped)
    torch.testing.assert_close(made, exact.float().reshape(rows, -1), atol=2e-6, rtol=2e-6)


def test_values_lie_anywhere_in_a_row():
    """The halves of a row change places, and the second is negated, as a rotation does; means are over the last."""
    x = torch.randn(130, 24)
    half = (0, 0, 1)
    negative = torch.tensor(-1.0)
    swap = [
        Instruction("mul", (1, 1, 12), Place(3, 0, half), Place(0, 12, half), Place(1, 0, (0, 0, 0))),
        Instruction("copy", (1, 1, 12), Place(3, 12, half), Place(0, 0, half), Place(0, 0, half)),
        Instruction("mean", (2, 3, 4), Place(2, 0, (3, 1, 0)), Place(3, 0, (12, 4, 1)), Place(3, 0, (12, 4, 1))),
    ]
    made = run(swap, [24, negative, 6, 24], {0: x}, 2)
    turned = torch.cat([-x[:, 12:], x[:, :12]], dim=1)
    torch.testing.assert_close(made, turned.view(130, 6, 4).mean(dim=2))


@pytest.mark.parametrize("rows", [1, 40, 200])
def test_products_of_one_value_are_divided_together(rows):
    """Three of them, of different sizes, one behind an operation on the first, and a product of another value."""
    x = torch.randn(rows, 48)
    weights = [torch.randn(outputs, inputs) for outputs, inputs in ((64, 48), (32, 48), (96, 48), (32, 64))]
    line = (0, 0, 1)
    places = [Place(i, 0, line) for i in range(6)]

    def product(weight: Tensor, out: int, a: int) -> Instruction:
        panels = weight.shape[0] // 32
        packed = pack_weight(weight)
        return Instruction("linear", (panels, weight.shape[1], 1), places[out], places[a], places[a], packed, None)

    listed = [
        product(weights[0], 1, 0),
        Instruction("relu", (1, 1, 64), places[2], places[1], places[1]),
        product(weights[3], 3, 2),
        product(weights[1], 4, 0),
        product(weights[2], 5, 0),
    ]
    widths = [48, 64, 64, 32, 32, 96]
    expected = {3: torch.relu(x @ weights[0].T) @ weights[3].T, 4: x @ weights[1].T, 5: x @ weights[2].T}
    for out, exact in expected.items():
        torch.testing.assert_close(run(listed, widths, {0: x}, out), exact, atol=1e-3, rtol=1e-4)


def test_room_is_used_again_but_never_by_two_values_at_once():
    """A chain of sums of neighbours: each needs its two predecessors."""
    x = torch.randn(150, 40)
    line = (0, 0, 1)
    places = [Place(i, 0, line) for i in range(9)]
    chain = [Instruction("copy", (1, 1, 40), places[1], places[0], places[0])]
    chain += [
        Instruction("add", (1, 1, 40), out, a, b) for (a, b), out in zip(pairwise(places), places[2:], strict=False)
    ]
    program = RowProgram(chain, [Buffer(40)] * 9, [0, 8])
    assert program._call.scratch_row < 5 * 40
    torch.testing.assert_close(run(chain, [40] * 9, {0: x}, 8), 34 * x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 2, 5, 33, 300])
def test_causal_attention_is_that_of_torch(tokens, dtype):
    torch.manual_seed(tokens)
    queries = torch.randn(1, 8, tokens, 64).to(dtype)
    keys, values = (torch.randn(1, 2, tokens, 64).to(dtype) for _ in range(2))
    for made, expected in zip(
        causal_attention(queries, keys, values, LogitRules(0.2)),
        eager.causal_attention(queries, keys, values, LogitRules(0.2)),
        strict=True,
    ):
        assert made.shape == expected.shape
        assert made.dtype == expected.dtype
        near = (5e-6, 1e-5) if dtype == torch.float32 else (1e-2, 1e-2)
        torch.testing.assert_close(made, expected, atol=near[0], rtol=near[1])
