"""The shelf: artifacts, their blob format, their identity, and the places where they are kept."""

from kvshelf.kernels.quantize.rows import QuantizedRows
from kvshelf.store.artifact import CompressedCache, Kept, LayerRecord, Merged, Parts
from kvshelf.store.base import UNSET, BlobFile, Page, Receipt, Scrubbed, Store, Swept
from kvshelf.store.codecs import Codec
from kvshelf.store.identity import Identity, ModelIdentity
from kvshelf.store.index import Quota
from kvshelf.store.ledger import Ledger, RequestError, RequestRecord
from kvshelf.store.manifest import Manifest, Timings, Usage
from kvshelf.store.rules import Rules
from kvshelf.store.url import open_store

__all__ = [
    "UNSET",
    "BlobFile",
    "Codec",
    "CompressedCache",
    "Identity",
    "Kept",
    "LayerRecord",
    "Ledger",
    "Manifest",
    "Merged",
    "ModelIdentity",
    "Page",
    "Parts",
    "QuantizedRows",
    "Quota",
    "Receipt",
    "RequestError",
    "RequestRecord",
    "Rules",
    "Scrubbed",
    "Store",
    "Swept",
    "Timings",
    "Usage",
    "open_store",
]
