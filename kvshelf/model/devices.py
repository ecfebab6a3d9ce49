"""Where a model computes and where its weights are: on one device, spread over several by a `device_map`, or offloaded
to the CPU or the disk until a module runs. accelerate's hooks (`_hf_hook`) know this, and move the modules' inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from blake3 import blake3
from torch import Tensor, nn

from kvshelf.artifact.identity import DIGEST_BYTES
from kvshelf.errors import InvalidRequest, PolicyUnsupported

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Devices:
    """Where a model computes. inputs: the device of token ids and positions. layers: of each layer, with its cache."""

    inputs: torch.device
    layers: tuple[torch.device, ...]

    @classmethod
    def of(cls, model: PreTrainedModel) -> Devices:
        """Raises as `layer_devices`."""
        return cls(input_device(model), layer_devices(model))

    @cached_property
    def distinct(self) -> tuple[torch.device, ...]:
        """The devices of layers, each once."""
        return tuple(dict.fromkeys(self.layers))

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """The place of each layer's device in `distinct`."""
        return tuple(map(self.distinct.index, self.layers))


@dataclass(frozen=True)
class Placement:
    """Each device's part of a model. weights: bytes that lie there, buffers included; of offloaded weights, the largest
    tensor, because a copy of it lies there while it computes. layers: where each layer computes, with its cache. alone:
    whether one device has everything."""

    weights: Mapping[torch.device, int]
    layers: tuple[torch.device, ...]
    alone: bool

    @classmethod
    def of(cls, model: PreTrainedModel) -> Placement:
        """The placement of a loaded model. Raises as `layer_devices`."""
        lying, copied = Counter[torch.device](), Counter[torch.device]()
        owners = {tensor: module for module in model.modules() for tensor in _own_tensors(module)}  # tied ones once
        for tensor, module in owners.items():
            if not tensor.is_meta:
                lying[tensor.device] += tensor.nbytes
            else:
                device = next(_computes_on(module))
                copied[device] = max(tensor.nbytes, copied[device])
        return cls(lying + copied, layer_devices(model), len(lying) == 1 and not copied)

    @classmethod
    def expected(cls, outline: PreTrainedModel, most: Mapping[int | str, int]) -> Placement:
        """The placement that transformers will give a model by `device_map="auto"`. outline: the model without weights
        (`loading.outline`). most: bytes of weights for each GPU, by its number, and for "cpu"."""
        from transformers.integrations.accelerate import get_balanced_memory, infer_auto_device_map

        whole = outline._no_split_modules
        balanced = get_balanced_memory(outline, max_memory=dict(most), no_split_module_classes=whole)
        names: dict[str, int | str]
        names = infer_auto_device_map(outline, max_memory=balanced, no_split_module_classes=whole)
        main = next((device for device in names.values() if isinstance(device, int)), "cpu")
        lying, copied = Counter[torch.device](), 0

        def placed(name: str) -> int | str:
            while name and name not in names:
                name = name.rpartition(".")[0]
            return names.get(name, "cpu")

        def computing(name: str) -> torch.device:
            at = placed(name)
            at = at if isinstance(at, int) else main
            return torch.device("cuda", at) if isinstance(at, int) else torch.device(at)

        for name, tensor in chain(outline.named_parameters(), outline.named_buffers()):
            if isinstance(placed(name), int) or main == "cpu":
                lying[computing(name)] += tensor.nbytes
            else:
                copied = max(copied, tensor.nbytes)
        lying += Counter({computing(""): copied})
        numbers = {module: name for name, module in outline.named_modules()}
        of_layers = {index: computing(numbers[module]) for index, module in _attentions(outline)}
        inputs = computing(numbers[outline.get_input_embeddings()])
        layers = range(outline.config.num_hidden_layers)
        return cls(lying, tuple(of_layers.get(index, inputs) for index in layers), len(set(names.values())) == 1)


@cache
def multiplies_bfloat16() -> bool:
    """Whether this machine's CPU has instructions for products in bfloat16: AMX, AVX512-BF16, or those of ARM. torch
    emulates them elsewhere, and a prefill takes many times as long as in float32.

    Read off the flags and not measured: the dtype is part of every cache's identity, so that it must not depend on what
    else the machine does. False where the system does not tell its flags.
    """
    try:
        lines = _CPUINFO.read_text(errors="replace").splitlines()
    except OSError:
        return False
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return not {"amx_bf16", "avx512_bf16", "bf16"}.isdisjoint(flags.split())


def require_bfloat16(card: str, capability: tuple[int, int]) -> None:
    """Raise `InvalidRequest` for a GPU that has no bfloat16, which torch emulates there: those before Ampere."""
    if capability < (8, 0):
        raise InvalidRequest(
            f"{card} (compute capability {capability[0]}.{capability[1]}) multiplies no bfloat16, which begins with "
            "8.0; take --dtype float16, or float32 where a model overflows in it",
            param="dtype",
        )


def input_device(model: PreTrainedModel) -> torch.device:
    """Where the token embedding computes; "meta" for a model without weights."""
    return next(_computes_on(model.get_input_embeddings()), model.device)


def layer_devices(model: PreTrainedModel) -> tuple[torch.device, ...]:
    """Where the attention of each layer computes, or its recurrence; the input's device for a layer with neither.

    Raises `PolicyUnsupported` where weights are on no device, and where those of one attention are on several.
    """
    kind = type(model).__name__
    if lost := [name for name, tensor in model.state_dict().items() if tensor.is_meta and not _offloading(model, name)]:
        shown = ", ".join(lost[:3]) + (", ..." if len(lost) > 3 else "")
        raise PolicyUnsupported(
            f"{len(lost)} weights of this {kind} are on no device ({shown}); load it with a device_map that names a "
            "device for every layer, or with device_map='auto'",
            param="model",
        )
    devices_of: dict[int, set[torch.device]] = {}
    for index, module in _attentions(model):
        devices_of.setdefault(index, set()).update(_computes_on(module))
    for index, devices in sorted(devices_of.items()):
        if len(devices) > 1:
            raise PolicyUnsupported(
                f"the attention of layer {index} of this {kind} is on several devices "
                f"({', '.join(sorted(map(str, devices)))}), and its cache is on one; load it with a device_map that "
                "keeps each layer whole, such as device_map='auto'",
                param="model",
            )
    inputs = input_device(model)
    return tuple(next(iter(devices_of.get(index, ())), inputs) for index in range(model.config.num_hidden_layers))


def hooked(model: nn.Module) -> bool:
    """Whether modules run by accelerate's hooks, as those of a model on one device do not."""
    return any(_hooks(module) for module in model.modules())


def weight_of(model: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """`tensor`, the entry `name` of the model's state dict; where it is offloaded, the tensor that the model computes
    with, on the CPU or the device that will use it."""
    hook = _offloading(model, name) if tensor.is_meta else None
    return tensor if hook is None else hook.weights_map[name.rpartition(".")[2]]


def weights_digest(model: nn.Module) -> str:
    """Hex digest of all weights and buffers, with their names, dtypes and shapes."""
    hasher = blake3(max_threads=blake3.AUTO)
    for name, entry in sorted(model.state_dict().items()):
        # Of processes that share the model, each has a part.
        tensor = entry.full_tensor() if hasattr(entry, "full_tensor") else weight_of(model, name, entry)
        hasher.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        hasher.update(tensor.detach().contiguous().cpu().flatten().view(torch.uint8).numpy().data)
    return hasher.hexdigest(length=DIGEST_BYTES)


def _offloading(model: nn.Module, name: str) -> Any:
    """The hook that gives a module its tensor `name` for as long as it runs; None where there is none."""
    hooks = _hooks(model.get_submodule(name.rpartition(".")[0]))
    return next((hook for hook in hooks if getattr(hook, "weights_map", None) is not None), None)


def _hooks(module: nn.Module) -> tuple[Any, ...]:
    hook: Any = getattr(module, "_hf_hook", None)
    return () if hook is None else tuple(getattr(hook, "hooks", (hook,)))


def _attentions(model: nn.Module) -> Iterator[tuple[int, nn.Module]]:
    """The innermost modules that know their layer, with its number."""
    for module in model.modules():
        index = getattr(module, "layer_idx", None)
        inner = (part for part in module.modules() if part is not module)
        if isinstance(index, int) and not any(hasattr(part, "layer_idx") for part in inner):
            yield index, module


def _own_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Weights and buffers of a module, without those of modules in it."""
    return chain(module.parameters(recurse=False), module.buffers(recurse=False))


def _computes_on(module: nn.Module) -> Iterator[torch.device]:
    """The device of each module in this one that has weights, while it runs."""
    for part in module.modules():
        weight = next(_own_tensors(part), None)
        if weight is not None:
            devices = (getattr(hook, "execution_device", None) for hook in _hooks(part))
            device = next((device for device in devices if device is not None), weight.device)
            yield torch.empty(0, device=device).device  # "cuda" and 0 are both cuda:0


def chosen_dtype(name: str, auto: torch.dtype) -> torch.dtype:
    """The dtype of `--dtype`, "auto" being `auto`."""
    dtypes = {"auto": auto, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in dtypes:
        raise InvalidRequest(f"unknown dtype {name!r}; one of {', '.join(dtypes)}", param="dtype")
    return dtypes[name]
