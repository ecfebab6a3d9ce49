"""`Kept` records in a blob."""

from __future__ import annotations

from typing import ClassVar, Literal

from kvshelf.artifact.blob.kinds.record import RecordHeader


class KeptHeader(RecordHeader):
    in_runs: ClassVar[bool] = True

    kind: Literal["kept"]
