"""Lists of instructions by torch's products and Triton: under the interpreter against the reference, and those of real
models compiled for GPUs that are not there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from kvshelf.engine.forward.calls import trace
from kvshelf.engine.forward.lowering import lower
from kvshelf.kernels.rowwise import row_programs
from kvshelf.kernels.rowwise.fusing import WORDS, Fusion, Product, fused, products_of_one
from kvshelf.kernels.rowwise.instructions import Buffer, Instruction, Place
from kvshelf.kernels.tiles import warps
from tests.kernels.compiling import Variant, require_fits
from tests.kernels.references import rowwise as reference

pytestmark = pytest.mark.usefixtures("forced_triton")

BF16 = torch.bfloat16
CPU = torch.device("cpu")
EACH, ONE = (0, 0, 1), (0, 0, 0)
"""Strides of whole rows, and of one number for all."""


class Listed:
    """A list as it is written: each operation makes a buffer."""

    def __init__(self) -> None:
        self.instructions: list[Instruction] = []
        self.buffers: list[Buffer] = []

    def buffer(self, width: int, constant: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Place:
        self.buffers.append(Buffer(width, constant, dtype))
        return Place(len(self.buffers) - 1, 0, EACH)

    def constant(self, tensor: Tensor) -> Place:
        place = self.buffer(tensor.numel(), tensor)
        return place if tensor.numel() > 1 else replace(place, strides=ONE)

    def line(
        self, operation: str, width: int, a: Place, b: Place | None = None, dtype: torch.dtype = torch.float32
    ) -> Place:
        """An operation on whole rows."""
        out = self.buffer(width, dtype=dtype)
        self.instructions.append(Instruction(operation, (1, 1, width), out, a, b or a))
        return out

    def mean(self, value: Place, lines: int, width: int) -> Place:
        """Of each of some lines of a row."""
        out = self.buffer(lines)
        of = replace(value, strides=(0, width, 1))
        self.instructions.append(Instruction("mean", (1, lines, width), replace(out, strides=(0, 1, 0)), of, of))
        return out if lines > 1 else replace(out, strides=ONE)

    def product(self, a: Place, weight: Tensor, bias: Tensor | None = None) -> Place:
        out = self.buffer(weight.shape[1], dtype=weight.dtype)
        self.instructions.append(Instruction("linear", (*weight.T.shape, 1), out, a, a, weight, None, bias))
        return out

    def launches(self, *outside: Place) -> list[Product | Fusion]:
        return list(fused(self.instructions, self.buffers, [place.buffer for place in outside]))

    def require_equal(self, inputs: dict[Place, Tensor], *out: Place) -> None:
        """What is at `out` is what the reference makes, and nothing that was given has changed."""
        values = {place.buffer: tensor.clone() for place, tensor in inputs.items()}
        expected = reference.run(self.instructions, self.buffers, values)
        rows = len(next(iter(values.values())))
        for place in out:
            of = self.buffers[place.buffer]
            values[place.buffer] = torch.full((rows, of.width), torch.nan, dtype=of.dtype)
        row_programs(CPU)(self.instructions, self.buffers, list(values)).run(values, rows)
        for place in out:
            result, wanted = values[place.buffer], expected[place.buffer]
            assert result.dtype == self.buffers[place.buffer].dtype
            near = 1e-5 if result.dtype == torch.float32 else 1e-2
            torch.testing.assert_close(result.double(), wanted, atol=near * float(wanted.abs().max()), rtol=near)
        assert all(torch.equal(values[place.buffer], tensor) for place, tensor in inputs.items())


def random(rows: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(width + rows)).to(dtype)


@pytest.mark.parametrize("operation", [*reference.ONE, *reference.TWO])
@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16], ids=str)
def test_every_operation_on_places_of_any_strides(operation, dtype):
    """The first operand with its last dimensions turned, the second one the same for each line."""
    listed, numbers = Listed(), random(3, 50, dtype)
    x, out = listed.buffer(50, dtype=dtype), listed.buffer(60)
    places = Place(1, 4, (24, 7, 1)), Place(0, 2, (21, 1, 3)), Place(0, 1, (0, 0, 1))
    if operation == "mean":
        places = Place(1, 4, (3, 1, 0)), Place(0, 2, (21, 7, 1)), Place(0, 2, (21, 7, 1))
    listed.instructions.append(Instruction(operation, (2, 3, 7), *places))
    before = torch.full((3, 60), 5.0)
    values = {0: numbers.abs() + 0.1 if operation == "rsqrt" else numbers, 1: before.clone()}
    row_programs(CPU)(listed.instructions, listed.buffers, [0, 1]).run(values, 3)
    expected = reference.run(listed.instructions, listed.buffers, {0: values[0], 1: before})[out.buffer]
    torch.testing.assert_close(values[1].double(), expected, atol=2e-6, rtol=1e-5)
    assert x.buffer == 0


def norm(listed: Listed, value: Place, width: int, lines: int = 1) -> Place:
    """As models have it, of each of some lines of a row."""
    weight, epsilon = listed.constant(random(1, width)[0]), listed.constant(torch.tensor(1e-5))
    mean = listed.mean(listed.line("mul", lines * width, value, value), lines, width)
    scale = listed.line("rsqrt", lines, listed.line("add", lines, mean, epsilon))
    out = value
    for factor, strides in ((scale, (0, 1 if lines > 1 else 0, 0)), (weight, (0, 0, 1))):
        made = listed.buffer(lines * width)
        tiled = [replace(place, strides=(0, width, 1)) for place in (made, out)]
        listed.instructions.append(Instruction("mul", (1, lines, width), *tiled, replace(factor, strides=strides)))
        out = made
    return out


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 24), (5, 600)])
def test_a_norm_with_its_residual_is_one_launch_without_memory_of_its_own(dtype, rows, width):
    listed = Listed()
    stream, made = listed.buffer(width), listed.buffer(width, dtype=dtype)
    new = listed.line("add", width, stream, made)
    out = listed.line("narrow", width, norm(listed, new, width), dtype=dtype)
    (fusion,) = listed.launches(new, out)
    assert (fusion.scratch, fusion.parts, set(fusion.results)) == (0, 1, {new.buffer, out.buffer})
    listed.require_equal({stream: random(rows, width), made: random(rows, width, dtype)}, new, out)


@pytest.mark.parametrize("lines", [1, 3, 8])
def test_norms_of_heads_stay_in_registers(lines):
    listed = Listed()
    x = listed.buffer(lines * 20)
    out = norm(listed, x, 20, lines)
    (fusion,) = listed.launches(out)
    assert fusion.scratch == 0
    listed.require_equal({x: random(4, lines * 20)}, out)


def test_a_norm_of_a_whole_row_stays_one_where_lines_of_it_are_read_behind():
    listed = Listed()
    x, out, factor = listed.buffer(40), listed.buffer(40), listed.buffer(20)
    scaled = norm(listed, x, 40)
    lines = [replace(place, strides=(0, 20, 1)) for place in (out, scaled)]
    listed.instructions.append(Instruction("mul", (1, 2, 20), *lines, factor))
    listed.require_equal({x: random(4, 40), factor: random(4, 20)}, out)


def test_what_changes_places_is_read_from_memory_once_all_have_written():
    """A rotation: the halves of two heads, the second one negated, from a part of a joined product."""
    listed = Listed()
    x, cos, sin = listed.buffer(64, dtype=BF16), listed.buffer(16), listed.buffer(16)
    turned, one, other, out = (listed.buffer(32) for _ in range(4))
    halves = [Place(x.buffer, 32 + begin, (0, 16, 1)) for begin in (0, 8)]
    negated = listed.buffer(16)
    lines, all_of = (0, 8, 1), (0, 16, 1)
    steps = [
        ("mul", (1, 2, 8), replace(negated, strides=lines), halves[1], listed.constant(torch.tensor(-1.0))),
        ("copy", (1, 2, 8), Place(turned.buffer, 0, all_of), *[replace(negated, strides=lines)] * 2),
        ("copy", (1, 2, 8), Place(turned.buffer, 8, all_of), *[halves[0]] * 2),
        ("mul", (1, 2, 16), replace(one, strides=all_of), replace(turned, strides=all_of), sin),
        ("mul", (1, 2, 16), replace(other, strides=all_of), replace(halves[0], strides=all_of), cos),
        ("add", (1, 2, 16), *(replace(place, strides=all_of) for place in (out, one, other))),
    ]  # fmt: skip
    listed.instructions = [Instruction(*step) for step in steps]
    (fusion,) = listed.launches(out)
    assert fusion.scratch == 32
    assert [fusion.words[i + 6] for i in range(0, len(fusion.words), WORDS)] == [0, 0, 0, 1, 0, 0]
    inputs = {x: random(3, 64, BF16), cos: random(3, 16), sin: random(3, 16) * 2}
    listed.require_equal(inputs, out)


@pytest.mark.parametrize("width", [96, 1024, 2500])
def test_programs_take_parts_of_a_row_where_no_number_needs_another_s(width):
    listed = Listed()
    both = listed.buffer(2 * width, dtype=BF16)
    gated = listed.line("mul", width, listed.line("silu", width, both), replace(both, offset=width))
    out = listed.line("narrow", width, gated, dtype=BF16)
    (fusion,) = listed.launches(out)
    assert fusion.parts == -(-width // 1024)
    listed.require_equal({both: random(3, 2 * width, BF16)}, out)


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("biased", [(), (1,), (0, 1, 2)])
def test_products_of_the_same_values_are_one_where_their_weights_lie_side_by_side(dtype, biased):
    whole, apart = random(48, 20, dtype), random(16, 20, dtype)
    biases = [random(1, size, dtype)[0] if i in biased else None for i, size in enumerate((32, 8, 8))]
    weights = [weight.T for weight in whole.split([32, 8, 8])]
    for own, launches in (
        (weights, 1),
        ([*weights[:2], apart[:8].T], 2),
        ([weight.T.clone().T for weight in weights], 3),
    ):
        listed = Listed()
        x = listed.buffer(24, dtype=dtype)
        at = replace(x, offset=4)
        outs = [listed.product(at, weight, bias) for weight, bias in zip(own, biases, strict=True)]
        assert len(listed.launches(*outs)) == launches
        listed.require_equal({x: random(5, 24, dtype)}, *outs)


def test_products_with_some_of_the_values_are_of_their_own_though_their_weights_lie_side_by_side():
    memory = random(1, 32 * 20 + 8 * 16)[0]
    weights = memory[: 32 * 20].view(32, 20).T, memory[32 * 20 :].view(8, 16).T
    listed = Listed()
    x = listed.buffer(20)
    outs = [listed.product(x, weight) for weight in weights]
    assert products_of_one(listed.instructions) == [[weight.data_ptr()] for weight in weights]
    assert len(listed.launches(*outs)) == 2
    listed.require_equal({x: random(5, 20)}, *outs)


def test_no_rows_are_no_launch():
    listed = Listed()
    x = listed.buffer(8)
    out = listed.line("silu", 8, x)
    values = {x.buffer: torch.empty(0, 8), out.buffer: torch.empty(0, 8)}
    row_programs(CPU)(listed.instructions, listed.buffers, list(values)).run(values, 0)
    assert values[out.buffer].shape == (0, 8)


SHAPES = {
    "llama": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8},
    "qwen2": {"hidden_size": 8192, "intermediate_size": 29568, "num_attention_heads": 64, "num_key_value_heads": 8},
    "qwen3": {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8},
}
"""Llama-3.1-8B, Qwen2.5-72B and Qwen3-8B."""


@pytest.mark.slow
@pytest.mark.parametrize("family", SHAPES)
def test_the_lists_of_real_models_compile_and_fit(compile_all, family):
    config = AutoConfig.for_model(family, **SHAPES[family], head_dim=128, vocab_size=256, num_hidden_layers=2)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=BF16).eval().requires_grad_(False)
    lowered = lower(trace(model), plain=True)
    variants = []
    for segment, attended in zip(lowered.segments, [*lowered.attended, lowered.leavings], strict=True):
        read = {
            place.buffer
            for other in lowered.segments
            if other is not segment
            for step in other
            for place in step.places[1:]
        }
        outside = read | {value.buffer for value in attended}
        for fusion in fused(segment, lowered.buffers, outside):
            if isinstance(fusion, Fusion):
                variants.append(variant(fusion, lowered.buffers))
    assert len(variants) == 8
    require_fits(compile_all("kvshelf.kernels.rowwise.triton", variants))


def variant(fusion: Fusion, buffers: list[Buffer]) -> Variant:
    own = [buffers[buffer] for buffer in fusion.buffers]
    types = ["*bf16" if buffer.dtype == BF16 else "*fp32" for buffer in own]
    strides = [0 if buffer.constant is not None else buffer.width for buffer in own]
    if fusion.scratch:
        types, strides = [*types, "*fp32"], [*strides, fusion.scratch]
    constants = {"STRIDES": tuple(strides), "LIST": fusion.words, "WORDS": WORDS}
    return Variant("carry_out", {"tensors": tuple(types)}, constants, warps(fusion.tile))
