"""The bytes of a cache and the operations of a prefill, from the dimensions of a model. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from kvshelf.artifact.codecs import BITS, RUN_ROWS, Codec, Precision
from kvshelf.artifact.shape import CODE_BYTES, MAX_CODES
from kvshelf.errors import PolicyUnsupported
from kvshelf.model.layers import LayerKind, layer_kinds, reducible

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ASSUMED_FLOPS: Final[Mapping[str, float]] = {"cpu": 5e10, "cuda": 1e14}
"""Floating-point operations per second of a device that has compressed nothing yet. Low on purpose."""

_FIRST_ROWS, _RUN_BYTES, _BYTES_PER_FLAG = 4, 16, 1 / 8  # of codec klt, which docs/internals/format.md describes

_SAVED_BITS: Final = 5.2
"""Of a number under codec lossless. Measured on SmolLM2: 5.2 in bfloat16, 5.6 in fp32."""

_DIGEST_BYTES, _CHANNEL_BYTES, _COLUMN_BYTES = 32, 2, 4
_ASSUMED_SHARE = 0.5  # of entries in more bits, where a policy will say it
_LAYER_BYTES, _PIECE_BYTES = 250, 175  # of header, padding and trailer, which docs/internals/format.md describes


@dataclass(frozen=True)
class Dimensions:
    """The dimensions behind a cache's size. `itemsize`: bytes of a number. `flops`: of one token's prefill. recent: the
    layers that see the last tokens alone; `layers` counts the others that attend. value_dim: channels of a value; None:
    as many as a key's, `head_dim`. Latents are keys of one head, and their rotated parts the values. states: bytes of
    recurrent and convolution states, whatever the length. summarised: whether caches have a summary. coded: what the
    model's transforms say of codec klt, as `Transforms.bits`; None: as those of kvshelf-tiny. width: numbers of a
    residual; 0: nobody said it."""

    layers: int
    kv_heads: int
    head_dim: int
    itemsize: int
    device: str
    flops: float
    recent: tuple[LayerKind, ...] = ()
    value_dim: int | None = None
    states: int = 0
    summarised: bool = False
    coded: Callable[..., float] | None = field(default=None, compare=False)
    width: int = 0

    @property
    def dims(self) -> tuple[int, int]:
        """Channels of a key and of a value."""
        return self.head_dim, self.head_dim if self.value_dim is None else self.value_dim

    @classmethod
    def of(cls, model: PreTrainedModel) -> Dimensions:
        from kvshelf.model.devices import input_device
        from kvshelf.model.loading import head_sizes, kv_heads, state_bytes  # needs torch, as a model does

        config = model.config
        # Two operations for each weight, as is usual. Attention is left out: it counts in long documents only.
        flops = 2.0 * model.num_parameters(exclude_embeddings=True)
        kinds = layer_kinds(config)
        key_dim, value_dim = head_sizes(config)
        return cls(
            len(reducible(kinds)),
            kv_heads(config),
            key_dim,
            model.dtype.itemsize,
            input_device(model).type,
            flops,
            tuple(kind for kind in kinds if not kind.sees_all),
            value_dim if value_dim != key_dim else None,
            state_bytes(model),
            all(kind.reducible and not kind.states and not kind.latents for kind in kinds),
            width=int(config.hidden_size),
        )

    def full_bytes(self, num_tokens: int) -> int:
        """Keys and values of all tokens, uncompressed, and all states; of a layer that does not see all, those that
        questions see."""
        tokens = self.layers * num_tokens + sum(kind.seen(num_tokens) for kind in self.recent)
        return tokens * self.kv_heads * sum(self.dims) * self.itemsize + self.states

    def held_bytes(self, num_tokens: int, kept: int, columns: int = 0) -> int:
        """Keys and values in memory where each head keeps so many, as they are when a prefill ends: each entry has a
        position and its importance, of four bytes each, and so many columns."""
        entry = sum(self.dims) * self.itemsize + 8 + _COLUMN_BYTES * columns
        tokens = self.layers * kept + sum(kind.seen(num_tokens) for kind in self.recent)
        return tokens * self.kv_heads * entry + self.states

    def full_16bit_bytes(self, num_tokens: int) -> int:
        """As `full_bytes`, in 16-bit numbers."""
        return replace(self, itemsize=2).full_bytes(num_tokens)

    def stored_bytes(self, num_tokens: int, kept: int, codec: str) -> int:
        """Approximate bytes of the blob of a cache with `kept` entries in each head (docs/internals/format.md)."""
        chosen, verbatim = Codec.parse(codec), self._recent(num_tokens) + self.states + self._summary(num_tokens)
        if chosen.name == "klt":
            return self._streams(num_tokens, kept, chosen) + verbatim
        return self._layers([self._piece(num_tokens, chosen, *piece) for piece in _pieces(chosen, kept)]) + verbatim

    def policy_bytes(self, num_tokens: int, kept: int, codec: str, beside: Mapping[str, float]) -> int:
        """As `stored_bytes`, of a policy whose records have this `beside` whole entries (see `Policy.stored`): an
        index, with digests of its blocks, keys of fewer channels, residuals in place of keys and values, or
        columns."""
        if "residuals" in beside:
            return self._residuals(num_tokens, codec)
        if "pruned" in beside:
            return self._pruned(num_tokens, kept, codec, beside["pruned"], beside["whole"])
        stored = self.stored_bytes(num_tokens, kept, codec)
        stored += self.layers * self.kv_heads * kept * _COLUMN_BYTES * int(beside.get("columns", 0))
        if "vectors" not in beside:
            return stored
        key_dim, _ = self.dims
        blocks = self.layers * math.ceil(num_tokens / beside["block"])
        return stored + blocks * (2 * self.kv_heads * int(beside["vectors"]) * key_dim + _DIGEST_BYTES)

    def _pruned(self, num_tokens: int, kept: int, codec: str, share: float, last: float) -> int:
        """As if the base kept the document's last tokens. Raises `InvalidRequest` for a codec that takes whole keys."""
        chosen, whole = Codec.parse(codec), min(kept, int(last))
        chosen.require_pruned()
        (key_dim, value_dim), verbatim = self.dims, self._recent(num_tokens) + self.states + self._summary(num_tokens)
        narrow = replace(self, head_dim=key_dim - int(key_dim * share), value_dim=value_dim)
        alone = replace(chosen, residual=0) if whole else chosen
        pieces = [narrow._piece(num_tokens, chosen, *piece) for piece in _pieces(alone, kept - whole)]
        pieces += [self._piece(num_tokens, chosen, *piece) for piece in _pieces(chosen, whole)]
        return self._layers(pieces) + verbatim + self.layers * self.kv_heads * narrow.head_dim * _CHANNEL_BYTES

    def _residuals(self, num_tokens: int, codec: str) -> int:
        """Of a token one row for all heads, and a position for each. Raises `InvalidRequest` as `_pruned`, and
        `PolicyUnsupported` where residuals are no smaller than keys and values, or nobody said their width."""
        entry = self.kv_heads * sum(self.dims)
        if not 0 < self.width < entry:
            raise PolicyUnsupported(
                f"residuals of {self.width or 'an unknown number of'} numbers for each token and layer are no smaller "
                f"than keys and values of {entry}; take policy full, with codec int8 say",
                param="policy",
            )
        chosen, verbatim = Codec.parse(codec), self._recent(num_tokens) + self.states + self._summary(num_tokens)
        chosen.require_residuals()
        rows = replace(self, kv_heads=1, head_dim=self.width, value_dim=0)
        return verbatim + rows._layers(
            [
                rows._rows(count, precision, chosen.group) + self.kv_heads * _positions(count, num_tokens)
                for precision, count in _pieces(chosen, num_tokens)
            ]
        )

    def _piece(self, num_tokens: int, codec: Codec, precision: Precision, count: int) -> int:
        """Bytes of `count` entries of one head, positions included."""
        return self._rows(count, precision, codec.group) + _positions(count, num_tokens)

    def _layers(self, pieces: Sequence[int]) -> int:
        """Bytes of all layers whose heads have records of these bytes."""
        return self.layers * (self.kv_heads * sum(pieces) + _LAYER_BYTES + _PIECE_BYTES * len(pieces))

    def _summary(self, num_tokens: int) -> int:
        """Bytes of the codes that searches read: of distinct tokens (Heaps' law, fitted to English text) and of
        distinct places. Text that repeats itself has fewer."""
        codes = min(MAX_CODES, round(10 * num_tokens**0.5), num_tokens) + min(MAX_CODES, num_tokens)
        return codes * CODE_BYTES if self.summarised else 0

    def _recent(self, num_tokens: int) -> int:
        """Bytes of all layers that see the last tokens alone, which are stored verbatim."""
        total = 0
        for kind in self.recent:
            kept = kind.seen(num_tokens)
            head = self._rows(kept, "none", 0) + _positions(kept, num_tokens)
            total += self.kv_heads * head + _LAYER_BYTES + _PIECE_BYTES
        return total

    def _streams(self, num_tokens: int, kept: int, codec: Codec) -> int:
        """Bytes under codec klt, which depend on the text: about a fifth more or less, and a third where it repeats
        itself. Up to a third more under `steps=kl` where a policy keeps most in the layers with fine steps. Without
        `coded`, bits per number are fitted to kvshelf-tiny at steps of 0.25 to 8; its heads alone take a third more."""
        alone = codec.heads == "each" or kept < num_tokens
        numbers = self.layers * self.kv_heads * sum(self.dims)  # of a token
        total = float(numbers * 2 * min(kept, _FIRST_ROWS))
        for step, count in _classes(codec, num_tokens, kept):
            bits = 0.42 * math.log2(1 + (2.6 / step) ** 1.6) * (1.37 if alone else 1.0)
            if self.coded is not None:
                bits = self.coded(step, alone=alone)
            runs = math.ceil(count / RUN_ROWS)
            total += runs * 2 * self.layers * (self.kv_heads if alone else 1) * _RUN_BYTES
            total += numbers * (runs * _BYTES_PER_FLAG + max(0, count - _FIRST_ROWS) * bits / 8)
            total += self.layers * (self.kv_heads * _positions(count, num_tokens) + _LAYER_BYTES)
        return round(total)

    def _rows(self, count: int, precision: Precision, group: int) -> int:
        """Keys and values of `count` entries of one head, scales and zeros included."""
        if precision in ("none", "lossless"):
            saved = _SAVED_BITS / 8 if precision == "lossless" else 0
            return round(count * sum(self.dims) * (self.itemsize - saved))
        codes = count * sum(math.ceil(dim * BITS[precision] / 8) for dim in self.dims)
        # A scale and a zero in bfloat16: by channel for each group of entries, by entry for each group of channels.
        key_dim, value_dim = self.dims
        return codes + 4 * (math.ceil(count / group) * key_dim + count * math.ceil(value_dim / group))


def _pieces(codec: Codec, kept: int) -> list[tuple[Precision, int]]:
    """How many entries of a head are stored in which precision."""
    if codec.name in ("none", "lossless"):
        return [(codec.name, kept)]
    if codec.name == "mixed":
        share = _ASSUMED_SHARE if codec.share == "policy" else codec.share
        high = int(kept * share + 1e-9)
        split: list[tuple[Precision, int]] = [(codec.high, high), (codec.low, kept - high)]
    else:
        last = min(kept, codec.residual)
        split = [(codec.name, kept - last), ("none", last)]
    return [(precision, count) for precision, count in split if count]


def _classes(codec: Codec, num_tokens: int, kept: int) -> list[tuple[float, int]]:
    """The steps of codec klt, and how many entries of a head have each."""
    if not codec.classes:
        return [(codec.step, kept)]
    finer = [min(kept, int(num_tokens * share / 100)) for share in codec.shares[:-1]]
    return list(zip(codec.classes, (*finer, max(0, kept - sum(finer))), strict=True))


def _positions(count: int, num_tokens: int) -> int:
    """Bytes of the positions of one head: none, a bitmap, or deltas of one byte each, two if gaps are wide."""
    if count == num_tokens:
        return 0
    return min(math.ceil(num_tokens / 8), count * (1 if num_tokens < 128 * count else 2))
