"""Files as a corpus: text, PDF, HTML, JSONL, Parquet; alone, in a folder or by a pattern; on disk, in S3 or in GCS."""

from __future__ import annotations

import asyncio
import io
import os
import re
import stat
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Final, cast

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from fsspec.utils import glob_translate

from kvshelf._extras import install_command
from kvshelf.api import CreateCache
from kvshelf.client._calls import MEDIA_TYPES
from kvshelf.corpus.input.defaults import DOCUMENTS
from kvshelf.corpus.input.extract import ExtractLimits, Upload, extract, missing_library, plain_text
from kvshelf.corpus.input.rows import MAX_DOCUMENT_BYTES, MAX_NAME, parse_jsonl, read_row, without_duplicates
from kvshelf.corpus.places import is_url, opened
from kvshelf.corpus.row import Row, Shard, cut
from kvshelf.errors import BodyTooLarge, FileNotFound, InvalidRequest, KvshelfError, StateConflict, UnsupportedMediaType
from kvshelf.names import as_text, is_text

JSONL: Final = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz", ".jsonl.zst", ".ndjson.zst")
PARQUET: Final = (".parquet", ".pq")

_TEXTS_PER_SHARD: Final = 256
_EXTRACTED_PER_SHARD: Final = 16
"""Files of PDF and HTML, which take a second or more each: the first documents of a corpus should not wait long."""

AT_ONCE: Final = min(4, os.cpu_count() or 1)
"""Files of a shard that are read at once: PDF and HTML in processes of their own, files of S3 over the network."""

_LIMITS: Final = ExtractLimits(MAX_DOCUMENT_BYTES, 1 << 30, 60.0)

SHARD_BYTES: Final = 32 << 20
_BUFFER_BYTES: Final = 1 << 20
_PARQUET_ROWS: Final = 64
_NO_VALUE: Final = (ValueError, LookupError, ArithmeticError, pa.ArrowException)
"""Errors of pyarrow for text that is not UTF-8, a repeated key in a map, a time after the year 9999 and the like."""
_FIELDS: Final = {"custom_id", *CreateCache.model_fields} - {"images"}
"""Columns that are read. Data sets have their own in the one that is left out."""


@dataclass(frozen=True)
class InputFile:
    """A file of the corpus. name: its path below the given folder, for messages. modified: nanoseconds, None if the
    file system does not say."""

    path: str
    name: str
    nbytes: int
    modified: int | None


class LocalFiles:
    """The part of a `pyarrow.fs.FileSystem` that reads, for the files of this machine. pyarrow takes no path that is
    not UTF-8; such a file is opened by Python."""

    def __init__(self) -> None:
        self._system = pafs.LocalFileSystem()

    def get_file_info(self, path: str) -> Any:
        if is_text(path):
            return self._system.get_file_info(path)
        try:
            status = os.stat(path)
        except OSError:
            return pafs.FileInfo(as_text(path), pafs.FileType.NotFound)
        kind = {stat.S_IFREG: pafs.FileType.File, stat.S_IFDIR: pafs.FileType.Directory}
        of = kind.get(stat.S_IFMT(status.st_mode), pafs.FileType.Unknown)
        return pafs.FileInfo(as_text(path), of, mtime_ns=status.st_mtime_ns, size=status.st_size)

    def open_input_file(self, path: str) -> Any:
        return self._system.open_input_file(path) if is_text(path) else pa.PythonFile(open(path, "rb"), mode="r")

    def open_input_stream(self, path: str, compression: str | None) -> Any:
        if is_text(path):
            return self._system.open_input_stream(path, compression=compression)
        codec = _CODECS.get(PurePosixPath(path).suffix.lower()) if compression == "detect" else None
        file = self.open_input_file(path)
        return file if codec is None else pa.CompressedInputStream(file, codec)


_CODECS: Final = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}
"""As pyarrow detects them."""


class FileCorpus:
    """The corpus in a file, a folder, or the files that match a pattern; local, or by an s3:// or gs:// URL.

    A .jsonl file, compressed or not, has a row per line, and a .parquet file a row per row. Any other file is one
    document (UTF-8 text, PDF or HTML), and its name is its custom id. limits: for PDF and HTML. defaults: fields of
    `CreateCache` for rows that do not give them. Hidden files are left out, as is what lies at or below the places in
    `without`: the batch itself writes there. several: the corpus has more than one file, so each line of the output
    must name its input file.
    """

    def __init__(
        self,
        where: str,
        defaults: Mapping[str, Any],
        *,
        without: Iterable[Path | str] = (),
        limits: ExtractLimits = _LIMITS,
    ) -> None:
        """Raises `InvalidRequest` if the URL has no known file system, or if no file is found."""
        self._system, path, pattern = _opened(where)
        self._defaults = dict(defaults)
        self._limits = limits
        with _named_errors(where):
            matches = tuple(_files_at(self._system, path, pattern))
        local = isinstance(self._system, LocalFiles)
        self.files = tuple(_besides(without, matches) if local else _besides_remote(without, matches))
        if not self.files:
            but = " but what this batch writes itself" if matches else ""
            raise InvalidRequest(f"there is no file at {where!r}{but}", param="input")
        self.several = len(self.files) > 1

    def shards(self) -> list[Shard]:
        """JSONL and Parquet files have a shard each; documents share some."""
        texts: list[InputFile] = []
        extracted: list[InputFile] = []
        shards: list[Shard] = []
        for file in self.files:
            if file.name.lower().endswith(PARQUET):
                shards.append(ParquetShard(self._system, [file], self._defaults))
            elif file.name.lower().endswith(JSONL):
                shards.append(JsonlShard(self._system, [file], self._defaults))
            else:
                (extracted if _media_type(file) else texts).append(file)
        for files, most in ((texts, _TEXTS_PER_SHARD), (extracted, _EXTRACTED_PER_SHARD)):
            for group in cut(files, lambda file: file.nbytes, most=most, size=SHARD_BYTES):
                shards.append(DocumentShard(self._system, group, self._defaults, self._limits))
        return shards


class _FileShard(Shard):
    """Files of one file system, a `pyarrow.fs.FileSystem`."""

    def __init__(self, system: Any, files: Sequence[InputFile], defaults: Mapping[str, Any]) -> None:
        self._system = system
        self._files = tuple(files)
        self._file = self._files[0]
        self._defaults = defaults
        self.nbytes = sum(file.nbytes for file in files)
        self.local = isinstance(system, LocalFiles)


class DocumentShard(_FileShard):
    """Some files of text, PDF or HTML, each of them one document."""

    def __init__(
        self, system: Any, files: Sequence[InputFile], defaults: Mapping[str, Any], limits: ExtractLimits
    ) -> None:
        super().__init__(system, files, defaults)
        self.rows = len(self._files)
        self._limits = limits

    def read(self) -> Iterator[Row]:
        with _event_loop() as loop, ThreadPoolExecutor(AT_ONCE) as pool:
            yield from pool.map(partial(self._row, loop), self._files)

    def _row(self, loop: asyncio.AbstractEventLoop, file: InputFile) -> Row:
        try:
            text = self._text(loop, file, self._data(file))
        except KvshelfError as error:
            return Row(file.name, 1, file.name, nbytes=file.nbytes).failed(error)
        values = {"custom_id": file.name, "document": text, "name": PurePosixPath(file.name).name[:MAX_NAME]}
        return read_row(values, self._defaults, source=file.name, line=1, nbytes=file.nbytes)

    def _data(self, file: InputFile) -> bytes:
        with _named_errors(file.name), self._system.open_input_stream(file.path, compression=None) as stream:
            data: bytes = stream.read(MAX_DOCUMENT_BYTES + 1)
            _require_unchanged(self._system, file)
        if len(data) > MAX_DOCUMENT_BYTES:
            raise BodyTooLarge(f"{file.name} has more than {MAX_DOCUMENT_BYTES} bytes, as many as a document may have")
        return data

    def _text(self, loop: asyncio.AbstractEventLoop, file: InputFile, data: bytes) -> str:
        upload = Upload(data, _media_type(file))
        try:
            kind = upload.kind
        except UnsupportedMediaType as error:
            raise UnsupportedMediaType(
                f"{file.name} is {upload.file_type or 'no PDF'}; give UTF-8 text, PDF or HTML, or leave it out"
            ) from error
        if kind == "text":
            return plain_text(data, file.name)
        if library := missing_library(kind):
            raise UnsupportedMediaType(
                f"{file.name}: reading {kind.upper()} needs {library}, which is not installed; run: "
                f"{install_command('documents')}"
            )
        return asyncio.run_coroutine_threadsafe(extract(upload, kind, self._limits, file.name), loop).result()


@contextmanager
def _event_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop in a thread of its own, for the processes that extract text. One for all files of a shard: in
    Ray's workers loops are uvloop's, and two of these fail when both start a process at the same time."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="kvshelf-extract")
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def _media_type(file: InputFile) -> str:
    """The media type of PDF and HTML, by the file's name; "" for other files, whose first bytes decide."""
    return MEDIA_TYPES.get(PurePosixPath(file.name).suffix.lower(), "")


class JsonlShard(_FileShard):
    """One JSONL file."""

    def read(self) -> Iterator[Row]:
        return _to_the_end(self._system, self._file, self._rows())

    def _rows(self) -> Iterator[Row]:
        with self._system.open_input_stream(self._file.path, compression="detect") as stream:
            lines = io.BufferedReader(cast(io.RawIOBase, stream), _BUFFER_BYTES)
            yield from parse_jsonl(cast(BinaryIO, lines), self._file.name, self._defaults)


class ParquetShard(_FileShard):
    """One Parquet file. Reads `custom_id` and the columns named like fields of `CreateCache`, and no other columns."""

    def read(self) -> Iterator[Row]:
        return _to_the_end(self._system, self._file, without_duplicates(self._rows()))

    def _rows(self) -> Iterator[Row]:
        with self._system.open_input_file(self._file.path) as file, pq.ParquetFile(file) as table:
            columns = set(table.schema_arrow.names)
            if not columns & set(DOCUMENTS):
                raise InvalidRequest(
                    f"{self._file.name} has no column {', '.join(DOCUMENTS[:-1])} or {DOCUMENTS[-1]}; it has "
                    f"{', '.join(sorted(columns)):.200}"
                )
            share = self._file.nbytes // max(1, table.metadata.num_rows)
            line = 0
            for batch in table.iter_batches(_PARQUET_ROWS, columns=sorted(columns & _FIELDS)):
                for at in range(batch.num_rows):
                    line += 1
                    yield self._row(batch, at, line, share)

    def _row(self, batch: Any, at: int, line: int, nbytes: int) -> Row:
        """One row of a record batch, read value by value: a value that Python cannot hold fails only this row."""
        values: dict[str, Any] = {}
        bad: InvalidRequest | None = None
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            try:
                value = column[at].as_py(maps_as_pydicts="strict")
            except _NO_VALUE as error:
                bad = InvalidRequest(f"{name}: this value cannot be read: {error!s:.200}")
                continue
            if value is not None:
                values[name] = value
        row = read_row(values, self._defaults, source=self._file.name, line=line, nbytes=nbytes)
        return row if bad is None else row.failed(bad)


def _to_the_end(system: Any, file: InputFile, rows: Iterator[Row]) -> Iterator[Row]:
    """The rows of a file. If reading fails midway, one error row stands for the rest."""
    line = 0
    try:
        with _named_errors(file.name):
            for row in rows:
                line = row.line
                yield row
            _require_unchanged(system, file)
    except KvshelfError as error:
        yield Row(file.name, line + 1).failed(error)


def _require_unchanged(system: Any, file: InputFile) -> None:
    """Raises `StateConflict` if a file has changed: reading it during a write may give rows that it never had."""
    info = system.get_file_info(file.path)
    if info.type is not pafs.FileType.File or (info.size, info.mtime_ns) != (file.nbytes, file.modified):
        raise StateConflict(f"{file.name} has changed since the batch began; run the batch again when it is complete")


def _opened(where: str) -> tuple[Any, str, str | None]:
    """The file system of a path, URL or pattern; the path of a file or folder there; the pattern below it, if any."""
    url = is_url(where)
    plain, mark, query = where.partition("?") if url else (where, "", "")
    wild = re.search(r"[*\[]" if url else r"[*?\[]", plain)
    base, pattern = plain, None
    if wild is not None and (url or not Path(where).exists()):
        slash = plain.rfind("/", 0, wild.start())
        base, pattern = plain[: slash + 1], plain[slash + 1 :]
    if not url:
        return LocalFiles(), str(Path(base).expanduser().absolute()), pattern
    system, path = opened(base + mark + query, param="input")
    return LocalFiles() if isinstance(system, pafs.LocalFileSystem) else system, path, pattern


def _files_at(system: Any, path: str, pattern: str | None) -> Iterator[InputFile]:
    """The files at a path, sorted by name, without hidden ones."""
    here = system.get_file_info(path)
    if here.type is pafs.FileType.File and pattern is None:
        yield InputFile(path, here.base_name, here.size, here.mtime_ns)
        return
    if here.type is not pafs.FileType.Directory:
        raise InvalidRequest(f"there is no file or folder {as_text(path)!r}", param="input")
    walk = _walk_local if isinstance(system, LocalFiles) else _walk_remote
    glob = re.compile(glob_translate(pattern or "**"))
    for file in sorted(walk(system, path.rstrip("/")), key=lambda file: file.name):
        if glob.fullmatch(file.name) and not any(part.startswith(".") for part in file.name.split("/")):
            yield file


def _besides_remote(without: Iterable[Path | str], files: Iterable[InputFile]) -> Iterator[InputFile]:
    written = [opened(url, param="--output")[1] for url in without if isinstance(url, str)]
    for file in files:
        if not any(file.path == path or file.path.startswith(path + "/") for path in written):
            yield file


def _besides(without: Iterable[Path | str], files: Iterable[InputFile]) -> Iterator[InputFile]:
    """The files not in `without`. Resolves only paths with one of their file names: a corpus may have millions."""
    left_out = {os.path.realpath(path) for path in without if isinstance(path, Path)}
    names = {os.path.basename(path) for path in left_out}
    for file in files:
        if os.path.basename(file.path) not in names or os.path.realpath(file.path) not in left_out:
            yield file


def _walk_remote(system: Any, top: str) -> Iterator[InputFile]:
    for info in system.get_file_info(pafs.FileSelector(top, recursive=True)):
        if info.type is pafs.FileType.File:
            yield InputFile(info.path, info.path[len(top) + 1 :], info.size, info.mtime_ns)


def _walk_local(_system: Any, top: str) -> Iterator[InputFile]:
    """As `_walk_remote`. pyarrow would abandon the whole tree at a name that is not UTF-8, or at a folder it may not
    read; here, each of these becomes a file of the corpus, the latter an error row."""
    closed: list[str] = []
    for folder, _, names in os.walk(top, onerror=lambda error: closed.append(error.filename)):
        for path in (os.path.join(folder, name) for name in names):
            try:
                status = os.stat(path)
            except OSError:
                closed.append(path)
            else:
                if stat.S_ISREG(status.st_mode):
                    yield InputFile(path, as_text(path[len(top) + 1 :]), status.st_size, status.st_mtime_ns)
    yield from (InputFile(path, as_text(path[len(top) + 1 :]), 0, None) for path in closed)


@contextmanager
def _named_errors(name: str) -> Iterator[None]:
    """Translate errors of pyarrow and the operating system. Both raise `OSError` for most failures."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFound(f"{name} is gone: it was there when the batch began") from error
    except (OSError, pa.ArrowException, UnicodeError) as error:
        raise InvalidRequest(f"{name} cannot be read: {error!s:.200}") from error
