"""The kinds of records in a blob, a file each, without torch, because stores read headers without it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import or_
from typing import Annotated, Any, Final

from pydantic import Field, GetPydanticSchema

from kvshelf.artifact.blob.kinds.chunk import ChunkHeader
from kvshelf.artifact.blob.kinds.indexed import IndexedHeader
from kvshelf.artifact.blob.kinds.kept import KeptHeader
from kvshelf.artifact.blob.kinds.latents import LatentsHeader
from kvshelf.artifact.blob.kinds.merged import MergedHeader
from kvshelf.artifact.blob.kinds.pruned import PrunedHeader
from kvshelf.artifact.blob.kinds.record import RecordHeader
from kvshelf.artifact.blob.kinds.residuals import ResidualsHeader
from kvshelf.artifact.blob.kinds.window import WindowHeader

KINDS: Final[Mapping[str, type[RecordHeader]]] = {
    "kept": KeptHeader,
    "pruned": PrunedHeader,
    "indexed": IndexedHeader,
    "window": WindowHeader,
    "chunk": ChunkHeader,
    "latents": LatentsHeader,
    "residuals": ResidualsHeader,
    "merged": MergedHeader,
}
"""Messages about an unknown kind name them in this order."""

_Any: Any = Annotated[reduce(or_, KINDS.values()), Field(discriminator="kind")]

AnyHeader = Annotated[RecordHeader, GetPydanticSchema(lambda _, handler: handler(_Any))]
"""A header of any of these kinds."""
