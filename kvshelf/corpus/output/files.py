"""The output of a batch: one file with a line or Parquet row per document, compressed or failed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import IO, Any, Final

from kvshelf.corpus.places import Place, ending, require_place, written
from kvshelf.corpus.row import Row

JSON_LINES: Final = (".jsonl", ".ndjson")
PARQUET: Final = (".parquet", ".pq")

_ROWS_AT_ONCE: Final = 4096


def require_format(where: Place) -> None:
    """Raises `InvalidRequest` unless the name ends in a known format, and the folder of a local file exists."""
    endings = (*JSON_LINES, *PARQUET)
    require_place(where, endings, what=f"the name of the output ends in {', '.join(endings)}", param="--output")


def write_output(where: Place, rows: Iterable[Row], *, file: bool) -> int:
    """Write all rows as JSON lines or Parquet, by the name's ending; returns how many. file: as in `Row.output`. The
    file appears under its name only when it is complete. Memory does not grow with the number of rows."""
    lines, count = (row.output(file=file) for row in rows), 0
    with written(where) as target:
        if ending(where) in PARQUET:
            return _write_parquet(target, lines)
        for line in lines:
            target.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
            count += 1
    return count


def _write_parquet(target: IO[bytes], lines: Iterator[dict[str, Any]]) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    numbers = {"tokens": ("document", "kept"), "bytes": ("full", "full_16bit", "stored")}
    text, integer, real = pa.string(), pa.int64(), pa.float64()
    schema = pa.schema(
        [(name, text) for name in ("custom_id", "file")]
        + [("line", integer), ("cache_id", text), ("document_id", text)]
        + [(name, pa.struct([(part, integer) for part in parts])) for name, parts in numbers.items()]
        + [("quality", pa.struct([*((name, real) for name in ("agreement", "low", "high", "kl")), ("cues", integer)]))]
        + [("attempts", integer)]
        + [("seconds", real), ("reused", pa.bool_()), ("levels", text)]
        + [("error", pa.struct([("code", text), ("message", text)]))]
    )
    count = 0
    with pq.ParquetWriter(target, schema) as writer:
        while batch := list(islice(lines, _ROWS_AT_ONCE)):
            for line in batch:
                if "levels" in line:
                    line["levels"] = json.dumps(line["levels"])
            writer.write_table(pa.Table.from_pylist(batch, schema))
            count += len(batch)
    return count
