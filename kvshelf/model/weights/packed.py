"""Checkpoints of GPTQ and AWQ: their codes, packed into 32-bit numbers, become the plain weights that they stand for.

GPTQ: Frantar et al., arXiv 2210.17323, in AutoGPTQ's layout. AWQ: Lin et al., arXiv 2306.00978, in AutoAWQ's `gemm`.
transformers runs both by gptqmodel's layers, which keep the codes, and makes neither plain.
"""

from __future__ import annotations

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
"""Where the columns of a number are in it: column 1 in the fifth four bits, for example."""


def require_unpackable(quantized: Mapping[str, Any], name: str) -> None:
    """Raise `PolicyUnsupported` for a layout or a number of bits that is not read. quantized: the model's
    `quantization_config`."""
    method, form, bits = quantized["quant_method"], _form(quantized), quantized.get("bits")
    if form not in _FORMS[method] or bits not in _BITS[method]:
        raise PolicyUnsupported(
            f"the weights of {name!r} are {method} in the layout {form!r} with {bits} bits, and kvshelf reads "
            f"{' and '.join(_FORMS[method])} with {', '.join(map(str, _BITS[method]))}; take a checkpoint of these, of "
            "compressed-tensors, or a GGUF file",
            param="model",
        )


def plain_weights(source: str, quantized: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a checkpoint by name, with a plain `weight` `[out, in]` in the scales' dtype in place of each
    packed one. source: a folder or a hub id. Raises `OSError`, and `ValueError` for tensors that do not fit."""
    from huggingface_hub import snapshot_download
    from safetensors.torch import load_file

    folder = source if Path(source).is_dir() else snapshot_download(source, allow_patterns=["*.safetensors"])
    tensors: dict[str, Tensor] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        tensors |= load_file(file)
    for name in [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]:
        parts = [tensors.pop(f"{name}.{part}", None) for part in ("qweight", "qzeros", "scales", "g_idx")]
        try:
            tensors[f"{name}.weight"] = _plain(quantized, *parts)
        except (AttributeError, IndexError, RuntimeError) as error:
            raise ValueError(f"{name} has no packed weights of {_form(quantized)}: {error}") from error
    return tensors


def _form(quantized: Mapping[str, Any]) -> str:
    default = _FORMS[quantized["quant_method"]][0]
    named = quantized.get("checkpoint_format") or quantized.get("version") or quantized.get("format") or default
    return str(named).lower()


def _plain(quantized: Mapping[str, Any], codes: Any, zeros: Any, scales: Any, groups: Any) -> Tensor:
    """scale * (code - zero) `[out, in]`. codes: GPTQ's `[in / p, out]`, AWQ's `[in, out / p]`, of p codes in a number.
    zeros: `[groups, out / p]`; scales: `[groups, out]`; groups: GPTQ's, of each input, or None for equal ones."""
    bits = quantized["bits"]
    if quantized["quant_method"] == "awq":
        unpacked, offsets = (_unpacked(part, bits)[..., _AWQ_ORDER].flatten(1) for part in (codes, zeros))
        unpacked = unpacked.T
    else:
        unpacked, offsets = _unpacked(codes.T.contiguous(), bits).flatten(1), _unpacked(zeros, bits).flatten(1)
        if _form(quantized) == "gptq":  # its zeros are stored less one
            offsets = (offsets + 1) & (1 << bits) - 1
    if groups is None:
        groups = torch.arange(unpacked.shape[1]) // (unpacked.shape[1] // len(scales))
    of_inputs = groups.long()
    plain: Tensor = (unpacked - offsets[of_inputs].T).float() * scales[of_inputs].T.float()
    return plain.to(scales.dtype).contiguous()


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    """The codes `[rows, columns, p]` of numbers `[rows, columns]`, the lowest bits first."""
    return (packed.unsqueeze(-1) >> torch.arange(0, 32, bits)) & (1 << bits) - 1
