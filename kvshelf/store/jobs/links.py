"""Which weights may answer from caches of other weights: a record for each pair that was measured.

They belong to the home and to no tenant: what two sets of weights have in common is no secret of a document.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from pydantic import Field

from kvshelf.artifact.identity import digest
from kvshelf.errors import StateConflict
from kvshelf.store.manifest import StoredRecord
from kvshelf.store.table import HOME, Item, JobTable, read

MOST_LINKS: Final = 1000


class LinkedModel(StoredRecord):
    """One side of a link. name: for people. The others: as of a `ModelIdentity`."""

    name: str
    fingerprint: str
    weights: str
    dtype: str
    tokenizer: str
    template: str


class ModelLink(StoredRecord):
    """Caches that `maker` has made are asked by `asker`, which an engine runs. agreement: share of the `cues` that
    count on which `asker`, behind the full caches of `maker`, agrees. low: the bound of this share, as of
    `engine.quality`. documents: whose cues they are. engine_version: of the package that runs `asker`. kvshelf: the
    version that measured, on `date` (YYYY-MM-DD)."""

    maker: LinkedModel
    asker: LinkedModel
    engine: str
    engine_version: str
    agreement: float = Field(ge=0, le=1)
    low: float = Field(ge=0, le=1)
    cues: int = Field(ge=1)
    documents: int = Field(ge=1)
    quality_version: int
    kvshelf: str
    date: str


class LinkTable:
    """The links of one home. Raises as `JobTable` does."""

    def __init__(self, table: JobTable) -> None:
        self._table = table

    def keep(self, link: ModelLink) -> None:
        """Keep a link in place of an earlier one of the same pair. Raises `StateConflict` where another caller changes
        the same, and beyond `MOST_LINKS`."""
        item = Item("link", _id(link), HOME, link.model_dump_json())
        earlier = self._table.find(item.id, HOME)
        if earlier is None and len(self.list()) >= MOST_LINKS:
            raise StateConflict(f"there are {MOST_LINKS} links between models, as many as may be; remove one")
        stored = self._table.add(item) if earlier is None else self._table.change(replace(earlier, text=item.text))
        if stored is None:
            raise StateConflict(f"the link of {link.maker.name!r} and {link.asker.name!r} was changed meanwhile")

    def list(self) -> list[ModelLink]:
        """Newest first."""
        return [read(item, ModelLink) for item in self._table.listing("link", HOME, None, MOST_LINKS)]

    def makers(self, asker: str, engine: str, *, engine_version: str, quality_version: int) -> dict[str, float]:
        """The agreement with each model of whose caches a model may be asked, by its fingerprint. asker: the model's.
        engine: that runs it. A link that was measured with other versions says nothing of these."""
        key = (asker, engine, engine_version, quality_version)
        return {
            link.maker.fingerprint: link.agreement
            for link in self.list()
            if (link.asker.fingerprint, link.engine, link.engine_version, link.quality_version) == key
        }

    def remove(self, link: ModelLink) -> None:
        """Caches stay, and are refused from the next start on."""
        self._table.remove(_id(link))


def _id(link: ModelLink) -> str:
    return "link_" + digest("kvshelf.link", link.maker.fingerprint, link.asker.fingerprint, link.engine)
