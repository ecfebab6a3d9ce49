"""Makes the transforms of a model for the codec `klt`: principal components of its keys and values on some texts,
weighted by what errors in them cost the model's predictions.

Keys are taken without their rotation (KVTC, arXiv 2511.01815): RoPE turns every direction through all phases. Each text
is read once. A part of them is asked about (`asked`), and two of them tell the step (`step_search`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from kvshelf.artifact.codecs import Codec
from kvshelf.artifact.coded import FIRST_TOKENS
from kvshelf.artifact.coder import Coder
from kvshelf.artifact.identity import canonical_json, digest
from kvshelf.artifact.records import Kept
from kvshelf.artifact.transforms import EIGHTHS, HIGHEST, KINDS, LOWEST, Kind, RowTransform, Transforms, pack
from kvshelf.atomic import written
from kvshelf.errors import InvalidRequest, PolicyUnsupported
from kvshelf.kernels import ans
from kvshelf.training.asked import Asked
from kvshelf.training.step_search import TRIES, coarsest

if TYPE_CHECKING:
    from kvshelf.engine.engine import Engine
from kvshelf.engine.exclusions import rope_to_undo

_LOG = logging.getLogger(__name__)

_PER_DEVIATION = 1 << 7
_BINS = 1 << 13
"""Sizes of coefficients are counted in so many bins, and in so many of them for each deviation."""

_OUTSIDE: Final = 1 / 2048
"""Share of numbers beyond a table. An escape costs a byte or two, and each number in a table at least 2^-12."""
_MOST_REACH: Final = 1023

_ASKED_ABOUT: Final = 8
"""Texts whose predictions are measured. A gradient costs about what their prefill does."""
_TOLD_BY: Final = 2
"""Texts, the last ones, that tell the step."""
_ROWS_KEPT: Final = 8
"""Of so many rows one is kept, for the tables."""

_EVEN: Final = 0.1
"""Share of the mean weight in each direction. A few texts do not tell the directions apart that matter least: on
SmolLM2, a third less than this loses a fifth more."""
_LEAST_WEIGHT: Final = 1e-4
"""Of a layer's keys or values, beside those that matter most."""
_COARSEST: Final = 0.7
"""The codec's own step is at most so many deviations. What nobody's predictions depend on would have none."""


@dataclass
class _Moments:
    """Of the joint rows `[n, H * D]` of one tensor: their number, sum and outer products, what errors in them cost
    (`information` `[H, D, D]`), all fp64, and some of the rows themselves, fp16. crossed: products of the keys, in a
    row each, with these."""

    count: Tensor
    total: Tensor
    products: Tensor
    crossed: Tensor
    information: Tensor
    rows: Tensor

    @classmethod
    def of(cls, states: Tensor, keys: Tensor) -> _Moments:
        """Of states `[H, n, D]` fp32, and the keys `[H, n, Dk]` of the same tokens."""
        rows, by = (each.transpose(0, 1).flatten(1) for each in (states, keys))
        heads, _, dim = states.shape
        none = torch.zeros(heads, dim, dim, dtype=torch.float64)
        products, crossed = (rows.T @ rows).double(), (by.T @ rows).double()
        return cls(torch.tensor(len(rows)), rows.double().sum(0), products, crossed, none, rows[::_ROWS_KEPT].half())

    def add(self, other: _Moments) -> None:
        for name in ("count", "total", "products", "crossed", "information"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.rows = torch.cat([self.rows, other.rows])

    @property
    def mean(self) -> Tensor:
        return self.total / self.count

    @property
    def covariance(self) -> Tensor:
        return self.products / self.count - torch.outer(self.mean, self.mean)

    def covariance_with(self, keys: _Moments) -> Tensor:
        return self.crossed / self.count - torch.outer(keys.mean, self.mean)


@dataclass
class _Gathered:
    """What some texts have shown, by layer. of: the digest of all texts, the model and this search."""

    of: str
    texts: int = 0
    layers: list[dict[Kind, _Moments]] = field(default_factory=list)

    def add(self, found: list[dict[Kind, _Moments]]) -> None:
        """One text more."""
        for mine, more in zip(self.layers, found, strict=True) if self.layers else ():
            for kind in KINDS:
                mine[kind].add(more[kind])
        self.layers = self.layers or found
        self.texts += 1

    def save(self, path: Path) -> None:
        tensors = {
            f"{number}.{kind}.{name}": tensor.contiguous()
            for number, layer in enumerate(self.layers)
            for kind, found in layer.items()
            for name, tensor in vars(found).items()
        }
        with written(path) as file:
            file.write(save_tensors(tensors, {"of": self.of, "texts": str(self.texts)}))

    def restore(self, path: Path) -> None:
        """Go on from a file of `save`, if there is one of the same search. Another one is left to be replaced."""
        if not path.exists():
            return
        data = path.read_bytes()
        try:
            about, tensors = _metadata(data), load_tensors(data)
            if about["of"] != self.of:
                return
            numbers = range(len({name.partition(".")[0] for name in tensors}))
            own = [{kind: _prefixed(tensors, f"{number}.{kind}.") for kind in KINDS} for number in numbers]
            self.layers = [{kind: _Moments(**found) for kind, found in layer.items()} for layer in own]
            self.texts = int(about["texts"])
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            _LOG.warning("%s is no state of a search, so the search begins anew: %s", path, error)


def _metadata(data: bytes) -> dict[str, str]:
    found: dict[str, str] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    return found


def _prefixed(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def require_transformable(engine: Engine) -> None:
    """Raise `PolicyUnsupported` for a model that has no transforms: whose RoPE cannot be undone, or whose layers do not
    all see the whole document."""
    rope_to_undo(engine.facts)
    if not all(kind.sees_all and kind.attends for kind in engine.kinds):
        raise PolicyUnsupported(
            f"codec klt transforms keys and values of layers that see the whole document, and {engine.name!r} has "
            "others; use int4",
            param="codec",
        )


def find_transforms(
    engine: Engine,
    documents: Sequence[Sequence[int]],
    *,
    checkpoint: Path | None = None,
    report: Callable[[int, int], None] = lambda *_: None,
) -> bytes:
    """The file of `engine`'s transforms, from some texts, given as token ids.

    checkpoint: where what was gathered is saved after each text; a search that was interrupted goes on from there. The
    file stays; who has saved the transforms removes it. report: called with how many texts are read and steps tried,
    and with their number. Raises as `require_transformable`, and `InvalidRequest` for a text too short to be asked
    about.
    """
    require_transformable(engine)
    documents = [list(ids)[: engine.max_tokens // 2] for ids in documents]  # leaves room for what is asked
    told_by = range(max(0, len(documents) - _TOLD_BY), len(documents))
    total = len(documents) + TRIES
    gathered = _Gathered(_digest(engine, documents))
    if checkpoint is not None:
        gathered.restore(checkpoint)
    texts: dict[int, Asked] = {}
    for number in range(gathered.texts, len(documents)):
        report(number, total)
        text = _asked(engine, documents, number)
        gathered.add(_moments(engine, text, asked=number in _spread(len(documents))))
        if number in told_by:
            texts[number] = text
        if checkpoint is not None:
            gathered.save(checkpoint)
    report(len(documents), total)
    held = [texts[number] if number in texts else _asked(engine, documents, number) for number in told_by]
    tried = Transforms.from_bytes(_packed(engine, gathered, 0))
    rope = rope_to_undo(engine.facts)
    finer = coarsest(
        engine, Coder(tried, rope.rotate, rope.unrotate), held, lambda done: report(len(documents) + done, total)
    )
    tokens = sum(map(len, documents))
    about = {"model": engine.name, "documents": str(len(documents)), "tokens": str(tokens), "finer": str(finer)}
    return _packed(engine, gathered, finer, about)


def _packed(engine: Engine, gathered: _Gathered, finer: int, about: Mapping[str, str] | None = None) -> bytes:
    layers = _layers(gathered.layers, finer)
    sizes = sum(_sizes(own, layer, kind) for own, layer in zip(gathered.layers, layers, strict=True) for kind in KINDS)
    return pack(engine.identity.weights, layers, _tables(sizes), about or {})


def _digest(engine: Engine, documents: Sequence[Sequence[int]]) -> str:
    constants = [_ASKED_ABOUT, _TOLD_BY, _ROWS_KEPT, FIRST_TOKENS]
    return digest("kvshelf.transforms.search/3", engine.identity.fingerprint(), canonical_json([constants, documents]))


def _asked(engine: Engine, documents: Sequence[Sequence[int]], number: int) -> Asked:
    text = Asked.about(engine, documents[number])
    if text is None:
        raise InvalidRequest(
            f"text {number + 1} has {len(documents[number])} tokens, too few to be asked about; give longer texts",
            param="text",
        )
    return text


def _spread(documents: int) -> set[int]:
    """Numbers of the texts whose predictions are measured, spread over all."""
    return {documents * number // _ASKED_ABOUT for number in range(_ASKED_ABOUT)}


def _moments(engine: Engine, text: Asked, *, asked: bool) -> list[dict[Kind, _Moments]]:
    """Of one text: keys without rotation and values, without those of the first tokens."""
    rope = rope_to_undo(engine.facts)
    information = text.information(engine) if asked else None
    found: list[dict[Kind, _Moments]] = []
    for number, record in enumerate(text.cache.layers):
        assert isinstance(record, Kept)
        keys, values = (torch.stack(heads) for heads in record.plain_heads())
        keys = rope.unrotate(keys, record.positions[0])
        states = {"keys": keys, "values": values.float()}
        coded = {kind: rows[:, FIRST_TOKENS:].cpu() for kind, rows in states.items()}
        found.append({kind: _Moments.of(coded[kind], coded["keys"]) for kind in KINDS})
        for column, kind in enumerate(KINDS):
            if information is not None:
                found[-1][kind].information += information[number][column]
    return found


def _layers(moments: Sequence[Mapping[Kind, _Moments]], finer: int = 0) -> list[dict[Kind, RowTransform]]:
    """The transforms of each layer. The unit of each tensor is in inverse proportion to the root of what errors in it
    cost by channel. The codec's own step is `_COARSEST` deviations, root mean square over all weighted channels, or
    smaller by `finer` quarters of an octave."""
    costs = torch.tensor([[_cost(layer[kind]) for kind in KINDS] for layer in moments], dtype=torch.float64)
    costs = (costs / costs.max() if costs.max() > 0 else torch.ones_like(costs)).clamp_min(_LEAST_WEIGHT)
    weights = [{kind: _weight(layer[kind]) for kind in KINDS} for layer in moments]
    spread, channels = 0.0, 0
    for layer, own, cost in zip(moments, weights, costs.tolist(), strict=True):
        for kind, each in zip(KINDS, cost, strict=True):
            variances = _weighted(layer[kind].covariance, own[kind]).diagonal()
            spread, channels = spread + each * float(variances.sum()), channels + len(variances)
    unit = _COARSEST / Codec.step * (max(spread, 1e-12) / channels) ** 0.5 * 2 ** (-finer / 4)
    return [_layer(layer, own, unit / cost.sqrt()) for layer, own, cost in zip(moments, weights, costs, strict=True)]


def _layer(moments: Mapping[Kind, _Moments], weights: Mapping[Kind, Tensor], units: Tensor) -> dict[Kind, RowTransform]:
    """Values are foretold from keys as they are decoded, with what rounding does to them."""
    keys, values = moments["keys"], moments["values"]
    key_unit, value_unit = units.tolist()
    heads = len(weights["keys"])
    undone: Tensor = torch.linalg.inv(torch.block_diag(*weights["keys"]))  # type: ignore[no-untyped-call]
    decoded = keys.covariance + (Codec.step * key_unit) ** 2 / 12 * torch.matmul(undone, undone)
    crossed, own = values.covariance_with(keys), values.covariance
    joint, each = _slope(decoded, crossed), _slope(_blocks(decoded, heads), _blocks(crossed, heads))
    left = own - torch.matmul(crossed.mT, joint)
    left_each = _blocks(own, heads) - torch.matmul(_blocks(crossed, heads).mT, each)
    of_values = _row_transform(values, left, left_each, weights["values"], value_unit)
    return {
        "keys": _row_transform(keys, keys.covariance, _blocks(keys.covariance, heads), weights["keys"], key_unit),
        "values": replace(of_values, joint_slope=joint.float(), per_head_slope=each.float()),
    }


def _blocks(matrix: Tensor, heads: int) -> Tensor:
    """Those of each head with itself: `[H, D, D']` of `[H * D, H * D']`."""
    return matrix.view(heads, len(matrix) // heads, heads, -1).diagonal(dim1=0, dim2=2).permute(2, 0, 1)


def _slope(decoded: Tensor, crossed: Tensor) -> Tensor:
    """As it is stored."""
    slope: Tensor = torch.linalg.solve(decoded, crossed)
    return slope.half().double()


def _cost(found: _Moments) -> float:
    """What errors cost, by channel."""
    return float(found.information.diagonal(dim1=1, dim2=2).mean())


def _weight(found: _Moments) -> Tensor:
    """The root of `information` over its mean by channel, `[H, D, D]` fp64, as it is stored."""
    cost = _cost(found)
    heads, dim, _ = found.information.shape
    identity = torch.eye(dim, dtype=torch.float64).expand(heads, dim, dim)
    if cost <= 0:
        return identity.contiguous()
    factors, basis = torch.linalg.eigh((1 - _EVEN) * found.information / cost + _EVEN * identity)
    root = torch.matmul(basis * factors.clamp_min(_EVEN).sqrt().unsqueeze(1), basis.mT)
    return ((root + root.mT) / 2).half().double()


def _weighted(covariance: Tensor, weight: Tensor) -> Tensor:
    blocks: Tensor = torch.block_diag(*weight)  # type: ignore[no-untyped-call]
    return torch.matmul(blocks, torch.matmul(covariance, blocks))


def _row_transform(found: _Moments, joint: Tensor, each: Tensor, weight: Tensor, unit: float) -> RowTransform:
    """joint and each: covariances of what is transformed, of all heads together and of each alone."""
    heads, dim, _ = weight.shape
    basis, scales = _components(_weighted(joint, weight), unit)
    own = [
        _components(torch.matmul(one, torch.matmul(covariance, one)), unit)
        for one, covariance in zip(weight, each, strict=True)
    ]
    bases = torch.stack([basis for basis, _ in own])
    own_scales = tuple(scales for _, scales in own)
    return RowTransform(
        found.mean.view(heads, dim).float(), basis, bases, scales, own_scales, unit, weight=weight.float()
    )


def _components(covariance: Tensor, unit: float) -> tuple[Tensor, tuple[int, ...]]:
    """The principal components, largest first, as they are stored, and their scales."""
    variances, basis = torch.linalg.eigh(covariance)
    deviations = variances.flip(0).clamp_min(1e-12).sqrt() / unit
    scales = (deviations.log2() * EIGHTHS).round().int().clamp(-300, 300)
    return basis.flip(1).half().float(), tuple(scales.tolist())


def _sizes(moments: Mapping[Kind, _Moments], layer: Mapping[Kind, RowTransform], kind: Kind) -> Any:
    """How many coefficients have each size, in parts of their deviation. Channels of next to no size tell nothing."""
    transform = layer[kind]
    rows = moments[kind].rows.float() - transform.mean.flatten()
    if transform.joint_slope is not None:
        rows -= (moments["keys"].rows.float() - layer["keys"].mean.flatten()) @ transform.joint_slope
    scales = torch.tensor(transform.joint_scales)
    used = scales > -6 * EIGHTHS
    deviations = transform.unit * 2.0 ** (scales[used] / EIGHTHS)
    coefficients = rows @ transform.analysis(None)[:, used]
    bins = (coefficients.abs() / deviations * _PER_DEVIATION).clamp_max(_BINS - 1).long()
    return torch.bincount(bins.flatten(), minlength=_BINS).double().numpy()


def _tables(sizes: Any) -> list[Any]:
    """A table for each ratio of a channel's deviation to the step. One form of distribution serves all channels: tables
    of their own would save 0.8 % (measured on kvshelf-tiny)."""
    edges = np.arange(_BINS + 1) / _PER_DEVIATION
    below = np.concatenate([[0], np.cumsum(sizes)]) / sizes.sum()
    return [_table(lambda size: np.interp(size, edges, below), ratio) for ratio in range(LOWEST, HIGHEST + 1)]


def _table(below: Callable[[Any], Any], ratio: int) -> Any:
    """Frequencies of the numbers -K to K and of the escape. below: the share of coefficients that are smaller than so
    many deviations."""
    deviation = 2.0 ** (ratio / EIGHTHS)
    within = below((np.arange(_MOST_REACH + 1) + 0.5) / deviation)
    reach = max(1, min(int(np.searchsorted(within, 1 - _OUTSIDE)), _MOST_REACH))
    shares = np.diff(np.concatenate([[0], within[: reach + 1]])) / 2
    shares = np.concatenate([shares[:0:-1], [2 * shares[0]], shares[1:], [1 - within[reach]]])
    frequencies = np.maximum(1, np.round(shares * (1 << ans.BITS))).astype(np.int64)
    while (excess := frequencies.sum() - (1 << ans.BITS)) > 0:  # taken where it costs least: from the largest
        largest = frequencies == frequencies.max()
        frequencies[largest] -= max(1, min(excess // largest.sum(), frequencies.max() // 8))
        frequencies = np.maximum(frequencies, 1)
    frequencies[reach] -= excess
    return frequencies
