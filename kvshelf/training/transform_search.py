"""Makes the transforms of a model for the codec `klt`: principal components of its keys and values on some texts,
weighted by the cost of errors in them for the model's predictions.

Keys are taken without their rotation (KVTC, arXiv 2511.01815): RoPE turns every direction through all phases. Each text
is read once. Some texts give the costs (`probed_text`), and two of them the step (`step_search`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from kvshelf.artifact.codecs import Codec
from kvshelf.artifact.coded import FIRST_TOKENS
from kvshelf.artifact.coder import Coder
from kvshelf.artifact.identity import canonical_json, digest
from kvshelf.artifact.records import Kept
from kvshelf.artifact.transforms import EIGHTHS, HIGHEST, KINDS, LOWEST, Kind, RowTransform, Transforms, pack
from kvshelf.atomic import written
from kvshelf.engine.exclusions import rope_to_undo
from kvshelf.errors import InvalidRequest, PolicyUnsupported
from kvshelf.kernels import ans
from kvshelf.methods.policies.gate_file import metadata, to_safetensors
from kvshelf.training.probed_text import ProbedText
from kvshelf.training.step_search import TRIES, coarsest

if TYPE_CHECKING:
    from kvshelf.engine.engine import Engine

_LOG = logging.getLogger(__name__)

_PER_DEVIATION = 1 << 7
_BINS = 1 << 13
"""Bins in which sizes of coefficients are counted: for each deviation, and in all."""

_OUTSIDE: Final = 1 / 2048
"""Share of numbers beyond a table. An escape costs a byte or two, and each number in a table at least 2^-12."""
_MOST_REACH: Final = 1023

_COST_TEXTS: Final = 8
"""Texts whose predictions are measured. A gradient takes about as long as a prefill."""
_STEP_TEXTS: Final = 2
"""Last texts, that decide the step."""
_ROW_STRIDE: Final = 8
"""One of so many rows is kept for the tables."""

_EVEN: Final = 0.1
"""Share of the mean weight in each direction. A few texts do not tell the directions apart that matter least: on
SmolLM2, a third less than this loses a fifth more."""
_LEAST_WEIGHT: Final = 1e-4
"""Of a layer's keys or values, beside those that matter most."""
_COARSEST: Final = 0.7
"""The codec's own step in deviations, at most, even where no prediction depends on a coefficient."""


@dataclass
class _Moments:
    """Sums over the joint rows `[n, H * D]` of one tensor, fp64: count and total of the rows, their outer products, and
    crossed: the outer products of the joint keys with them. information: the cost of errors, `[H, D, D]` fp64. rows:
    some of the rows, fp16."""

    count: Tensor
    total: Tensor
    products: Tensor
    crossed: Tensor
    information: Tensor
    rows: Tensor

    @classmethod
    def of(cls, states: Tensor, keys: Tensor) -> _Moments:
        """The moments of states `[H, n, D]` fp32. keys: `[H, n, Dk]` of the same tokens."""
        rows, joint_keys = (tensor.transpose(0, 1).flatten(1) for tensor in (states, keys))
        heads, _, dim = states.shape
        return cls(
            count=torch.tensor(len(rows)),
            total=rows.double().sum(0),
            products=(rows.T @ rows).double(),
            crossed=(joint_keys.T @ rows).double(),
            information=torch.zeros(heads, dim, dim, dtype=torch.float64),
            rows=rows[::_ROW_STRIDE].half(),
        )

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
    """The moments of some texts by layer. of: the digest of all texts, the model and this search."""

    of: str
    texts: int = 0
    layers: list[dict[Kind, _Moments]] = field(default_factory=list)

    def add(self, text: list[dict[Kind, _Moments]]) -> None:
        for layer, more in zip(self.layers, text, strict=True) if self.layers else ():
            for kind in KINDS:
                layer[kind].add(more[kind])
        self.layers = self.layers or text
        self.texts += 1

    def save(self, path: Path) -> None:
        tensors = {
            f"{number}.{kind}.{name}": tensor.contiguous()
            for number, layer in enumerate(self.layers)
            for kind, moments in layer.items()
            for name, tensor in vars(moments).items()
        }
        with written(path) as file:
            file.write(to_safetensors(tensors, canonical_json({"of": self.of, "texts": self.texts})))

    def restore(self, path: Path) -> None:
        """Go on from a file of `save`, if there is one of the same search. The next `save` replaces any other file."""
        if not path.exists():
            return
        data = path.read_bytes()
        try:
            about, tensors = json.loads(metadata(data)), load(data)
            if about["of"] != self.of:
                return
            numbers = range(len({name.partition(".")[0] for name in tensors}))
            names = [field.name for field in fields(_Moments)]
            self.layers = [
                {kind: _Moments(*(tensors[f"{number}.{kind}.{name}"] for name in names)) for kind in KINDS}
                for number in numbers
            ]
            self.texts = about["texts"]
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            _LOG.warning("%s is no state of a search, so the search begins anew: %s", path, error)


def require_transformable(engine: Engine) -> None:
    """Raise `PolicyUnsupported` for a model whose RoPE cannot be undone, or with layers that do not see all tokens."""
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
    """The file of `engine`'s transforms, from some texts as token ids.

    checkpoint: the file of the moments so far, from which an interrupted search goes on; the caller removes it when the
    transforms are saved. report: called with the number of texts read and steps tried, and of all. Raises as
    `require_transformable`, and `InvalidRequest` for a text too short for a cue.
    """
    require_transformable(engine)
    documents = [list(ids)[: engine.max_tokens // 2] for ids in documents]  # leaves room for cues
    step_numbers = range(max(0, len(documents) - _STEP_TEXTS), len(documents))
    total = len(documents) + TRIES
    gathered = _Gathered(_digest(engine, documents))
    if checkpoint is not None:
        gathered.restore(checkpoint)
    cost_numbers = {len(documents) * number // _COST_TEXTS for number in range(_COST_TEXTS)}
    texts: dict[int, ProbedText] = {}
    for number in range(gathered.texts, len(documents)):
        report(number, total)
        text = _probed_text(engine, documents, number)
        gathered.add(_moments(engine, text, costs=number in cost_numbers))
        if number in step_numbers:
            texts[number] = text
        if checkpoint is not None:
            gathered.save(checkpoint)
    report(len(documents), total)
    step_texts = [
        texts[number] if number in texts else _probed_text(engine, documents, number) for number in step_numbers
    ]
    rope = rope_to_undo(engine.facts)
    coder = Coder(Transforms.from_bytes(_packed(engine, gathered, 0)), rope.rotate, rope.unrotate)
    finer = coarsest(engine, coder, step_texts, lambda done: report(len(documents) + done, total))
    tokens = sum(map(len, documents))
    about = {"model": engine.name, "documents": str(len(documents)), "tokens": str(tokens), "finer": str(finer)}
    return _packed(engine, gathered, finer, about)


def _packed(engine: Engine, gathered: _Gathered, finer: int, about: Mapping[str, str] | None = None) -> bytes:
    layers = _layers(gathered.layers, finer)
    pairs = zip(gathered.layers, layers, strict=True)
    sizes = sum(_sizes(moments, layer, kind) for moments, layer in pairs for kind in KINDS)
    return pack(engine.identity.weights, layers, _tables(sizes), about or {})


def _digest(engine: Engine, documents: Sequence[Sequence[int]]) -> str:
    constants = [_COST_TEXTS, _STEP_TEXTS, _ROW_STRIDE, FIRST_TOKENS]
    return digest("kvshelf.transforms.search/3", engine.identity.fingerprint(), canonical_json([constants, documents]))


def _probed_text(engine: Engine, documents: Sequence[Sequence[int]], number: int) -> ProbedText:
    text = ProbedText.of(engine, documents[number])
    if text is None:
        raise InvalidRequest(
            f"text {number + 1} has {len(documents[number])} tokens, too few to be asked about; give longer texts",
            param="text",
        )
    return text


def _moments(engine: Engine, text: ProbedText, *, costs: bool) -> list[dict[Kind, _Moments]]:
    """The moments of a text by layer, of keys without rotation and of values, without the first tokens."""
    rope = rope_to_undo(engine.facts)
    information = text.information(engine) if costs else None
    layers: list[dict[Kind, _Moments]] = []
    for number, record in enumerate(text.cache.layers):
        assert isinstance(record, Kept)
        keys, values = (torch.stack(heads) for heads in record.plain_heads())
        keys = rope.unrotate(keys, record.positions[0])
        states = {"keys": keys, "values": values.float()}
        coded = {kind: rows[:, FIRST_TOKENS:].cpu() for kind, rows in states.items()}
        layers.append({kind: _Moments.of(coded[kind], coded["keys"]) for kind in KINDS})
        if information is not None:
            for kind, of_kind in zip(KINDS, information[number], strict=True):
                layers[-1][kind].information += of_kind
    return layers


def _layers(moments: Sequence[Mapping[Kind, _Moments]], finer: int = 0) -> list[dict[Kind, RowTransform]]:
    """The transforms of each layer. The unit of each tensor is in inverse proportion to the root of the cost of errors
    in it by channel. The codec's own step is `_COARSEST` deviations, root mean square over all weighted channels, or
    smaller by `finer` quarters of an octave."""
    costs = torch.tensor([[_cost(layer[kind]) for kind in KINDS] for layer in moments], dtype=torch.float64)
    costs = (costs / costs.max() if costs.max() > 0 else torch.ones_like(costs)).clamp_min(_LEAST_WEIGHT)
    weights = [{kind: _weight(layer[kind]) for kind in KINDS} for layer in moments]
    spread, channels = 0.0, 0
    for layer, of_layer, layer_costs in zip(moments, weights, costs.tolist(), strict=True):
        for kind, cost in zip(KINDS, layer_costs, strict=True):
            variances = _weighted(layer[kind].covariance, of_layer[kind]).diagonal()
            spread += cost * float(variances.sum())
            channels += len(variances)
    unit = _COARSEST / Codec.step * (max(spread, 1e-12) / channels) ** 0.5 * 2 ** (-finer / 4)
    of_layers = zip(moments, weights, unit / costs.sqrt(), strict=True)
    return [_layer(*of_layer) for of_layer in of_layers]


def _layer(moments: Mapping[Kind, _Moments], weights: Mapping[Kind, Tensor], units: Tensor) -> dict[Kind, RowTransform]:
    """The transforms of keys and values. Values are foretold from keys as they are decoded, with their rounding."""
    keys, values = moments["keys"], moments["values"]
    key_unit, value_unit = units.tolist()
    heads = len(weights["keys"])
    inverse: Tensor = torch.linalg.inv(torch.block_diag(*weights["keys"]))  # type: ignore[no-untyped-call]
    decoded = keys.covariance + (Codec.step * key_unit) ** 2 / 12 * torch.matmul(inverse, inverse)
    crossed, covariance = values.covariance_with(keys), values.covariance
    joint, by_head = _slope(decoded, crossed), _slope(_blocks(decoded, heads), _blocks(crossed, heads))
    residual = covariance - torch.matmul(crossed.mT, joint)
    residual_by_head = _blocks(covariance, heads) - torch.matmul(_blocks(crossed, heads).mT, by_head)
    of_values = _row_transform(values, residual, residual_by_head, weights["values"], value_unit)
    return {
        "keys": _row_transform(keys, keys.covariance, _blocks(keys.covariance, heads), weights["keys"], key_unit),
        "values": replace(of_values, joint_slope=joint.float(), per_head_slope=by_head.float()),
    }


def _blocks(matrix: Tensor, heads: int) -> Tensor:
    """The blocks of each head with itself: `[H, D, D']` of `[H * D, H * D']`."""
    return matrix.view(heads, len(matrix) // heads, heads, -1).diagonal(dim1=0, dim2=2).permute(2, 0, 1)


def _slope(decoded: Tensor, crossed: Tensor) -> Tensor:
    """The slope as it is stored."""
    slope: Tensor = torch.linalg.solve(decoded, crossed)
    return slope.half().double()


def _cost(moments: _Moments) -> float:
    """The mean cost of errors by channel."""
    return float(moments.information.diagonal(dim1=1, dim2=2).mean())


def _weight(moments: _Moments) -> Tensor:
    """The root of `information` over its mean by channel, `[H, D, D]` fp64, as it is stored."""
    cost = _cost(moments)
    heads, dim, _ = moments.information.shape
    identity = torch.eye(dim, dtype=torch.float64).expand(heads, dim, dim)
    if cost <= 0:
        return identity.contiguous()
    factors, basis = torch.linalg.eigh((1 - _EVEN) * moments.information / cost + _EVEN * identity)
    root = torch.matmul(basis * factors.clamp_min(_EVEN).sqrt().unsqueeze(1), basis.mT)
    return ((root + root.mT) / 2).half().double()


def _weighted(covariance: Tensor, weight: Tensor) -> Tensor:
    blocks: Tensor = torch.block_diag(*weight)  # type: ignore[no-untyped-call]
    return torch.matmul(blocks, torch.matmul(covariance, blocks))


def _row_transform(moments: _Moments, joint: Tensor, by_head: Tensor, weight: Tensor, unit: float) -> RowTransform:
    """joint, by_head: covariances of the transformed rows, of all heads together and of each head alone."""
    heads, dim, _ = weight.shape
    basis, scales = _components(_weighted(joint, weight), unit)
    weighted = (torch.matmul(root, torch.matmul(block, root)) for root, block in zip(weight, by_head, strict=True))
    bases, scales_by_head = zip(*(_components(covariance, unit) for covariance in weighted), strict=True)
    mean = moments.mean.view(heads, dim).float()
    return RowTransform(mean, basis, torch.stack(bases), scales, scales_by_head, unit, weight=weight.float())


def _components(covariance: Tensor, unit: float) -> tuple[Tensor, tuple[int, ...]]:
    """The principal components, largest first, as they are stored, and their scales."""
    variances, basis = torch.linalg.eigh(covariance)
    deviations = variances.flip(0).clamp_min(1e-12).sqrt() / unit
    scales = (deviations.log2() * EIGHTHS).round().int().clamp(-300, 300)
    return basis.flip(1).half().float(), tuple(scales.tolist())


def _sizes(moments: Mapping[Kind, _Moments], layer: Mapping[Kind, RowTransform], kind: Kind) -> Any:
    """How many coefficients have each size, in parts of their deviation, but for channels of next to no size."""
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
    """Frequencies of the numbers -K to K and the escape. below: the share of coefficients under n deviations."""
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
