"""Linear layers with weights in the memory layout in which they are multiplied.

On a CPU `nn.functional.linear` lays the weights out anew in every call, which for a few rows takes as long as the
product. kvshelf's own C form multiplies them where it was compiled, in bf16 where the processor has AVX512-BF16 and no
AMX; elsewhere oneDNN does. torch's own compiler uses the same two operations of oneDNN for layers whose
weights stay the same (`torch._inductor`, freezing).
"""

from __future__ import annotations

import abc
import copy
import platform
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kvshelf.kernels.native import LANES
from kvshelf.kernels.rowwise import available, linear, multiplies_bf16, pack_weight, plain_linear, unpack_weight
from kvshelf.kernels.rowwise.fusing import adjacent
from kvshelf.kernels.rowwise.native import LINES, PANEL, WEIGHT_DTYPES
from kvshelf.model.devices import hooked
from kvshelf.model.weights.int8 import as_int8, linear_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ROWS = 32
"""Rows that the layout is chosen for: those of a question, or of many answers. It suits one row and thousands."""


class PackedLinear(nn.Module, abc.ABC):
    """As `nn.Linear`, for inference: x [..., in_features] to [..., out_features].

    Sums run in another order than `nn.Linear`'s, so fp32 results differ in their last bits. `weight` is in an order of
    its own and cannot be changed; `unpacked` returns the original, and the state dict holds it as `nn.Linear`'s does. A
    gradient of `x` is that of a product with the original, which is slow.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight: in the layout of `_packed`."""
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = bias

    @property
    @abc.abstractmethod
    def out_features(self) -> int:
        """As of `nn.Linear`."""

    @staticmethod
    def of(weight: Tensor, bias: Tensor | None, weights: str = "plain") -> PackedLinear:
        """The layer of a weight `[out_features, in_features]`, with its own copy of it. weights: "int8" for a weight
        that `loading.load` has rounded."""
        kind: type[PackedLinear] = PrepackedLinear
        if PanelLinear.takes(weight):
            kind = Int8Linear if weights == "int8" else PanelLinear
        return kind._of(weight.detach(), bias)

    @classmethod
    def _of(cls, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        return cls(cls._packed(weight), bias)

    @property
    @abc.abstractmethod
    def unpacked(self) -> Tensor:
        """The weight `[out_features, in_features]`, made anew."""

    @staticmethod
    @abc.abstractmethod
    def _packed(weight: Tensor) -> Tensor: ...

    @abc.abstractmethod
    def _multiplies(self, dtype: torch.dtype) -> bool:
        """Whether `_product` takes rows of a dtype. torch multiplies those of others, as after `model.double()`."""

    @abc.abstractmethod
    def _product(self, x: Tensor) -> Tensor: ...

    def forward(self, x: Tensor) -> Tensor:
        """The product, in the dtype of `x`."""
        if (x.requires_grad and torch.is_grad_enabled()) or not self._multiplies(x.dtype):
            return nn.functional.linear(x, self.unpacked.to(x.dtype), self.bias)
        return self._product(x)

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedLinear:
        """torch cannot copy a weight that oneDNN has ordered."""
        return self._of(self.unpacked, copy.deepcopy(self.bias, memo)).train(self.training)

    def extra_repr(self) -> str:
        """The shape, printed as `nn.Linear` prints it."""
        rows, columns = self.unpacked.shape
        return f"in_features={columns}, out_features={rows}, bias={self.bias is not None}"

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.unpacked


class PrepackedLinear(PackedLinear):
    """With weights as oneDNN orders them. They are opaque to torch's other operations."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self._dtype = weight.dtype

    @staticmethod
    def _packed(weight: Tensor) -> Tensor:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight.default(weight, _ROWS)
        return packed

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def unpacked(self) -> Tensor:
        return self.weight.to_dense()

    def _multiplies(self, dtype: torch.dtype) -> bool:
        return dtype == self.weight.dtype == self._dtype

    def _product(self, x: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, "none", [], "")
        return product


class PanelLinear(PackedLinear):
    """With weights in panels, `[out_features / 32, in_features, 32]`, which kvshelf's own C form multiplies in fp32;
    in bf16 in panels of pairs, where the processor multiplies these.

    A weight in fp32 that is exact in bf16, as in models that were published in bf16, is kept in bf16: half the bytes to
    keep and to read for the same products, to the bit. Its panels are int16, so that no cast of the model changes
    them. Passes by lists of instructions (`kernels.rowwise`) need this layer.
    """

    @staticmethod
    def takes(weight: Tensor) -> bool:
        """Whether this process can multiply such a weight `[out_features, in_features]`."""
        outputs, inputs = weight.shape
        fits = weight.device.type == "cpu" and outputs % PANEL == 0
        if weight.dtype == torch.bfloat16:
            return fits and inputs % 2 == 0 and multiplies_bf16()
        return fits and weight.dtype == torch.float32 and available()

    @staticmethod
    def _packed(weight: Tensor) -> Tensor:
        bits = bits_of_bf16(weight) if weight.dtype == torch.float32 else None
        return pack_weight(weight if bits is None else bits)

    @property
    def out_features(self) -> int:
        return self.weight.shape[0] * PANEL

    @property
    def unpacked(self) -> Tensor:
        weight = unpack_weight(self.weight)
        return weight.view(torch.bfloat16).float() if weight.dtype == torch.int16 else weight

    def _multiplies(self, dtype: torch.dtype) -> bool:
        if self.weight.dim() == 4:
            return dtype == self.weight.dtype == torch.bfloat16
        return dtype == torch.float32 and self.weight.dtype in WEIGHT_DTYPES[:3]

    def _product(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class Int8Linear(PanelLinear):
    """With weights that were rounded to int8 (`int8.round_to_int8`): panels of bytes, and a scale for every output."""

    scales: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None, scales: Tensor) -> None:
        super().__init__(weight, bias)
        self.register_buffer("scales", scales, persistent=False)  # not in the state dict, where `unpacked` is

    @classmethod
    def _of(cls, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        numbers, scales = as_int8(weight)
        return cls(pack_weight(numbers), bias, scales)

    @property
    def unpacked(self) -> Tensor:
        return unpack_weight(self.weight) * self.scales[:, None]

    def _multiplies(self, dtype: torch.dtype) -> bool:
        return dtype == self.scales.dtype == torch.float32

    def _product(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, self.scales)


class TiedLinear(nn.Module):
    """As `nn.Linear` without a bias, for a weight that another module shares: a head tied to the embedding. kvshelf's
    own C form multiplies it unpacked, so that it takes no memory of its own."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight

    @staticmethod
    def takes(module: nn.Linear) -> bool:
        """Whether this process can multiply the weight of a module."""
        outputs, inputs = module.weight.shape
        whole = module.bias is None and not (inputs % LANES or outputs % LINES) and module.weight.is_contiguous()
        return whole and module.weight.dtype == torch.float32 and module.weight.device.type == "cpu" and available()

    def forward(self, x: Tensor) -> Tensor:
        """The product, in fp32."""
        trained = torch.is_grad_enabled() and (x.requires_grad or self.weight.requires_grad)
        if trained or self.weight.dtype != torch.float32:
            return nn.functional.linear(x, self.weight)
        return plain_linear(x, self.weight)


class SummedLinear(nn.Module):
    """A layer whose inputs are divided among processes (`rowwise` in transformers' plans for tensor parallelism): from
    this process's x [..., in_features] to the sum of the products of all processes [..., out_features]."""

    def __init__(self, part: PackedLinear, bias: Tensor | None) -> None:
        super().__init__()
        self.part = part
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """Every process of the group has to call it."""
        product: Tensor = self.part(x)
        dist.all_reduce(product)
        return product if self.bias is None else product + self.bias


def prepack(model: PreTrainedModel, weights: str = "plain") -> None:
    """Replace the linear layers of `model`, in place, where that makes them faster: on x86 CPUs. Where processes share
    the model, each replaces its parts.

    weights: as of `loading.load`, which has loaded the model. Old weights are freed one by one, so peak memory grows by
    one weight. Weights that two modules share (a head tied to the embedding) stay unpacked, for another product in
    fp32; where they are int8 or exact in bf16, the head gets a narrow copy beside the embedding, because each step
    reads all of it. Dtypes without a fast product in oneDNN, subclasses of `nn.Linear`, and models on other devices, or
    on several, stay unchanged. Do not use it on a model that is trained or whose weights change.
    """
    if hooked(model):
        return
    if platform.machine() != "x86_64" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return
    plan: dict[str, str] = getattr(model, "tp_plan", None) or {}
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    rounded = {name for name, _ in linear_layers(model)} if weights == "int8" else set()
    for name in [name for name, _ in model.named_modules()]:  # names alone: a list of modules would keep all weights
        module = model.get_submodule(name)
        if type(module) is not nn.Linear or not _is_fast(module.weight):
            continue
        if uses[id(module.weight)] > 1 and not (
            PanelLinear.takes(module.weight) and (name in rounded or bits_of_bf16(module.weight) is not None)
        ):
            if TiedLinear.takes(module):
                model.set_submodule(name, TiedLinear(module.weight).train(module.training))
            continue
        style = plan.get(re.sub(r"\d+", "*", name), "")
        weight, bias = _local_part(module.weight), _local_part(module.bias)
        if weight is module.weight or style == "colwise":
            kind = "int8" if name in rounded else "plain"
            model.set_submodule(name, PackedLinear.of(weight, bias, kind).train(module.training))
        elif style == "rowwise":
            model.set_submodule(name, SummedLinear(PackedLinear.of(weight, None), bias).train(module.training))


def join_weights(model: PreTrainedModel, groups: Iterable[Sequence[int]]) -> None:
    """Lay the weights `[outputs, inputs]` of each group one after the other in memory, in place, so that one product
    multiplies with all of them. groups: their addresses. A group stays unchanged if one of its addresses belongs to no
    parameter or to several, or comes twice: others would keep the old memory. Memory grows by one group's weights at a
    time."""
    uses = Counter(parameter.data_ptr() for parameter in model.parameters())
    parameters = {p.data_ptr(): p for p in model.parameters() if uses[p.data_ptr()] == 1}
    for group in groups:
        weights = [parameters[address] for address in dict.fromkeys(group) if address in parameters]
        if len(weights) < len(group) or all(adjacent(one.T, other.T) for one, other in pairwise(weights)):
            continue
        joined = torch.cat([weight.detach() for weight in weights])
        for parameter, part in zip(weights, torch.split(joined, [len(weight) for weight in weights]), strict=True):
            parameter.data = part


def bits_of_bf16(weight: Tensor) -> Tensor | None:
    """A weight as the bits of bf16, int16; None where it is not exact there."""
    halves = weight.detach().bfloat16()
    return halves.view(torch.int16) if torch.equal(halves.to(weight.dtype), weight) else None


def plain_weight(module: nn.Module | None) -> Tensor | None:
    """The weight of a module as it was before `prepack`; None where it has none. Where processes share it (tensor
    parallel), the part of this one."""
    if isinstance(module, PackedLinear):
        return module.unpacked
    if isinstance(module, SummedLinear):
        return module.part.unpacked
    weight = getattr(module, "weight", None)
    return _local_part(weight) if isinstance(weight, Tensor) else None


def _local_part(of: Any) -> Any:
    """This process's part of a parameter; the parameter itself where it is not divided among processes."""
    return nn.Parameter(of.to_local().detach(), requires_grad=False) if hasattr(of, "to_local") else of


def _is_fast(weight: Tensor) -> bool:
    if weight.device.type != "cpu":
        return False
    bfloat16: bool = weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return bfloat16 or weight.dtype == torch.float32
