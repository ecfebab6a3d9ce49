"""What a document costs the parts that all replicas share, as `kvshelf bench rates` measures it."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from kvshelf.errors import InvalidRequest


@dataclass(frozen=True)
class SharedRates:
    """Processor seconds and bytes; each part is one thread, so what a document takes of a second bounds its rate.

    redis_document_s, redis_mb_s: of the server's thread, for the calls of one document and for each megabyte of its
    blob. disk_document_s: of a writer, for a document on a shelf in a folder. *_document_bytes: that a home keeps
    besides the blob. controller_replica_s, gcs_replica_s: of Serve's controller and of Ray's GCS, for a replica and a
    second. driver_result_s: of the process that runs a batch, to write a result down; Ray Data's own work is not in it.
    """

    redis_document_s: float
    redis_mb_s: float
    redis_document_bytes: float
    disk_document_s: float
    disk_document_bytes: float
    controller_replica_s: float
    gcs_replica_s: float
    driver_result_s: float
    basis: str

    @classmethod
    def read(cls, path: Path) -> SharedRates:
        """The output of `kvshelf bench rates`. Raises `InvalidRequest` for another file."""
        try:
            report: dict[str, Any] = json.loads(path.read_text())
            numbers = {field.name: float(report["rates"][field.name]) for field in fields(cls) if field.name != "basis"}
            where = report["machine"]["processor"]
        except OSError as error:
            raise InvalidRequest(f"{path} cannot be read: {error.strerror}", param="--shared-rates") from error
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidRequest(
                f"{path} is no output of `kvshelf bench rates --output FILE`: {error!r}", param="--shared-rates"
            ) from error
        return cls(**numbers, basis=f"measured on {where}, {path.name}.")


MEASURED: Final = SharedRates(
    redis_document_s=1.40e-3,
    redis_mb_s=0.852e-3,
    redis_document_bytes=5376,
    disk_document_s=13.7e-3,
    disk_document_bytes=4444,
    controller_replica_s=2.06e-3,
    gcs_replica_s=0.50e-3,
    driver_result_s=0.0354e-3,
    basis="measured by `kvshelf bench rates` on 2 busy cores of an Intel Xeon with Valkey 9.1.",
)
"""docs/scale.md says under which circumstances."""
