"""Results made up for tests."""

from __future__ import annotations

from typing import Any

from kvshelf.corpus.row import Row, RowError


def success(line: int, **fields: Any) -> Row:
    known = {"custom_id": f"row-{line}", "cache_id": f"kvs_{line}", "document_id": f"doc_{line}", "tokens": 100}
    known |= {
        "kept": 25,
        "bytes_full": 1000,
        "bytes_full_16bit": 500,
        "bytes_stored": 250,
        "attempts": 1,
        "seconds": 0.5,
        "nbytes": 10,
    }
    return Row("in.jsonl", line, **{**known, **fields})


def failure(line: int, **fields: Any) -> Row:
    error = RowError("worker_crashed", "it died")
    return Row(**{"source": "in.jsonl", "line": line, "error": error, "attempts": 3, "nbytes": 10, **fields})
