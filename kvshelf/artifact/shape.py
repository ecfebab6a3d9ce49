"""The shape of a cache, checked against its model first: a forged blob of a kilobyte may claim any size."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from kvshelf.errors import BlobError

if TYPE_CHECKING:
    from kvshelf.artifact.identity import ModelIdentity

StateRole = Literal["conv", "recurrent"]

ITEM_BYTES: Final[Mapping[str, int]] = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number, by the dtypes that a blob can hold."""

CODE_BYTES: Final = 8
MAX_CODES: Final = 4096
"""Codes of a layer in a summary: 32 KiB."""


class StateShape(NamedTuple):
    """A state of a layer. number: among its states of this role. dims: without a dimension for rows."""

    role: StateRole
    number: int
    dtype: str
    dims: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.dims) * ITEM_BYTES[self.dtype]


class LayerShape(NamedTuple):
    """The keys `[kv_heads, N, key_dim]` and values `[kv_heads, N, value_dim]` of one layer; zeros and no dtype where it
    has none. window: how many tokens its queries see, themselves included. chunk: tokens of a chunk, where queries see
    their own chunk alone. latent: whether latents replace keys, and the rotated part of keys values."""

    kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    dtype: str = ""
    window: int | None = None
    chunk: int | None = None
    latent: bool = False
    states: tuple[StateShape, ...] = ()


class Shape(NamedTuple):
    """The shape of a cache. `num_tokens` and `next_position` are those of `CompressedCache`."""

    layers: tuple[LayerShape, ...]
    num_tokens: int
    next_position: int

    def require_bounds(self, model: ModelIdentity) -> None:
        """Raise `BlobError` beyond what the configuration in a model's identity allows.

        These are bounds, and `require_layers` is exact: a configuration does not say how many KV heads its model has.
        """
        attention, rope = _object(model.attention), _object(model.rope)
        heads = _size(attention, "num_attention_heads", most=max(layer.kv_heads for layer in self.layers))
        tokens = _size(rope, "max_positions", most=self.num_tokens)
        if len(self.layers) != (layers := _size(attention, "num_hidden_layers", most=len(self.layers))):
            raise _refusal(f"{len(self.layers)} layers", layers)
        for layer in self.layers:
            if layer.kv_heads > heads:
                raise _refusal(f"{layer.kv_heads} KV heads", f"at most {heads}")
        if self.num_tokens > tokens:
            raise _refusal(f"{self.num_tokens} tokens", f"at most {tokens}")
        if self.next_position > self.num_tokens:
            raise _refusal(f"a question at position {self.next_position}", f"{self.num_tokens} for its document")

    def require_layers(self, expected: Sequence[LayerShape]) -> None:
        """Raise `BlobError` unless the layers are those of a model's own caches."""
        if len(self.layers) != len(expected):
            raise _refusal(f"{len(self.layers)} layers", len(expected))
        for index, (layer, model_layer) in enumerate(zip(self.layers, expected, strict=True)):
            for name, value, right in zip(LayerShape._fields, layer, model_layer, strict=True):
                if value != right:
                    raise _refusal(f"in layer {index} the {name} {value}", right)


def layers_made_by(maker: ModelIdentity, reader: ModelIdentity, layers: Sequence[LayerShape]) -> Sequence[LayerShape]:
    """The layers of a maker's caches. layers: of the reader's own; the dtype of a linked maker may differ."""
    if maker.fingerprint() == reader.fingerprint():
        return layers
    return [layer._replace(dtype=layer.dtype and maker.dtype) for layer in layers]


def _refusal(value: str, expected: object) -> BlobError:
    return BlobError(f"the cache has {value}; its model makes {expected}", reason="wrong_shape")


def _object(text: str) -> dict[str, Any]:
    """A JSON object; empty for any other text, which a hostile header may have."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _size(fields: dict[str, Any], name: str, *, most: int) -> int:
    """A size in a configuration; `most` where it has none."""
    value = fields.get(name)
    return value if type(value) is int else most


def tokens_seen(num_tokens: int, window: int | None, chunk: int | None) -> int:
    """How many of a document's tokens the first one behind it sees: a window less itself, or an unfinished chunk."""
    if chunk is not None:
        return num_tokens % chunk
    return num_tokens if window is None else min(num_tokens, window - 1)
