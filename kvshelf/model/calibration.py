"""Calibrations: measured scores of a model's heads and layers, and the files that hold them.

A calibration is a small JSON file, made by `kvshelf calibrate` for one set of weights, whose digest it holds. kvshelf
looks for it in the user's data folder, under that digest, and then in the folder `kvshelf` in that of the weights:
other engines take every file beside the weights for some.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, TypeVar

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as save_tensors
from torch import Tensor

from kvshelf.artifact.identity import ModelIdentity, canonical_json, digest
from kvshelf.artifact.shape import LayerShape
from kvshelf.artifact.transforms import Transforms
from kvshelf.atomic import partial_of, require_file, written
from kvshelf.errors import InvalidRequest, ModelMismatch, PolicyUnsupported

OWN_FOLDER = "kvshelf"
"""Name of the folder with files of kvshelf that a model's own folder may hold."""

BESIDE_THE_WEIGHTS = "compresskv.json"
TRANSFORMS_BESIDE_THE_WEIGHTS = "klt.safetensors"
CHUNKS_BESIDE_THE_WEIGHTS = "fasa.json"
SKEWS_BESIDE_THE_WEIGHTS = "infinigen.safetensors"
"""Names of the calibration, the transforms, the frequency chunks and the skews in that folder."""

_SKEWS = "kvshelf.skews/1"

_LARGEST_FILE = 16 * 2**20

Score = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Cosine = Annotated[float, Field(ge=-1.001, le=1.001)]
"""With room for rounding."""


class _InJson(BaseModel):
    """A calibration whose file is JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    param: ClassVar[str]
    """The field of a request that needs it."""

    def to_bytes(self) -> bytes:
        """The file."""
        return self.model_dump_json(indent=1).encode() + b"\n"

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Read and check it. Raises `PolicyUnsupported`, which says what is wrong with the file."""
        try:
            if path.stat().st_size > _LARGEST_FILE:
                raise PolicyUnsupported(
                    f"the calibration {path} has over {_LARGEST_FILE} bytes and is none", param=cls.param
                )
            return cls.model_validate_json(path.read_bytes())
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise PolicyUnsupported(
                f"the calibration {path} is broken{f' at {where}' if where else ''}: {first['msg']}; make it again "
                "with kvshelf calibrate",
                param=cls.param,
            ) from error
        except OSError as error:
            raise PolicyUnsupported(f"the calibration {path} cannot be read: {error}", param=cls.param) from error


class _Origin(BaseModel):
    """The circumstances of a measurement, for people: no code depends on them."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    model: str
    documents: int = Field(ge=1)
    tokens: int = Field(ge=1)


class Origin(_Origin):
    """The circumstances of a calibration."""

    answered: float = Field(ge=0, le=1, description="share of the generated tokens that were the needle's")
    compression_ratio: float = Field(gt=0, lt=1, description="under which the layers' errors were measured")


class Calibration(_InJson):
    """Scores of the query heads, `head_scores[layer][head]`, and the layers' shares of the error, which add up to 1.

    `key_similarities`: of each layer, the mean cosine between its keys and those of the same tokens where each block is
    read without the ones before it; None in files of earlier versions. `weights` is the digest of the weights it was
    made with, as in `ModelIdentity`.
    """

    param: ClassVar[str] = "policy"
    beside: ClassVar[str] = BESIDE_THE_WEIGHTS
    missing: ClassVar[str] = "a calibration of {model}, and there is none; make one: {command}"
    heads: ClassVar[str] = "query heads"
    format: Literal["kvshelf.calibration/1"] = "kvshelf.calibration/1"
    weights: str = Field(min_length=1)
    head_scores: tuple[tuple[Score, ...], ...] = Field(min_length=1)
    layer_errors: tuple[Score, ...]
    key_similarities: tuple[Cosine, ...] | None = None
    origin: Origin

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if len({len(heads) for heads in self.head_scores}) != 1 or not self.head_scores[0]:
            raise ValueError("head_scores must have the same number of heads in every layer, at least one")
        if len(self.layer_errors) != len(self.head_scores):
            raise ValueError(f"{len(self.layer_errors)} layer_errors for {len(self.head_scores)} layers of head_scores")
        if self.key_similarities is not None and len(self.key_similarities) != len(self.head_scores):
            raise ValueError(f"{len(self.key_similarities)} key_similarities for {len(self.head_scores)} layers")
        if abs(sum(self.layer_errors) - 1) > 1e-6:
            raise ValueError(f"layer_errors add up to {sum(self.layer_errors)}, not to 1")
        return self

    @property
    def sizes(self) -> tuple[int, ...]:
        return len(self.head_scores), self.query_heads

    @property
    def query_heads(self) -> int:
        """Query heads of each layer."""
        return len(self.head_scores[0])

    @property
    def digest(self) -> str:
        """Hex digest of the scores of heads and layers: part of the identity of every cache that is made by them. No
        other field may change it, or those caches would be made and stored again."""
        content = self.model_dump(mode="json", include={"weights", "head_scores", "layer_errors"})
        return digest("kvshelf.calibration", canonical_json(content))

    @property
    def keys_digest(self) -> str:
        """Hex digest of the key similarities, for caches that are made by these."""
        content = self.model_dump(mode="json", include={"weights", "key_similarities"})
        return digest("kvshelf.calibration.keys", canonical_json(content))

    def best_heads(self, layer_idx: int, count: int) -> list[int]:
        """The `count` query heads of a layer with the highest scores, ascending; equal ones by the lower index."""
        scores = self.head_scores[layer_idx]
        return sorted(sorted(range(len(scores)), key=lambda head: -scores[head])[:count])


class ChunksOrigin(_Origin):
    """The circumstances of a measurement of chunks."""

    top: int = Field(ge=1, description="keys of a query whose agreement was measured")


class Chunks(_InJson):
    """How well a single frequency chunk of a head finds its best keys (FASA): `agreement[layer][kv_head][f]`, of the
    channels f and f + D / 2, is the share of a query's best keys that are also its best by this chunk alone.

    `weights` as of a `Calibration`.
    """

    param: ClassVar[str] = "select.method"
    beside: ClassVar[str] = CHUNKS_BESIDE_THE_WEIGHTS
    missing: ClassVar[str] = (
        "the frequency chunks of {model}, and nobody has measured them; do so: {command} --only chunks"
    )
    heads: ClassVar[str] = "KV heads"
    format: Literal["kvshelf.chunks/1"] = "kvshelf.chunks/1"
    weights: str = Field(min_length=1)
    agreement: tuple[tuple[tuple[Share, ...], ...], ...] = Field(min_length=1)
    origin: ChunksOrigin

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if len({(len(layer), len(head)) for layer in self.agreement for head in layer}) != 1:
            raise ValueError("agreement must have the same heads in every layer, and the same chunks in every head")
        return self

    @property
    def sizes(self) -> tuple[int, ...]:
        return len(self.agreement), len(self.agreement[0]), 2 * len(self.agreement[0][0])

    @property
    def digest(self) -> str:
        """Hex digest of the fields that selectors read."""
        content = self.model_dump(mode="json", include={"weights", "agreement"})
        return digest("kvshelf.chunks", canonical_json(content))

    def best(self, layer: int, count: int) -> list[list[int]]:
        """The `count` chunks of each KV head that agree most, ascending; equal ones by the lower number."""
        heads = self.agreement[layer]
        return [sorted(sorted(range(len(head)), key=lambda f: -head[f])[:count]) for head in heads]


@dataclass(frozen=True, eq=False)
class Skews:
    """A basis of the queries of each layer and query head, `[q_heads, D, D]` fp16, a direction a column, the most
    important first. `weights` as of a `Calibration`."""

    param: ClassVar[str] = "select.method"
    beside: ClassVar[str] = SKEWS_BESIDE_THE_WEIGHTS
    missing: ClassVar[str] = "the skews of {model}, and nobody has found them; do so: {command} --only skews"
    heads: ClassVar[str] = "query heads"
    weights: str
    layers: tuple[Tensor, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return len(self.layers), *self.layers[0].shape[:2]

    @cached_property
    def digest(self) -> str:
        """Hex digest of the file."""
        return blake3(self.to_bytes()).hexdigest()

    def to_bytes(self) -> bytes:
        """The file."""
        return save_tensors({f"{number:04}": basis for number, basis in enumerate(self.layers)}, {_SKEWS: self.weights})

    @classmethod
    def from_file(cls, path: Path) -> Skews:
        """Raises `PolicyUnsupported` for a file that `to_bytes` does not write."""
        try:
            with safe_open(path, "pt") as file:
                skews = cls(file.metadata()[_SKEWS], tuple(map(file.get_tensor, sorted(file.keys()))))
            heads, size, _ = skews.layers[0].shape
            if any(basis.shape != (heads, size, size) or not basis.isfinite().all() for basis in skews.layers):
                raise ValueError("layers differ, are not square, or hold numbers that are not finite")
        except (SafetensorError, LookupError, TypeError, ValueError, OSError) as error:
            raise PolicyUnsupported(
                f"the skews {path} are broken: {str(error)[:200]}; make them again with kvshelf calibrate --only skews",
                param=cls.param,
            ) from error
        return skews


Measured = TypeVar("Measured", Calibration, Chunks, Skews)
"""A kind of calibration. param: the field of a request that needs it. beside: the name of its file beside weights.
missing: the text of the error where there is none. heads: "query heads" or "KV heads". sizes: its layers, the heads of
each, and where it has numbers for channels, their channels."""


def data_folder() -> Path:
    """The folder of a user's calibrations (XDG base directories)."""
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data) / "kvshelf" / "calibrations"


def note_served(name: str, model: str) -> None:
    """Remember the model that a service of this user serves under a name. Messages have the name in place of a private
    path, and the command in them finds the model by it. model: a path, or a name that is no path. Where nothing can be
    written, nothing is remembered."""
    path, source = _served(name), Path(model).expanduser()
    with suppress(OSError):
        if not source.exists():
            path.unlink(missing_ok=True)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with written(path) as file:
            file.write(os.fsencode(source.absolute()))


def served(name: str) -> str | None:
    """The path of the model that was last served under a name, if it was one and is still there."""
    with suppress(OSError, ValueError):
        source = Path(os.fsdecode(_served(name).read_bytes()))
        return str(source) if source.exists() else None
    return None


def _served(name: str) -> Path:
    return data_folder().with_name("served") / digest("kvshelf.served", name)


def find(model: ModelIdentity, folder: str, kind: type[Measured], heads: tuple[int, ...], needed_by: str) -> Measured:
    """The calibration of a kind of a model whose weights were loaded from `folder`: a path, a hub id, or "" for a model
    made in memory. heads: of the model, as `sizes` behind the layers. needed_by: as an error names it, "selector fasa"
    say.

    Raises `PolicyUnsupported` if there is none, if it belongs to other weights or has other sizes, or if its file is
    broken.
    """
    path = place(_user_file(model.weights, kind.beside), folder, kind.beside)
    if path is None:
        missing = kind.missing.format(model=repr(model.name), command=_command(model))
        raise PolicyUnsupported(f"{needed_by} needs {missing}", param=kind.param)
    try:
        status = path.stat()
    except OSError as error:  # it was just removed
        raise PolicyUnsupported(f"the calibration {path} cannot be read: {error}", param=kind.param) from error
    # Not by the time that it was modified and its size: a copy may keep the one, and skews of a model have one size.
    measured: Measured = _read(kind.from_file, path, status.st_ino, status.st_ctime_ns)
    _require_fitting(model, measured, path, heads)
    return measured


@lru_cache(maxsize=8)
def _read(from_file: Callable[[Path], Any], path: Path, number: int, changed_ns: int) -> Any:  # noqa: ARG001
    """The content of a file, read once; a file that has changed has another inode or time of change."""
    return from_file(path)


class Paths(NamedTuple):
    """The files of a model's calibration, transforms, frequency chunks and skews."""

    heads: Path
    transforms: Path
    chunks: Path
    skews: Path


def paths(weights: str, folder: Path | None = None) -> Paths:
    """The files in `OWN_FOLDER` of a model's folder, or those in the user's data folder, which has those of many."""
    names = BESIDE_THE_WEIGHTS, TRANSFORMS_BESIDE_THE_WEIGHTS, CHUNKS_BESIDE_THE_WEIGHTS, SKEWS_BESIDE_THE_WEIGHTS
    return Paths(*(_user_file(weights, name) if folder is None else folder / OWN_FOLDER / name for name in names))


def _user_file(weights: str, beside: str) -> Path:
    """The file in the user's data folder that is named `beside` where it lies beside the weights."""
    return data_folder() / f"{weights}.{'json' if beside == BESIDE_THE_WEIGHTS else beside}"


def find_transforms(model: ModelIdentity, folder: str, layers: Sequence[LayerShape]) -> Transforms:
    """The transforms of a model for the codec klt, from the places of `find`. layers: of its caches.

    Raises `PolicyUnsupported` if there are none, if they belong to other weights, or if their file is broken.
    """
    path = place(_user_file(model.weights, TRANSFORMS_BESIDE_THE_WEIGHTS), folder, TRANSFORMS_BESIDE_THE_WEIGHTS)
    if path is None:
        raise PolicyUnsupported(
            f"codec klt needs the transforms of {model.name!r}, and there are none; make them: {_command(model)}",
            param="codec",
        )
    try:
        transforms = Transforms.from_bytes(path.read_bytes())
        transforms.require_of(model, layers)
    except (InvalidRequest, ModelMismatch, OSError) as error:
        raise PolicyUnsupported(f"{path}: {error}", param="codec") from error
    return transforms


def place(user_file: Path, folder: str, beside: str) -> Path | None:
    """The first of these that is a file: the user's, the one in `OWN_FOLDER` in the folder of the weights, or the one
    beside the weights. folder: "" where the weights have none."""
    places = [user_file, *([Path(folder) / OWN_FOLDER / beside, Path(folder) / beside] if folder else [])]
    return next((path for path in places if path.is_file()), None)


def require_writable(path: Path) -> None:
    """Raise `InvalidRequest` if a calibration cannot be saved there. Checked before the long search, not after it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_dir():
            require_file(path)
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be written: {error}", param="output") from error
    if path.is_dir() or not os.access(partial_of(path).parent, os.W_OK):
        raise InvalidRequest(f"{path} is a folder, or in one that cannot be written to; name a file", param="output")


def save(measured: Calibration | Chunks | Skews, path: Path) -> None:
    """Write a calibration of any kind, atomically."""
    with written(path) as file:
        file.write(measured.to_bytes())


def _require_fitting(
    model: ModelIdentity, measured: Calibration | Chunks | Skews, path: Path, heads: tuple[int, ...]
) -> None:
    """Refuse a file of other weights, or with other layers, heads or channels than the model."""
    if measured.weights != model.weights:
        raise PolicyUnsupported(
            f"the calibration {path} is of other weights ({measured.weights[:16]}) than those of {model.name!r} as "
            f"{model.dtype} ({model.weights[:16]}); make one for these: {_command(model)}",
            param=measured.param,
        )
    expected = json.loads(model.attention)["num_hidden_layers"], *heads
    if measured.sizes != expected:
        raise PolicyUnsupported(
            f"the calibration {path} has {_sizes(measured.heads, *measured.sizes)}, and {model.name!r} has "
            f"{_sizes(measured.heads, *expected)}; make it again: {_command(model)}",
            param=measured.param,
        )


def _sizes(of: str, layers: int, heads: int, *channels: int) -> str:
    return " of ".join([f"{layers} layers", f"{heads} {of}", *(f"{number} channels" for number in channels)])


def _command(model: ModelIdentity) -> str:
    return f"kvshelf calibrate --model {model.name} --dtype {model.dtype}"
