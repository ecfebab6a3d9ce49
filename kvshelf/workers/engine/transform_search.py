"""Makes the transforms of a model for the codec `klt`: principal components of its keys and values on some texts.

Keys are taken without their rotation (KVTC, arXiv 2511.01815): RoPE turns every direction through all phases.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor

from kvshelf.kernels import ans
from kvshelf.store.artifact.coded import FIRST_TOKENS
from kvshelf.store.artifact.records import Kept
from kvshelf.store.artifact.transforms import EIGHTHS, HIGHEST, KINDS, LOWEST, Kind, RowTransform, Transforms, pack
from kvshelf.workers.engine.step_search import MEASURED, multiplied

if TYPE_CHECKING:
    from kvshelf.workers.engine.engine import Engine

UNITS: Final[dict[Kind, float]] = {"keys": 1.434, "values": 1.338}
"""Units in the deviation of a model's keys and values, root mean square over all channels. On kvshelf-tiny, where steps
were found, a unit is then the number 1."""

_BINS, _PER_DEVIATION = 1 << 13, 1 << 7
"""Sizes of coefficients are counted in so many bins, and in so many of them for each deviation."""

_OUTSIDE: Final = 1 / 2048
"""Share of numbers beyond a table. An escape costs a byte or two, and each number in a table at least 2^-12."""
_MOST_REACH: Final = 1023


@dataclass
class _Moments:
    """Of the joint rows `[n, H * D]` of one tensor: their number, sum and outer products, fp64."""

    count: int = 0
    total: Any = 0.0
    products: Any = 0.0

    def add(self, rows: Tensor) -> None:
        wide = rows.double()
        self.count += len(rows)
        self.total = self.total + wide.sum(0)
        self.products = self.products + wide.T @ wide

    @property
    def mean(self) -> Tensor:
        mean: Tensor = self.total / self.count
        return mean

    @property
    def covariance(self) -> Tensor:
        covariance: Tensor = self.products / self.count - torch.outer(self.mean, self.mean)
        return covariance


def find_transforms(
    engine: Engine, documents: Sequence[Sequence[int]], *, report: Callable[[int, int], None] = lambda *_: None
) -> bytes:
    """The file of `engine`'s transforms, from the full caches of some documents, given as token ids.

    report: called with the documents read, the same one in each pass again, and with their number. Raises
    `PolicyUnsupported` for a model whose RoPE cannot be undone.
    """
    engine.rope_to_undo()
    total = 2 * len(documents) + len(documents[:MEASURED])
    moments = [{kind: _Moments() for kind in KINDS} for _ in engine.layer_shapes]
    for number, ids in enumerate(documents):
        for found, rows in zip(moments, _rows(engine, ids), strict=True):
            for kind in KINDS:
                found[kind].add(_joint(rows[kind]))
        report(number + 1, total)
    layers = _layers(engine, moments)
    sizes = np.zeros(_BINS)
    for number, ids in enumerate(documents):
        for layer, rows in zip(layers, _rows(engine, ids), strict=True):
            for kind in KINDS:
                sizes += _sizes(_joint(rows[kind]), layer[kind])
        report(len(documents) + number + 1, total)
    tokens = sum(map(len, documents))
    about = {"model": engine.name, "documents": str(len(documents)), "tokens": str(tokens)}
    write = partial(pack, engine.identity.weights, tables=_tables(sizes), origin=about)
    even = Transforms.from_bytes(write(layers))
    return write(multiplied(engine, even, documents, report=lambda done: report(2 * len(documents) + done, total)))


def _rows(engine: Engine, ids: Sequence[int]) -> list[dict[Kind, Tensor]]:
    """Keys without rotation and values of each layer, `[H, n, D]` fp32, without the first tokens."""
    rope = engine.rope_to_undo()
    found: list[dict[Kind, Tensor]] = []
    for record in engine.compress(list(ids), policy="full").layers:
        assert isinstance(record, Kept)
        keys, values = (torch.stack(heads) for heads in record.plain_heads())
        keys = rope.unrotate(keys, record.positions[0])
        found.append({"keys": keys[:, FIRST_TOKENS:].cpu(), "values": values[:, FIRST_TOKENS:].float().cpu()})
    return found


def _joint(rows: Tensor) -> Tensor:
    """`[n, H * D]` of `[H, n, D]`."""
    return rows.transpose(0, 1).flatten(1)


def _layers(engine: Engine, moments: Sequence[dict[Kind, _Moments]]) -> list[dict[Kind, RowTransform]]:
    units = {
        kind: float(torch.cat([layer[kind].covariance.diagonal() for layer in moments]).mean().sqrt()) / UNITS[kind]
        for kind in KINDS
    }
    return [
        {kind: _row_transform(found[kind], shape.kv_heads, units[kind]) for kind in KINDS}
        for found, shape in zip(moments, engine.layer_shapes, strict=True)
    ]


def _row_transform(found: _Moments, heads: int, unit: float) -> RowTransform:
    covariance = found.covariance
    dim = len(covariance) // heads
    joint, joint_scales = _components(covariance, unit)
    blocks = covariance.view(heads, dim, heads, dim)
    own = [_components(blocks[head, :, head], unit) for head in range(heads)]
    each = torch.stack([basis for basis, _ in own])
    return RowTransform(
        found.mean.view(heads, dim).float(), joint, each, joint_scales, tuple(scales for _, scales in own), unit
    )


def _components(covariance: Tensor, unit: float) -> tuple[Tensor, tuple[int, ...]]:
    """The principal components, largest first, as they are stored, and their scales."""
    variances, basis = torch.linalg.eigh(covariance)
    deviations = variances.flip(0).clamp_min(1e-12).sqrt() / unit
    scales = (deviations.log2() * EIGHTHS).round().int().clamp(-300, 300)
    return basis.flip(1).half().float(), tuple(scales.tolist())


def _sizes(rows: Tensor, transform: RowTransform) -> Any:
    """How many coefficients have each size, in parts of their deviation. Channels of next to no size tell nothing."""
    scales = torch.tensor(transform.joint_scales)
    used = scales > -6 * EIGHTHS
    deviations = transform.unit * 2.0 ** (scales[used] / EIGHTHS)
    coefficients = (rows - transform.mean.flatten()) @ transform.joint[:, used]
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
