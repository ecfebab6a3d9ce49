"""Linear layers with weights in the memory layout in which oneDNN multiplies them, on a CPU.

`nn.functional.linear` lays the weights out anew in every call, which for a few rows takes as long as the product. The
two operations used here are what torch's own compiler makes of layers whose weights stay the same (`torch._inductor`,
freezing); compiling the whole model would need a compiler at run time, and time for each length of a question.
"""

from __future__ import annotations

import platform
from collections import Counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ROWS = 32
"""Rows that the layout is chosen for: those of a question, or of many answers. It suits one row and thousands."""


class PrepackedLinear(nn.Module):
    """As `nn.Linear`, for inference alone: x [..., in_features] to [..., out_features], no gradient.

    Sums run in another order than `nn.Linear`'s, so fp32 results differ in their last bits. `weight` is opaque to
    torch's other operations (`weight.to_dense()` returns the original) and cannot be changed; the state dict holds it
    as `nn.Linear`'s does.
    """

    def __init__(self, packed: Tensor, bias: nn.Parameter | None) -> None:
        """`packed` is what `of` makes of a weight `[out_features, in_features]`."""
        super().__init__()
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = bias

    @classmethod
    def of(cls, linear: nn.Linear) -> PrepackedLinear:
        """The same layer with its own copy of the weight."""
        packed = torch.ops.mkldnn._reorder_linear_weight.default(linear.weight.detach(), _ROWS)
        return cls(packed, linear.bias).train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        """The product, in the dtype of `x`, which must be that of the weight."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, "none", [], "")
        return product

    def extra_repr(self) -> str:
        """The shape, printed as `nn.Linear` prints it."""
        rows, columns = self.weight.shape
        return f"in_features={columns}, out_features={rows}, bias={self.bias is not None}"

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.weight.to_dense()


def prepack(model: PreTrainedModel) -> None:
    """Replace the linear layers of `model`, in place, where that makes them faster: on x86 CPUs.

    Old weights are freed one by one, so peak memory grows by one weight. Weights that two modules share (a head tied to
    the embedding), dtypes without a fast product in oneDNN, subclasses of `nn.Linear`, and models on other devices stay
    unchanged. Do not use it on a model that is trained or whose weights change.
    """
    if platform.machine() != "x86_64" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    for name in [name for name, _ in model.named_modules()]:  # names alone: a list of modules would keep all weights
        module = model.get_submodule(name)
        if type(module) is nn.Linear and uses[id(module.weight)] == 1 and _is_fast(module.weight):
            model.set_submodule(name, PrepackedLinear.of(module))


def _is_fast(weight: Tensor) -> bool:
    if weight.device.type != "cpu":
        return False
    bfloat16: bool = weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return bfloat16 or weight.dtype == torch.float32
