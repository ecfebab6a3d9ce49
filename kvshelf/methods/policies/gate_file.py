"""Gate files: the trained numbers of one policy for one model, as safetensors with a header.

A file is made by `kvshelf train-gates` for one set of weights, whose digest it holds. kvshelf looks for it in the
folder `KVSHELF_GATES`, or else in the user's data folder, and then in `kvshelf/gates` beside the weights. No request
names a path.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import torch
from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from kvshelf.artifact.identity import ModelIdentity
from kvshelf.errors import PolicyUnsupported
from kvshelf.kernels.staging import carried
from kvshelf.model.calibration import data_folder, place

Family = Literal["importance", "decay", "global", "probe", "flag"]
Target = Literal["kvzip", "answers", "distill"]
Shapes = Mapping[str, tuple[int, ...]]

BESIDE_THE_WEIGHTS: Final = "gates"
"""Name of the folder of gate files within a model's own folder."""

LARGEST_WIDTH: Final = 8192
_ABOUT: Final = "kvshelf"
_LARGEST_FILE: Final = 2 << 30
_LARGEST_HEADER: Final = 1 << 20
_DTYPES: Final = (torch.bfloat16, torch.float32)


class Training(BaseModel):
    """How gates were trained, for people: no code reads it. data: digest of the token ids of all documents."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    model: str = Field(max_length=1024)
    steps: int = Field(ge=1)
    length: int = Field(ge=1)
    data: str = Field(max_length=128)
    seed: int
    loss: float
    held_out: float


class GateHeader(BaseModel):
    """The header of a gate file. weights: digest of the model's, as in `ModelIdentity`. revision: of the policy's
    formula, its `gate_revision`. inputs: what a gate reads of a token."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal["kvshelf.gates/1"] = "kvshelf.gates/1"
    weights: str = Field(min_length=1, max_length=128)
    policy: str = Field(min_length=1, max_length=64)
    family: Family
    revision: int = Field(ge=1)
    inputs: Literal["qkv"] = "qkv"
    width: int = Field(ge=1, le=LARGEST_WIDTH)
    activation: Literal["silu"] = "silu"
    training: Training


class Geometry(NamedTuple):
    """The sizes of a model from which the shapes of its gates follow. layers: those that policies reduce. head:
    channels of a head. hidden, intermediate: channels of the model's rows, and of those within its MLPs."""

    layers: int
    q_heads: int
    kv_heads: int
    head: int
    hidden: int
    intermediate: int

    @property
    def inputs(self) -> int:
        """Numbers that a gate reads of a token: its query, key and value in all heads."""
        return (self.q_heads + 2 * self.kv_heads) * self.head


@dataclass(frozen=True, eq=False)
class Gates:
    """A gate file: tensors by name, as stored. digest: BLAKE3 of the file, hex."""

    header: GateHeader
    tensors: Mapping[str, Tensor]
    digest: str

    def layer(self, index: int, device: torch.device) -> dict[str, Tensor]:
        """The tensors of one of the layers that policies reduce, and those that all layers share: fp32."""
        tensors = own_tensors(self.tensors, index)
        on_device = carried(list(tensors.values()), device, {})
        return {name: tensor.to(torch.float32) for name, tensor in zip(tensors, on_device, strict=True)}

    def to_bytes(self) -> bytes:
        return to_safetensors(self.tensors, self.header.model_dump_json())

    @classmethod
    def of(cls, header: GateHeader, tensors: Mapping[str, Tensor]) -> Gates:
        """Gates of a training. tensors: in the dtypes of the file."""
        gates = cls(header, {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, "")
        return replace(gates, digest=blake3(gates.to_bytes()).hexdigest())

    @classmethod
    def from_bytes(cls, data: bytes) -> Gates:
        """Read a file. Raises ValueError for another file, and for numbers that are not finite."""
        try:
            header = GateHeader.model_validate_json(metadata(data))
            tensors = load(data)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            raise ValueError(f"its header is wrong at {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
        except (SafetensorError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"it is no safetensors file: {str(error)[:200]}") from error
        for name, tensor in tensors.items():
            if tensor.dtype not in _DTYPES:
                raise ValueError(f"{name[:64]!r} has dtype {tensor.dtype}, not bfloat16 or float32")
            if not bool(tensor.isfinite().all()):
                raise ValueError(f"{name[:64]!r} holds numbers that are not finite")
        return cls(header, tensors, blake3(data).hexdigest())

    def require_shapes(self, expected: Shapes) -> None:
        """Raise ValueError unless the file has exactly these tensors."""
        has = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        for name in sorted(has.keys() ^ expected.keys()):
            raise ValueError(f"it {'has' if name in has else 'lacks'} a tensor {name[:64]!r}")
        for name, shape in expected.items():
            if has[name] != shape:
                raise ValueError(f"{name!r} has the shape {has[name]}, and the model needs {shape}")


class OpenGates:
    """The gates of open answers. They share each layer, which is on its device until the last one ends."""

    def __init__(self, gates: Gates) -> None:
        self.digest = gates.digest
        self._gates = gates
        self._on_device: dict[tuple[int, torch.device], dict[str, Tensor]] = {}

    def layer(self, index: int, device: torch.device) -> dict[str, Tensor]:
        """As `Gates.layer`."""
        if (index, device) not in self._on_device:
            self._on_device[index, device] = self._gates.layer(index, device)
        return self._on_device[index, device]


def own_tensors(tensors: Mapping[str, Tensor], index: int) -> dict[str, Tensor]:
    """The tensors of one of the layers that policies reduce, and those that all layers share, by their own names."""
    prefix = f"{index}."
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix) or not n[0].isdigit()}


def gate_path(weights: str, policy: str) -> Path:
    """The path of the user's gates for one policy and the model with these weights."""
    setting = os.environ.get("KVSHELF_GATES")
    folder = Path(setting) if setting else data_folder().with_name("gates")
    return folder / f"{weights}.{policy}.safetensors"


class Form(NamedTuple):
    """The gates that a policy can read. revision: of its formula. shapes: of a file's tensors, by its width."""

    family: Family
    revision: int
    shapes: Callable[[int], Shapes]


def find(model: ModelIdentity, folder: str, policy: str, form: Form | None = None) -> Gates:
    """The gates of a model for one policy. folder: as of `calibration.find`. form: None takes any.

    Raises `PolicyUnsupported` without gates, for those of other weights, policies or formulas, and for a broken file.
    """
    path = place(gate_path(model.weights, policy), folder, f"{BESIDE_THE_WEIGHTS}/{policy}.safetensors")
    command = f"kvshelf train-gates --model {model.name} --dtype {model.dtype} --family {policy}"
    if path is None:
        raise PolicyUnsupported(
            f"policy {policy!r} needs gates trained for {model.name!r}, and there are none; train them with: {command}",
            param="policy",
        )
    try:
        status = path.stat()
        if status.st_size > _LARGEST_FILE:
            raise ValueError(f"it has over {_LARGEST_FILE} bytes")
        gates = _read(path, status.st_mtime_ns, status.st_size)
        header = gates.header
        if header.weights != model.weights:
            raise ValueError(
                f"it is of other weights ({header.weights[:16]}) than those of {model.name!r} as {model.dtype} "
                f"({model.weights[:16]})"
            )
        family = header.family if form is None else form.family
        if (header.policy, header.family) != (policy, family):
            raise ValueError(f"it is for policy {header.policy!r} of family {header.family!r}, not {family!r}")
        if form is not None:
            if header.revision != form.revision:
                raise ValueError(
                    f"it is of revision {header.revision}, and this kvshelf reads revision {form.revision}"
                )
            gates.require_shapes(form.shapes(header.width))
    except (ValueError, OSError) as error:
        raise PolicyUnsupported(
            f"the gate file {path} cannot be used: {error}; train another with: {command}", param="policy"
        ) from error
    return gates


@lru_cache(maxsize=8)
def _read(path: Path, modified_ns: int, size: int) -> Gates:  # noqa: ARG001 - a changed file is another one
    return Gates.from_bytes(path.read_bytes())


def to_safetensors(tensors: Mapping[str, Tensor], about: str) -> bytes:
    """A safetensors file of these tensors and a text about them."""
    return save(dict(tensors), {_ABOUT: about})


def metadata(data: bytes) -> str:
    """The text about the tensors in a safetensors file. Raises ValueError, KeyError or TypeError without one."""
    if len(data) < struct.calcsize("<Q"):
        raise ValueError(f"it has only {len(data)} bytes")
    (length,) = struct.unpack_from("<Q", data)
    if length > min(_LARGEST_HEADER, len(data) - 8):
        raise ValueError("it is cut off, or no safetensors file")
    header: Any = json.loads(data[8 : 8 + length])
    about = header["__metadata__"][_ABOUT]
    if not isinstance(about, str):
        raise TypeError("its metadata is no text")
    return about
