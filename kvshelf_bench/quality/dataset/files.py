"""The rows of a dataset, each with its place: a file of JSON lines or Parquet, a folder, or a dataset of the hub."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvshelf.errors import InvalidRequest

_SUFFIXES: Final = (".jsonl", ".parquet", ".arrow")
_HUB_FILES: Final = ("**/*.jsonl", "*.jsonl", "**/*.parquet", "*.parquet")


@dataclass(frozen=True)
class FileRow:
    """A row of a file. where: file and line, counted from 1, for messages. file: the file's name without ending, which
    is the task's name in SCBench. number: of the line. alone: whether there is no other file."""

    fields: dict[str, Any]
    where: str
    file: str
    number: int
    alone: bool

    @property
    def id(self) -> str:
        """The row's own name, or its line; in a folder behind its file's. Raises `InvalidRequest`."""
        name = self.fields.get("id", self.fields.get("_id", f"line {self.number}"))
        if isinstance(name, int) and not isinstance(name, bool):
            name = str(name)
        if not isinstance(name, str) or not name.strip():
            raise bad(f"{self.where}: id must be a text that is not empty")
        return name if self.alone else f"{self.file}/{name}"


def read_rows(source: str) -> Iterator[FileRow]:
    """The rows of a file, or of all files of a folder in the order of their names: JSON lines (`.jsonl`, and any file
    without another known ending), Parquet, and the Arrow files that `datasets` saves. A source that is no path is the
    name of a dataset of the hub, perhaps with a folder of it: `simonjegou/ruler/4096`. Raises `InvalidRequest`."""
    path = Path(source)
    if not path.exists():
        path = _from_hub(source)
    files = _files(path)
    for file in files:
        reader = {".parquet": _parquet, ".arrow": _arrow}.get(file.suffix, _json_lines)
        for number, fields in reader(file):
            where = f"{file}, line {number}"
            if not isinstance(fields, dict):
                raise bad(f"{where} has {type(fields).__name__}; a row is an object with fields")
            yield FileRow(fields, where, file.stem, number, len(files) == 1)


def bad(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="dataset")


def _files(path: Path) -> Sequence[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.rglob("*") if file.suffix in _SUFFIXES and file.is_file())
    if not files:
        raise bad(f"--dataset {path} is a folder without {', '.join(_SUFFIXES)}")
    return files


def _from_hub(source: str) -> Path:
    owner, _, rest = source.partition("/")
    name, _, folder = rest.partition("/")
    if not owner or not name or source.startswith((".", "/", "~")):
        raise bad(f"--dataset {source} cannot be read: no such file or folder, and no name of a dataset of the hub")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = [f"{folder}/{one}" for one in _HUB_FILES] if folder else list(_HUB_FILES)
    try:
        snapshot = snapshot_download(f"{owner}/{name}", repo_type="dataset", allow_patterns=patterns)
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise bad(f"--dataset {source} is no file here, and the hub did not give it: {error}") from error
    return Path(snapshot) / folder


def _json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise bad(f"--dataset {path} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line.decode())
            json.dumps(fields, ensure_ascii=False).encode()  # half a character, as "\ud800", is no text
        except (ValueError, RecursionError) as error:
            raise bad(f"{path}, line {number} is no JSON: {error}") from error
        yield number, fields


def _parquet(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            yield from _numbered(file.iter_batches())
    except (OSError, pa.ArrowException) as error:
        raise bad(f"--dataset {path} cannot be read: {error}") from error


def _arrow(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow as pa

    try:
        with pa.memory_map(str(path)) as file:
            yield from _numbered(pa.ipc.open_stream(file))
    except (OSError, pa.ArrowException) as error:
        raise bad(f"--dataset {path} cannot be read: {error}") from error


def _numbered(batches: Any) -> Iterator[tuple[int, Any]]:
    yield from enumerate((row for batch in batches for row in batch.to_pylist()), 1)
