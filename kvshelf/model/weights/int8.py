"""Weights of a byte: those of each linear layer, rounded to whole numbers from -127 to 127, with a scale an output.

The rounded weights are an fp32 model of its own, with an identity of its own: a number times its scale is exact in
fp32. So a layer can be multiplied from its bytes, or as it is where no compiled form takes it, and to round twice is to
round once: the bytes are found again when the layer is packed (`prepacking`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor, nn

from kvshelf.errors import InvalidRequest, PolicyUnsupported
from kvshelf.kernels.rowwise.native import PANEL

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WEIGHTS: Final = ("plain", "int8")
"""Weights as they are loaded, or rounded to bytes."""

MOST: Final = 127
"""Symmetric: -128 would have no opposite."""

_LEAST_SCALE: Final = 2.0**-100
"""A smaller one times a number would not be exact."""

_DROPPED_BITS: Final = 0xFF
"""Dropped bits of a scale's 24, so that the product with the 7 bits of a number fits into 24."""


def require_int8(model: PreTrainedModel, name: str, *, device: str, dtype: str) -> None:
    """Raise `InvalidRequest` or `PolicyUnsupported` where a model cannot have weights in int8. model: may have no
    weights (`loading.skeleton`). Other arguments as of `loading.load`."""
    if device not in ("auto", "cpu") or (device == "auto" and torch.cuda.is_available()):
        raise InvalidRequest(
            f"weights in int8 are multiplied on a CPU, and the device is {device!r}; take --device cpu", param="weights"
        )
    if dtype not in ("auto", "float32"):
        raise InvalidRequest(
            f"weights in int8 are multiplied in float32, and dtype is {dtype!r}; leave it out", param="weights"
        )
    for layer, module in model.named_modules():
        if reason := _unfit(module, head=module is model.get_output_embeddings()):
            raise PolicyUnsupported(
                f"{name!r} cannot have weights in int8: {reason} ({layer}); leave out --weights", param="weights"
            )


def round_to_int8(model: PreTrainedModel, name: str) -> None:
    """Round the weights of a model's linear layers, in place; other weights stay. Raises `InvalidRequest` where one is
    not finite."""
    for layer, module in linear_layers(model):
        weight = module.weight.detach()
        if not weight.isfinite().all():
            raise InvalidRequest(
                f"the weights of {name!r} are not finite ({layer}), so that they cannot be rounded to int8; leave out "
                "--weights",
                param="weights",
            )
        numbers, scales = as_int8(weight)
        weight.copy_(numbers * scales[:, None])


def linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """The layers that are rounded, by name. A head that the panels do not fit stays unchanged."""
    for layer, module in model.named_modules():
        if type(module) is nn.Linear and not module.weight.shape[0] % PANEL:
            yield layer, module


def saved_bytes(model: PreTrainedModel) -> int:
    """Bytes by which int8 makes a model in fp32 smaller, scales included. A head that is tied to the embedding gets an
    int8 copy beside it."""
    tied = model.get_input_embeddings().weight
    saved = 0
    for _, module in linear_layers(model):
        scaled = module.weight.numel() + 4 * module.weight.shape[0]
        saved += (0 if module.weight is tied else module.weight.nbytes) - scaled
    return saved


def as_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """`[outputs, inputs]` in fp32 as the nearest numbers int8 of the same shape and scales `[outputs]` fp32."""
    scales = (weight.abs().amax(dim=1) / MOST).clamp_min(_LEAST_SCALE)
    scales = ((scales.view(torch.int32) + _DROPPED_BITS) & ~_DROPPED_BITS).view(torch.float32)
    return (weight / scales[:, None]).round().to(torch.int8), scales


def _unfit(module: nn.Module, *, head: bool) -> str:
    """The reason why a module's own weights cannot be in int8; "" where they can, or where it has none to round."""
    weights = [weight for weight in module.parameters(recurse=False) if weight.dim() > 1]
    if not weights or isinstance(module, nn.Embedding):
        return ""
    shape = " x ".join(map(str, weights[0].shape))
    if type(module) is not nn.Linear:
        return f"a {type(module).__name__} has weights of {shape}, which is no linear layer"
    if module.weight.shape[0] % PANEL and not head:
        return f"a linear layer of {shape} has outputs that are no multiple of {PANEL}"
    return ""
