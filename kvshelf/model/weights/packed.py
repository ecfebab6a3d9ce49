"""Checkpoints of GPTQ and AWQ: their codes, packed into 32-bit numbers, become the plain weights that they stand for.

GPTQ: Frantar et al., arXiv 2210.17323, in AutoGPTQ's layout. AWQ: Lin et al., arXiv 2306.00978, in AutoAWQ's `gemm`.
transformers runs both by gptqmodel's layers, which keep the codes, and makes neither plain.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from kvshelf.errors import PolicyUnsupported

PACKED: Final = ("gptq", "awq")
_FORMS: Final = {"gptq": ("gptq", "gptq_v2"), "awq": ("gemm",)}
_BITS: Final = {"gptq": (2, 4, 8), "awq": (4,)}
_AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place of each column in a number: column 1 in the fifth four bits, for example."""

_AT_ONCE: Final = 512
"""Outputs of a weight that are unpacked at once, a multiple of the codes of a number: unpacked, they take 32 bits."""

_WHOLE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"


def require_unpackable(quantized: Mapping[str, Any], name: str, *, alone: bool) -> None:
    """Raise `PolicyUnsupported` for a layout or a number of bits that is not read, and unless one process loads the
    model onto one device (`alone`). quantized: the model's `quantization_config`."""
    method, form, bits = quantized["quant_method"], _form(quantized), quantized.get("bits")
    if form not in _FORMS[method] or bits not in _BITS[method]:
        raise PolicyUnsupported(
            f"the weights of {name!r} are {method} in the layout {form!r} with {bits} bits, and kvshelf reads "
            f"{' and '.join(_FORMS[method])} with {', '.join(map(str, _BITS[method]))}; take a checkpoint of these, of "
            "compressed-tensors, or a GGUF file",
            param="model",
        )
    if not alone:
        raise PolicyUnsupported(
            f"the weights of {name!r} are {method}, which are unpacked in one process and on one device; take one, or "
            "a checkpoint of compressed-tensors",
            param="device",
        )


def plain_weights(source: str, quantized: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a checkpoint by name, with a plain `weight` `[out, in]` in the scales' dtype in place of each
    packed one. source: a folder or a hub id. Raises `OSError`, and `ValueError` for tensors that do not fit."""
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = {}
    for file in _files(source):
        tensors |= load_file(file)
    for name in [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]:
        parts = {part: tensors.pop(f"{name}.{part}", None) for part in ("qweight", "qzeros", "scales", "g_idx")}
        try:
            tensors[f"{name}.weight"] = _plain(quantized, parts)
        except ValueError as error:
            raise ValueError(f"{name} has no packed weights of {_form(quantized)}: {error}") from error
    return tensors


def _files(source: str) -> list[Path]:
    """The files that transformers reads: those of the index, or else `model.safetensors`. Others may lie beside
    them."""
    from huggingface_hub import snapshot_download

    folder = Path(source)
    if on_hub := not folder.is_dir():
        folder = Path(snapshot_download(source, allow_patterns=[_INDEX]))
    names = [_WHOLE]
    if (folder / _INDEX).is_file():
        names = sorted({*json.loads((folder / _INDEX).read_text())["weight_map"].values()})
    if on_hub:
        folder = Path(snapshot_download(source, allow_patterns=names))
    return [folder / name for name in names]


def _form(quantized: Mapping[str, Any]) -> str:
    default = _FORMS[quantized["quant_method"]][0]
    named = quantized.get("checkpoint_format") or quantized.get("version") or quantized.get("format") or default
    return str(named).lower()


def _plain(quantized: Mapping[str, Any], parts: Mapping[str, Tensor | None]) -> Tensor:
    """scale * (code - zero) `[out, in]`. qweight: GPTQ's `[in / p, out]`, AWQ's `[in, out / p]`, of p codes in a
    number. qzeros: `[groups, out / p]`; scales: `[groups, out]`; g_idx: GPTQ's, of each input, or None for equal ones.
    Raises `ValueError` for other shapes."""
    codes, zeros, scales, groups = (parts[part] for part in ("qweight", "qzeros", "scales", "g_idx"))
    if codes is None or zeros is None or scales is None:
        raise ValueError(f"no {', '.join(part for part in ('qweight', 'qzeros', 'scales') if parts[part] is None)}")
    bits, by_outputs = quantized["bits"], quantized["quant_method"] == "awq"
    if codes.ndim != 2 or scales.ndim != 2 or not codes.numel() or not scales.numel():
        raise ValueError(f"qweight is {[*codes.shape]} and scales are {[*scales.shape]}")
    per_word = 32 // bits
    inputs, outputs = (len(codes), codes.shape[1] * per_word) if by_outputs else (len(codes) * per_word, codes.shape[1])
    if groups is None:
        groups = torch.arange(inputs) // max(inputs // len(scales), 1)
    fits = scales.shape == (len(scales), outputs) and zeros.shape == (len(scales), outputs // per_word)
    if not fits or outputs % per_word or groups.shape != (inputs,) or groups.min() < 0 or groups.max() >= len(scales):
        raise ValueError(
            f"qweight is of {inputs} inputs and {outputs} outputs; qzeros are {[*zeros.shape]}, scales "
            f"{[*scales.shape]}, and g_idx is {[*groups.shape]}, up to {int(groups.max())}"
        )
    if not scales.is_floating_point() or {codes.dtype, zeros.dtype} != {torch.int32}:
        raise ValueError(f"qweight is {codes.dtype}, qzeros are {zeros.dtype} and scales {scales.dtype}")
    of_inputs = groups.long()
    plain = torch.empty(outputs, inputs, dtype=scales.dtype)
    for first in range(0, outputs, _AT_ONCE):
        whole, numbers = slice(first, first + _AT_ONCE), slice(first // per_word, (first + _AT_ONCE) // per_word)
        offsets = _unpacked(zeros[:, numbers], bits)
        if by_outputs:
            unpacked = _unpacked(codes[:, numbers], bits)[..., _AWQ_ORDER].flatten(1).T
            offsets = offsets[..., _AWQ_ORDER]
        else:
            unpacked = _unpacked(codes[:, whole].T, bits).flatten(1)
            if _form(quantized) == "gptq":  # its zeros are stored less one
                offsets = (offsets + 1) & (1 << bits) - 1
        offsets = offsets.flatten(1)
        plain[whole] = (unpacked - offsets[of_inputs].T) * scales[:, whole][of_inputs].T.float()
    return plain


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    """The codes `[rows, columns, p]` of numbers `[rows, columns]`, the lowest bits first; int32."""
    return (packed.unsqueeze(-1) >> torch.arange(0, 32, bits, dtype=torch.int32)) & (1 << bits) - 1
