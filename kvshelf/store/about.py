"""The part of an export behind the blob: name, labels and quality of the cache, and the document's text if it is kept.

The quality is a claim: a shelf cannot measure it again without the full cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from typing import Self

from pydantic import Field, model_validator

from kvshelf.api import Quality
from kvshelf.api.strict import CacheName, Labels, RequestBody, misuse, parse_request
from kvshelf.artifact.exported import Exported, about_part
from kvshelf.errors import InvalidRequest, SourceNotKept
from kvshelf.store.base import Store
from kvshelf.store.manifest import Manifest


class About(RequestBody):
    """Validated as the fields of a creation are."""

    name: CacheName = ""
    labels: Labels = Field(default_factory=dict)
    quality: Quality | None = None

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.quality is not None and not _possible(self.quality):
            raise misuse("quality", "quality has numbers that no measurement gives")
        return self


def _possible(quality: Quality) -> bool:
    low = 0.0 if quality.low is None else quality.low
    agreement, high = quality.agreement, quality.high
    if agreement is None or high is None:  # nothing counted
        in_order = agreement is high is quality.low is None and quality.cues == 0
    else:
        in_order = 0 <= low <= agreement <= high <= 1  # false for NaN
    numbers: Iterable[float] = (quality.kl, quality.probe_s, *(quality.worst or {}).values())
    counted = quality.cues > 0 or (quality.cues == 0 and (low == 1 or agreement is None))  # 1: the full cache itself
    return in_order and counted and quality.version > 0 and all(0 <= number < math.inf for number in numbers)


def export_part(store: Store, manifest: Manifest) -> bytes:
    """The part of a stored cache, with its source if that is text. Raises as `Store.get` does."""
    source = b""
    if manifest.source is not None and manifest.source.form == "text":
        with suppress(SourceNotKept):  # its time is over by now
            source = str(store.source(manifest.id, tenant=manifest.tenant)).encode()
    about = About.model_construct(name=manifest.name, labels=manifest.labels, quality=manifest.quality)
    return about_part(bytes.fromhex(manifest.blob_digest), about.model_dump_json().encode(), source)


def about_of(exported: Exported) -> About:
    """Empty for a blob alone. Raises `InvalidRequest`, which names the field."""
    return parse_request(About, exported.about) if exported.about else About()


def source_of(exported: Exported, limit: int) -> str | None:
    """The document's text in an export, None if there is none. Only a caller with the tokenizer can compare it with the
    cache. Raises `InvalidRequest` beyond `limit` bytes and for bytes that are no UTF-8."""
    if not exported.source:
        return None
    if len(exported.source) > limit:
        raise InvalidRequest(
            f"the source in the export has {len(exported.source)} bytes; at most {limit} are taken", param="source"
        )
    try:
        return exported.source.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest("the source in the export is no UTF-8", param="source") from error
