"""The computations of a model that take each token alone: products with packed weights, and lists of instructions.

There is no form in torch's operations: `row_programs` gives the form of a device, and where there is none, the model
itself runs. C computes in fp32; where a processor has AVX512-BF16, products also take rows and weights in bf16, and sum
them in fp32. On a GPU torch multiplies, and Triton carries out the instructions between the products.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from kvshelf.kernels.checks import require
from kvshelf.kernels.dispatch import form, implementation
from kvshelf.kernels.native import LANES, Bf16Products, bf16_products, library
from kvshelf.kernels.rowwise.native import LINES, PANEL, WEIGHT_DTYPES, RowProgram, multiply, multiply_lines


def available() -> bool:
    """Whether C forms were compiled for this CPU, and no other form is forced."""
    return form(torch.device("cpu")) == "native" and library() is not None


def row_programs(device: torch.device) -> type[RowProgram] | None:
    """The class of row programs on a device; None where neither C nor Triton computes there. Triton's takes plain
    weights `[inputs, outputs]`, and has no `part`."""
    if form(device) != "triton":
        return RowProgram if device.type == "cpu" and available() else None
    fused: type[RowProgram] = implementation("rowwise", device).FusedProgram
    return fused


def multiplies_bf16() -> bool:
    """Whether `linear` takes rows and weights in bf16. Where the processor has AMX, oneDNN's products should be faster
    (not measured: no such machine was at hand)."""
    return available() and bf16_products() == Bf16Products.PAIRS


def pack_weight(weight: Tensor) -> Tensor:
    """A weight `[outputs, inputs]` as `[outputs / PANEL, inputs, PANEL]`, in the order in which a product reads it. In
    bf16 as `[outputs / PANEL, inputs / 2, PANEL, 2]`."""
    outputs, inputs = weight.shape
    paired = (inputs // 2, 2) if weight.dtype == torch.bfloat16 else (inputs,)
    return weight.reshape(outputs // PANEL, PANEL, *paired).transpose(1, 2).contiguous()


def unpack_weight(packed: Tensor) -> Tensor:
    """The weight `[outputs, inputs]` that `pack_weight` packed."""
    return packed.transpose(1, 2).reshape(packed.shape[0] * PANEL, -1)


# Defined by hand: what `torch.library.custom_op` adds to each call takes longer than a small product of one row.
_LIBRARY: Final = torch.library.Library("kvshelf", "FRAGMENT")  # type: ignore[no-untyped-call]


def linear(x: Tensor, packed: Tensor, bias: Tensor | None, scales: Tensor | None = None) -> Tensor:
    """x `[..., inputs]` times a packed weight, and the bias `[outputs]`: `[..., outputs]`, on the CPU.

    packed: fp32; int16, the bits of bf16; or int8, whose numbers are its own times `scales` `[outputs]` fp32. Then
    rows, bias and sums are fp32. Or bf16, as rows and bias are then; sums are fp32, and rounded at the end. Sums of a
    row go from the first input to the last, whatever the other rows. Bytes: weights once. FLOPs: 2 * rows * inputs *
    outputs.
    """
    product: Tensor = torch.ops.kvshelf.linear.default(x, packed, bias, scales)
    return product


def _linear(x: Tensor, packed: Tensor, bias: Tensor | None, scales: Tensor | None) -> Tensor:
    require(
        x.dtype == (torch.bfloat16 if packed.dtype == torch.bfloat16 else torch.float32)
        and packed.dtype in WEIGHT_DTYPES
        and (packed.dtype != torch.bfloat16 or multiplies_bf16())
        and (packed.dtype == torch.int8) == (scales is not None)
        and x.device.type == "cpu"
        and x.shape[-1] * packed.shape[0] * PANEL == packed.numel(),
        "linear",
        "x must be [..., inputs] in fp32 on the CPU, and a weight fp32, bf16 as int16, or int8 with scales; with "
        "AVX512-BF16 also both in bf16",
        x=x,
        packed=packed,
    )
    out = torch.empty(*x.shape[:-1], packed.shape[0] * PANEL)
    multiply(x.contiguous(), packed, scales, None if bias is None else bias.float(), out)
    return out.to(x.dtype)


def plain_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x `[..., inputs]` times a weight `[outputs, inputs]` that is not packed: `[..., outputs]`, fp32 on the CPU.
    inputs: a multiple of 16; outputs: of 4.

    It is for a head tied to the embedding, of which a packed copy would take as much memory again. Sums of a row do not
    depend on the other rows. Bytes and FLOPs are those of `linear`.
    """
    product: Tensor = torch.ops.kvshelf.plain_linear.default(x, weight)
    return product


def _plain_linear(x: Tensor, weight: Tensor) -> Tensor:
    outputs, inputs = weight.shape
    require(
        x.dtype == weight.dtype == torch.float32
        and x.device.type == "cpu"
        and x.shape[-1] == inputs
        and weight.is_contiguous()
        and not (inputs % LANES or outputs % LINES),
        "plain_linear",
        f"x must be [..., inputs] in fp32 on the CPU, inputs a multiple of {LANES} and outputs of {LINES}",
        x=x,
        weight=weight,
    )
    out = x.new_empty(*x.shape[:-1], outputs)
    multiply_lines(x.contiguous(), weight, out)
    return out


def _define(schema: str, run: Callable[..., Tensor], shaped: Callable[..., Tensor]) -> None:
    """Define an operation of torch, so that traces have it. shaped: makes its result without numbers."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, run, "CPU")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"kvshelf::{name}", shaped, lib=_LIBRARY)


_define(
    "linear(Tensor x, Tensor packed, Tensor? bias, Tensor? scales) -> Tensor",
    _linear,
    lambda x, packed, _, __: x.new_empty(*x.shape[:-1], packed.shape[0] * PANEL),
)
_define(
    "plain_linear(Tensor x, Tensor weight) -> Tensor",
    _plain_linear,
    lambda x, weight: x.new_empty(*x.shape[:-1], weight.shape[0]),
)
