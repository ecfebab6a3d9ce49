"""The transforms of a model: what the codec `klt` multiplies keys and values by, and how often each code occurs."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import groupby
from typing import Any, Final, Literal

import numpy as np
import torch
from blake3 import blake3
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from kvshelf.artifact.identity import Identity, ModelIdentity, canonical_json
from kvshelf.artifact.shape import LayerShape
from kvshelf.errors import InvalidRequest, ModelMismatch
from kvshelf.kernels.ans import Tables

Kind = Literal["keys", "values"]
KINDS: Final[tuple[Kind, ...]] = ("keys", "values")

EIGHTHS: Final = 8
"""Tables are made for ratios of a channel's deviation to the step that are an eighth of an octave apart."""

LOWEST, HIGHEST = -48, 96
"""Eighths of an octave: the ratios with a table. Others take the nearest one."""

STEP_PARTS: Final = 10_000
"""A step is stored as an integer in these parts of a unit."""

_CAP: Final = 3.0
"""The largest ratio of two multipliers, which only version 1 has."""
_LARGEST_WEIGHT: Final = 1000.0
"""Ratio of the largest and the smallest factor of a weight. Beyond it, 16 bits are too few to invert the weight."""

_TENSORS: Final = ("mean", "joint", "per_head", "weight", "joint_slope", "per_head_slope")
HELD_BYTES: Final = 16 << 20
"""Largest bytes of a transform that a card holds: that of 1,024 channels takes 10 MB, of 4,096 channels 140 MB, which
is 6 GB for 32 layers' keys and values."""

_FORMATS: Final = ("kvshelf.transforms/1", "kvshelf.transforms/2", "kvshelf.transforms/3")
"""Version 2 also has weights, version 3 slopes, too."""
_ABOUT: Final = "kvshelf"
_STEP_EDGES: Final = [round(STEP_PARTS * 2 ** ((eighth + 0.5) / EIGHTHS)) for eighth in range(-49, 49)]


@dataclass(frozen=True, eq=False)
class RowTransform:
    """What the keys or the values of one layer are multiplied by, for H heads of D channels.

    mean: `[H, D]`. joint: `[H * D, H * D]` and per_head: `[H, D, D]`, orthogonal, a coefficient a column, all fp32.
    joint_scales: `[H * D]` and per_head_scales: `[H, D]`: the deviation of each coefficient, as eighths of an octave
    above one unit. unit: the length that a step counts. multiplier: of the step under `steps=kl`; 1 where units differ
    by layer already. weight: `[H, D, D]` fp32, symmetric: rows are multiplied by it before they are transformed, so
    that equal errors of coefficients cost the predictions alike; None for the identity. joint_slope:
    `[H * Dk, H * D]` and per_head_slope: `[H, Dk, D]`, fp32: how a value's expected distance from its mean follows
    from that of its token's key without rotation. Only the remaining distance is transformed. None for keys, and
    before version 3.
    """

    mean: Tensor
    joint: Tensor
    per_head: Tensor
    joint_scales: tuple[int, ...]
    per_head_scales: tuple[tuple[int, ...], ...]
    unit: float
    multiplier: float = 1.0
    weight: Tensor | None = None
    joint_slope: Tensor | None = None
    per_head_slope: Tensor | None = None
    _elsewhere: dict[torch.device, RowTransform] = field(default_factory=dict, init=False, repr=False)

    def decoder_on(self, device: torch.device) -> RowTransform:
        """The transform for decoding on a device. It has the same `synthesis`, with the weight undone in its bases, so
        that `analysis` is no longer its inverse. A small one stays on the device; a large one is sent each time."""
        if device in self._elsewhere:
            return self._elsewhere[device]
        tensors: dict[str, Any] = {
            name: tensor.to(device) for name in _TENSORS if (tensor := getattr(self, name)) is not None
        }
        copy = replace(self, **tensors)
        per_head = torch.stack([copy.synthesis(head).T for head in range(len(self.mean))])
        decoder = replace(copy, joint=copy.synthesis(None).T, per_head=per_head, weight=None)
        if sum(tensor.nbytes for tensor in tensors.values()) <= HELD_BYTES:
            self._elsewhere[device] = decoder
        return decoder

    def analysis(self, head: int | None) -> Tensor:
        """The matrix that rows without their mean are multiplied by: `[D, D]` fp32 for one head, or (None)
        `[H * D, H * D]` for all heads together. A coefficient a column."""
        basis = self.joint if head is None else self.per_head[head]
        if self.weight is None:
            return basis
        weight = self.weight if head is None else self.weight[head : head + 1]
        return torch.matmul(weight, basis.view(len(weight), -1, basis.shape[1])).flatten(0, 1)

    def synthesis(self, head: int | None) -> Tensor:
        """The inverse of `analysis`. A coefficient a row."""
        basis = self.joint if head is None else self.per_head[head]
        if self.weight is None:
            return basis.T
        weight = self.weight if head is None else self.weight[head : head + 1]
        inverse = torch.linalg.inv(weight.double()).float()
        return torch.matmul(inverse, basis.view(len(weight), -1, basis.shape[1])).flatten(0, 1).T

    def order(self, step_parts: int, head: int | None) -> list[int]:
        """The table of each channel at a step, for one head's transform or (None) that of all heads together."""
        scales = self.joint_scales if head is None else self.per_head_scales[head]
        offset = bisect_left(_STEP_EDGES, step_parts) - 49
        return [min(max(scale - offset, LOWEST), HIGHEST) - LOWEST for scale in scales]


@dataclass(frozen=True, eq=False)
class Transforms:
    """All transforms of a model. data: the file; digest: BLAKE3 of it, hex. weights: digest of the model's weights."""

    data: bytes
    weights: str
    layers: tuple[Mapping[Kind, RowTransform], ...]
    tables: Tables

    @cached_property
    def digest(self) -> str:
        return blake3(self.data).hexdigest()

    def bits(self, step: float, *, alone: bool) -> float:
        """Bits that a number takes at a step, as the tables foretell them. alone: each head by its own transform."""
        costs, parts = self.tables.entropies, round(step * STEP_PARTS)
        orders = [
            transform.order(parts, head)
            for layer in self.layers
            for transform in layer.values()
            for head in (range(len(transform.mean)) if alone else [None])
        ]
        return sum(costs[table] for order in orders for table in order) / sum(map(len, orders))

    def mark(self, identity: Identity) -> Identity:
        """The identity of a cache that these transforms encoded."""
        return replace(identity, transforms=self.digest)

    def require_of(self, model: ModelIdentity, layers: Sequence[LayerShape]) -> None:
        """Raise `ModelMismatch` unless these are the transforms of this model, whose caches have such layers."""
        if self.weights != model.weights:
            raise ModelMismatch(
                f"the transforms {self.digest[:16]} are of other weights ({self.weights[:16]}) than {model.name!r} as "
                f"{model.dtype} ({model.weights[:16]}); make some for these with kvshelf calibrate",
                transforms=self.digest,
            )
        sizes = [(*layer["keys"].mean.shape, layer["values"].mean.shape[1]) for layer in self.layers]
        needed = [layer[:3] for layer in layers]
        if sizes != needed:
            raise ModelMismatch(
                f"the transforms {self.digest[:16]} have {_described(sizes)}, and {model.name!r} has "
                f"{_described(needed)}; make some for it with kvshelf calibrate",
                transforms=self.digest,
            )

    @classmethod
    def from_bytes(cls, data: bytes) -> Transforms:
        """Read a file of transforms. Raises `InvalidRequest` for anything that `pack` does not write."""
        try:
            tensors = load_tensors(data)
            about = _about(data)
            if about.get("format") not in _FORMATS:
                raise ValueError(f"its format is {about.get('format')!r}, and this kvshelf reads {', '.join(_FORMATS)}")
            read = partial(_row_transform, tensors, version=_FORMATS.index(about["format"]) + 1)
            layers = tuple({kind: read(f"{number}.{kind}") for kind in KINDS} for number in range(about["layers"]))
            return cls(data, str(about["weights"]), layers, _tables(tensors))
        except (SafetensorError, KeyError, ValueError, TypeError, AssertionError) as error:
            raise InvalidRequest(
                f"the file is no transforms of a model ({str(error)[:200]}); make them again with kvshelf calibrate"
            ) from error


def pack(
    weights: str, layers: Sequence[Mapping[Kind, RowTransform]], tables: Sequence[Any], origin: Mapping[str, str]
) -> bytes:
    """The file of these transforms: version 2 with weights, 3 with slopes, too. origin: of the file, for people."""
    tensors: dict[str, Tensor] = {}
    weighted = all(transform.weight is not None for layer in layers for transform in layer.values())
    foretelling = weighted and all(layer["values"].joint_slope is not None for layer in layers)
    for index, layer in enumerate(layers):
        for kind, transform in layer.items():
            tensors |= {
                f"{index}.{kind}.mean": transform.mean.float(),
                f"{index}.{kind}.joint": transform.joint.half(),
                f"{index}.{kind}.each": transform.per_head.half(),
                f"{index}.{kind}.joint_scales": torch.tensor(transform.joint_scales, dtype=torch.int16),
                f"{index}.{kind}.each_scales": torch.tensor(transform.per_head_scales, dtype=torch.int16),
                f"{index}.{kind}.unit": torch.tensor([transform.unit], dtype=torch.float32),
                f"{index}.{kind}.multiplier": torch.tensor([transform.multiplier], dtype=torch.float32),
            }
            if transform.weight is not None and weighted:
                tensors[f"{index}.{kind}.weight"] = transform.weight.half()
            if foretelling and transform.joint_slope is not None and transform.per_head_slope is not None:
                tensors[f"{index}.{kind}.joint_slope"] = transform.joint_slope.half()
                tensors[f"{index}.{kind}.each_slope"] = transform.per_head_slope.half()
    tensors["tables.lengths"] = torch.tensor([len(table) for table in tables], dtype=torch.int32)
    tensors["tables"] = torch.from_numpy(np.concatenate(tables).astype(np.int16))
    about = {"format": _FORMATS[weighted + foretelling], "weights": weights, "layers": len(layers), **origin}
    # In one string: safetensors writes several in another order each time, and equal transforms need one digest.
    return save_tensors(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, {_ABOUT: canonical_json(about)}
    )


def _about(data: bytes) -> dict[str, Any]:
    """The map of strings in the header, which `safetensors` leaves out when it reads bytes."""
    size = int.from_bytes(data[:8], "little")
    about: dict[str, Any] = json.loads(json.loads(data[8 : 8 + size])["__metadata__"][_ABOUT])
    return about


def _row_transform(tensors: Mapping[str, Tensor], name: str, *, version: int) -> RowTransform:
    mean, joint, per_head = (tensors[f"{name}.{part}"].float() for part in ("mean", "joint", "each"))
    heads, dim = mean.shape
    joint_scales, per_head_scales = (tensors[f"{name}.{part}_scales"] for part in ("joint", "each"))
    unit, multiplier = (float(tensors[f"{name}.{part}"]) for part in ("unit", "multiplier"))
    expected = ((heads * dim,) * 2, (heads, dim, dim), (heads * dim,), (heads, dim))
    if (joint.shape, per_head.shape, joint_scales.shape, per_head_scales.shape) != expected:
        raise ValueError(f"{name} has shapes that do not fit together")
    if not (0 < unit < float("inf") and bool(mean.isfinite().all())):
        raise ValueError(f"{name} has numbers that are not finite, or no unit")
    if not 0.99 / _CAP < multiplier < _CAP * 1.01:  # of rounding
        raise ValueError(f"{name} multiplies steps by {multiplier:g}")
    for basis in (joint, *per_head):
        if not bool(((basis.T @ basis - torch.eye(len(basis))).abs() < 0.02).all()):
            raise ValueError(f"{name} is not orthogonal")
    weight = _weight(tensors[f"{name}.weight"].float(), per_head.shape, name) if version > 1 else None
    foretold = version > 2 and name.endswith(KINDS[1])
    joint_slope, per_head_slope = _slopes(tensors, name, heads, dim) if foretold else (None, None)
    return RowTransform(
        mean,
        joint,
        per_head,
        tuple(joint_scales.tolist()),
        tuple(map(tuple, per_head_scales.tolist())),
        unit,
        multiplier,
        weight,
        joint_slope,
        per_head_slope,
    )


def _slopes(tensors: Mapping[str, Tensor], name: str, heads: int, dim: int) -> tuple[Tensor, Tensor]:
    joint, per_head = (tensors[f"{name}.{part}_slope"].float() for part in ("joint", "each"))
    key_dim = tensors[f"{name.removesuffix(KINDS[1])}{KINDS[0]}.mean"].shape[1]
    if (joint.shape, per_head.shape) != ((heads * key_dim, heads * dim), (heads, key_dim, dim)):
        raise ValueError(f"{name} has slopes of other shapes than its keys")
    if not bool(joint.isfinite().all() and per_head.isfinite().all()):
        raise ValueError(f"{name} has slopes that are not finite")
    return joint, per_head


def _weight(weight: Tensor, shape: torch.Size, name: str) -> Tensor:
    if weight.shape != shape or not bool(weight.isfinite().all()) or not torch.equal(weight, weight.mT):
        raise ValueError(f"{name} has a weight that is not symmetric, or of another shape")
    factors = torch.linalg.eigvalsh(weight.double())  # ascending
    if not bool((factors[:, 0] * _LARGEST_WEIGHT >= factors[:, -1]).all() and (factors[:, 0] > 0).all()):
        raise ValueError(f"{name} has a weight that cannot be undone")
    return weight


def _tables(tensors: Mapping[str, Tensor]) -> Tables:
    lengths = tensors["tables.lengths"].tolist()
    if len(lengths) != HIGHEST - LOWEST + 1 or min(lengths) < 4 or sum(lengths) != len(tensors["tables"]):
        raise ValueError("the tables have other lengths")
    return Tables([table.numpy().astype(np.int32) for table in torch.split(tensors["tables"], lengths)])


def _described(sizes: Iterable[tuple[int, ...]]) -> str:
    """The sizes of layers as text, equal neighbours together. sizes: KV heads, channels of keys and of values."""
    return ", ".join(
        f"{len(list(equal))} layers of {heads} KV heads with keys of {of_keys} and values of {of_values} channels"
        for (heads, of_keys, of_values), equal in groupby(sizes)
    )
