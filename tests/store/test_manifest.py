"""Manifests as they are stored, and their revisions."""

from __future__ import annotations

import json

import pytest

from kvshelf.api import CertifiedBy
from kvshelf.store.manifest import Manifest

FIELDS = {
    "id": "kvs_1", "document_id": "d", "tenant": "t", "identity": {"model": {"dtype": "float32"}}, "model": "m",
    "layout": "plain", "policy": "full", "policy_params": {}, "compression_ratio": 0.0, "codec": "none",
    "num_tokens": 1, "kept_tokens": 1, "bytes_full": 1, "bytes_stored": 1, "blob_digest": "x",
    "segment_digests": ("a",), "created_at": 1.0,
}  # fmt: skip


def test_the_etag_of_a_cache_stays_from_version_to_version() -> None:
    """The digest was made by the version before certificates and promises: clients keep ETags."""
    assert Manifest(**FIELDS).revision == "12e49f9a025ebfd5d8385fc7ead03f9e52825595"


@pytest.mark.parametrize(
    ("name", "value"),
    [("guaranteed_until", 9.0), ("certificate", CertifiedBy(name="law", alpha=0.1, digest="d"))],
)
def test_a_field_is_written_and_revised(name: str, value: object) -> None:
    manifest = Manifest(**FIELDS | {name: value})
    assert name in json.loads(manifest.model_dump_json())
    assert manifest.revision != Manifest(**FIELDS).revision
    assert Manifest.model_validate_json(manifest.model_dump_json()) == manifest
