"""The last entries of a layer whose queries see no others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvshelf.artifact.packed import Packed, offsets_of
from kvshelf.artifact.shape import tokens_seen


@dataclass(frozen=True, eq=False)
class Recent(Packed):
    """The last tokens of a document in a layer whose queries see no others. Kept verbatim, under every policy and
    codec: they do not grow with the document.

    A question that goes on sees ever fewer of them: attention has to be told which (`LogitRules`).
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.uniform

    @staticmethod
    def of(keys: Tensor, values: Tensor, window: int | None, chunk: int | None = None) -> Recent:
        """From the keys `[kv_heads, N, D]` and values `[kv_heads, N, Dv]` of a document."""
        return Recent._ending_at(keys.shape[1], keys, values, window, chunk)

    def followed_by(self, keys: Tensor, values: Tensor, end: int) -> Recent:
        """The last tokens of the document once tokens with these keys `[kv_heads, T, D]` and values have been appended
        to it, so that it has `end` tokens."""
        own_keys, own_values = (torch.stack(heads) for heads in self.plain_heads())  # [kv_heads, kept, D]
        keys = torch.cat([own_keys.to(keys.device), keys], dim=1)
        values = torch.cat([own_values.to(values.device), values], dim=1)
        return Recent._ending_at(end, keys, values, *self.sees)

    @staticmethod
    def _ending_at(end: int, keys: Tensor, values: Tensor, window: int | None, chunk: int | None) -> Recent:
        """From keys `[kv_heads, N, D]` and values of the last N tokens of a document of `end`, no fewer than are
        seen."""
        heads, tokens, _ = keys.shape
        kept = tokens_seen(end, window, chunk)
        fields: dict[str, Any] = {
            "keys": keys[:, tokens - kept :].flatten(0, 1),
            "values": values[:, tokens - kept :].flatten(0, 1),
            "entries_at": torch.arange(end - kept, end, dtype=torch.int32, device=keys.device).repeat(heads),
            "offsets": offsets_of([kept] * heads),
        }
        if chunk is not None:
            return Chunk(**fields, chunk=chunk)
        assert window is not None
        return Window(**fields, window=window)


@dataclass(frozen=True, eq=False)
class Window(Recent):
    """The last `window - 1` tokens of a layer whose queries see `window` tokens, themselves included; all of a shorter
    document."""

    kind: ClassVar[str] = "window"

    window: int = field(kw_only=True)

    @property
    def sees(self) -> tuple[int | None, int | None]:
        return self.window, None


@dataclass(frozen=True, eq=False)
class Chunk(Recent):
    """The tokens of the document's last chunk, none if it is finished, of a layer whose queries see those of their own
    chunk of `chunk` tokens."""

    kind: ClassVar[str] = "chunk"

    chunk: int = field(kw_only=True)

    @property
    def sees(self) -> tuple[int | None, int | None]:
        return None, self.chunk
