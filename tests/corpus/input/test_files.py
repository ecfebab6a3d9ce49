"""Files as a corpus: each kind of file, and each way in which reading fails."""

from __future__ import annotations

import asyncio
import gzip
import io
import os
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kvshelf.corpus.input import files
from kvshelf.corpus.input.extract import ExtractLimits
from kvshelf.corpus.input.files import FileCorpus
from kvshelf.corpus.row import Row
from kvshelf.errors import InvalidRequest
from tests.service.files import LINE, encrypted, laborious, pdf


def read(where: object, **defaults: Any) -> list[Row]:
    """All rows; each shard is pickled before it is read."""
    shards = FileCorpus(str(where), defaults).shards()
    return [row for shard in shards for row in pickle.loads(pickle.dumps(shard)).read()]


def documents(rows: list[Row]) -> dict[str | None, str]:
    return {row.custom_id: row.spec.document for row in rows if row.spec is not None}


def errors(rows: list[Row]) -> list[tuple[str, int, str]]:
    return [(row.source, row.line, row.error.code) for row in rows if row.error is not None]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A folder with good files of every kind."""
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "deep" / "b.md").write_text("second")
    (tmp_path / "deep" / "er" / "c").write_bytes(b"\xef\xbb\xbf" + "drittens: größer".encode())
    (tmp_path / ".hidden").write_text("not this")
    (tmp_path / "deep" / ".git").mkdir()
    (tmp_path / "deep" / ".git" / "d.txt").write_text("nor this")
    (tmp_path / "lines.jsonl").write_text('{"custom_id": "l1", "document": "one"}\n{"document": "two"}\n')
    with gzip.open(tmp_path / "packed.jsonl.gz", "wb") as file:
        file.write(b'{"custom_id": "g1", "document": "zipped"}\n')
    table = pa.table({"custom_id": ["p1", "p2"], "document": ["one", "two"], "url": ["x", "y"]})
    pq.write_table(table, tmp_path / "table.parquet")
    return tmp_path


def test_a_folder_is_read_with_all_that_is_below_it(corpus: Path) -> None:
    rows = read(corpus)
    assert documents(rows) == {
        "a.txt": "first",
        "deep/b.md": "second",
        "deep/er/c": "drittens: größer",
        "l1": "one",
        None: "two",
        "g1": "zipped",
        "p1": "one",
        "p2": "two",
    }
    assert errors(rows) == []
    assert FileCorpus(str(corpus), {}).several


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.txt", {"a.txt"}),
        ("**/*.md", {"deep/b.md"}),
        ("deep/*", {"b.md"}),
        ("?.txt", {"a.txt"}),
        ("[ab].*", {"a.txt"}),
        ("lines.jsonl", {"l1", None}),
        ("*.parquet", {"p1", "p2"}),
    ],
)
def test_a_pattern_chooses_files(corpus: Path, pattern: str, expected: set[str | None]) -> None:
    assert documents(read(corpus / pattern)).keys() == expected


def test_a_file_by_its_url_and_one_whose_name_looks_like_a_pattern(corpus: Path) -> None:
    assert documents(read(f"file://{corpus}/lines.jsonl")).keys() == {"l1", None}
    assert documents(read(f"file://{corpus}/**/*.md")).keys() == {"deep/b.md"}
    (corpus / "what[is]this?.txt").write_text("odd")
    assert documents(read(corpus / "what[is]this?.txt")) == {"what[is]this?.txt": "odd"}


def test_what_a_batch_writes_into_its_own_folder_is_no_part_of_it(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whatever path it is known there; another file of the same name is a document."""
    (corpus / "alias").symlink_to(corpus / "deep")
    (corpus / "c").write_text("another c")
    monkeypatch.chdir(corpus)
    for where in (".", str(corpus), f"file://{corpus}", str(corpus / "**"), str(corpus / "deep" / "..")):
        names = {file.name for file in FileCorpus(where, {}, without=[Path("a.txt"), corpus / "alias/er/c"]).files}
        assert names == {"c", "deep/b.md", "lines.jsonl", "packed.jsonl.gz", "table.parquet"}
    with pytest.raises(InvalidRequest, match="but what this batch writes itself"):
        FileCorpus("a.txt", {}, without=[corpus / "a.txt"])


@pytest.mark.parametrize("where", ["none", "*.none", "s4://bucket/x", "empty"])
def test_an_input_without_a_file_is_refused_whole(corpus: Path, where: str) -> None:
    (corpus / "empty").mkdir()
    with pytest.raises(InvalidRequest):
        FileCorpus(where if "://" in where else str(corpus / where), {})


def test_a_text_s_name_is_its_custom_id_and_the_cache_s_name(corpus: Path) -> None:
    (row,) = read(corpus / "deep/b.md", labels={"kind": "md"})
    assert row.spec is not None
    assert (row.source, row.custom_id, row.spec.name, row.spec.labels) == ("b.md", "b.md", "b.md", {"kind": "md"})
    assert row.nbytes == 6


@pytest.mark.parametrize(
    ("data", "code", "message"),
    [
        ("größe".encode("latin-1"), "invalid_request", "byte 2 of x.txt is not valid UTF-8"),
        ("größe".encode("utf-16"), "invalid_request", "byte 0 of x.txt is not valid UTF-8"),
        (b"ELF\0\1\2", "invalid_request", "zero bytes"),
        (b"", "invalid_request", "is empty"),
        (b" \n\n", "invalid_request", "is empty"),
        (b"x" * 3000, "body_too_large", "more than 2000 bytes"),
    ],
    ids=["latin-1", "utf-16", "binary", "empty", "blank", "long"],
)
def test_a_file_that_is_no_text_is_an_error_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes, code: str, message: str
) -> None:
    monkeypatch.setattr(files, "MAX_DOCUMENT_BYTES", 2000)
    (tmp_path / "x.txt").write_bytes(data)
    (row,) = (row for shard in FileCorpus(str(tmp_path), {}).shards() for row in shard.read())
    assert row.error is not None
    assert (row.custom_id, row.line, row.error.code) == ("x.txt", 1, code)
    assert message in row.error.message


def test_pdf_and_html_are_their_text_and_what_gives_none_is_an_error_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = {
        "a.pdf": pdf(LINE),
        "b.html": f"<title>x</title><p>{LINE}</p><script>no()</script>".encode(),
        "c": pdf("By its first bytes."),
        "d.PDF": b"%PDF-1.7 and nothing of the kind",
        "e.pdf": encrypted(pdf(LINE), "secret"),
        "f.pdf": b"only called so",
        "g.docx": b"PK\x03\x04 and so on",
        "h.txt": b"plain",
    }
    for name, data in written.items():
        (tmp_path / name).write_bytes(data)
    rows = read(tmp_path)
    assert documents(rows) == {"a.pdf": LINE, "b.html": LINE, "c": "By its first bytes.", "h.txt": "plain"}
    errors_of = {row.source: (row.error.code, row.error.message) for row in rows if row.error is not None}
    assert {name: code for name, (code, _) in errors_of.items()} == {
        "d.PDF": "invalid_request",
        "e.pdf": "invalid_request",
        "f.pdf": "unsupported_media_type",
        "g.docx": "unsupported_media_type",
    }
    assert errors_of["d.PDF"][1].startswith("d.PDF cannot be read (")
    assert errors_of["e.pdf"][1] == "e.pdf is encrypted with a password; save it without one"
    assert errors_of["f.pdf"][1].startswith("f.pdf is no PDF")
    assert errors_of["g.docx"][1].startswith("g.docx is a ZIP archive")
    monkeypatch.setitem(sys.modules, "pypdf", None)
    (row,) = read(tmp_path / "a.pdf")
    assert row.error is not None
    assert re.search(r"a.pdf: reading PDF needs pypdf.*pip install .*documents", row.error.message)


@pytest.mark.slow
@pytest.mark.usefixtures("uvloop_policy")
def test_files_are_extracted_at_once_under_the_event_loops_of_rays_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "AT_ONCE", 16)
    names = [f"{number:02}.html" for number in range(16)]
    for name in names:
        (tmp_path / name).write_text(f"<p>{LINE} {name}</p>")
    for _ in range(3):
        assert documents(read(tmp_path)) == {name: f"{LINE} {name}" for name in names}


@pytest.fixture
def uvloop_policy() -> Iterator[None]:
    """That of processes that Ray starts. Two loops of uvloop must not start processes at the same time."""
    uvloop = pytest.importorskip("uvloop")
    before = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    yield
    asyncio.set_event_loop_policy(before)


@pytest.mark.slow
def test_a_file_that_takes_too_long_ends_at_its_limit(tmp_path: Path) -> None:
    (tmp_path / "a.pdf").write_bytes(laborious(3_000_000))
    corpus = FileCorpus(str(tmp_path), {}, limits=ExtractLimits(1000, 1 << 30, 1))
    (row,) = (row for shard in corpus.shards() for row in shard.read())
    assert row.error is not None
    assert row.error.message.startswith("a.pdf needs more than 1 s of processor time")


def test_names_and_folders_that_nobody_can_read_are_error_rows(corpus: Path) -> None:
    odd = os.fsdecode(b"\xff.txt")
    (corpus / odd).write_text("its name is no UTF-8")
    (corpus / "gone").symlink_to(corpus / "nowhere")
    os.mkfifo(corpus / "pipe")  # reading it would wait for ever
    failures = errors(read(corpus))
    assert failures == [("gone", 1, "file_not_found")]
    assert documents(read(corpus))[r"\xff.txt"] == "its name is no UTF-8"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_an_error_row(corpus: Path) -> None:
    (corpus / "a.txt").chmod(0)
    assert errors(read(corpus)) == [("a.txt", 1, "invalid_request")]


def vanish(path: Path) -> None:
    path.unlink()


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more\n")


@pytest.mark.parametrize(
    ("name", "change", "code"),
    [
        ("a.txt", vanish, "file_not_found"),
        ("a.txt", grow, "state_conflict"),
        ("lines.jsonl", vanish, "file_not_found"),
        ("lines.jsonl", grow, "state_conflict"),
        ("table.parquet", vanish, "file_not_found"),
    ],
)
def test_a_corpus_that_changes_while_it_is_read(
    corpus: Path, name: str, change: Callable[[Path], None], code: str
) -> None:
    """A file that vanished or changed since the start is an error row; the other files are read."""
    shards = FileCorpus(str(corpus), {}).shards()
    change(corpus / name)
    rows = [row for shard in shards for row in shard.read()]
    assert (name, code) in [(source, error_code) for source, _, error_code in errors(rows)]
    assert documents(rows).keys() >= {"deep/b.md", "g1"}


def test_a_damaged_archive_gives_what_was_read_and_an_error_row(tmp_path: Path) -> None:
    data = gzip.compress(b'{"document": "%b"}\n' % (b"x" * 1000) * 8_000)
    (tmp_path / "x.jsonl.gz").write_bytes(data[: len(data) // 2])
    rows = read(tmp_path)
    assert rows[0].spec is not None
    assert rows[-1].error is not None
    assert "cannot be read" in rows[-1].error.message or "not JSON" in rows[-1].error.message


# Parquet


def parquet(path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def test_the_columns_of_a_parquet_file_are_the_fields_of_a_creation(tmp_path: Path) -> None:
    labels = pa.array([[("kind", "b")], None, []], pa.map_(pa.string(), pa.string()))
    file = parquet(
        tmp_path / "x.parquet",
        custom_id=["a", None, "c"],
        token_ids=[[1, 2], [3], [4, 5, 6]],
        compression_ratio=[0.25, None, 0.75],
        labels=labels,
        policy=["knorm", None, None],
    )
    first, second, third = (row.spec for row in read(file, labels={"job": "n"}, policy="snapkv"))
    assert first is not None
    assert second is not None
    assert third is not None
    assert (first.token_ids, first.compression_ratio, first.policy) == ([1, 2], 0.25, "knorm")
    assert first.labels == {"job": "n", "kind": "b"}
    assert (second.compression_ratio, second.policy, second.labels) == (None, "snapkv", {"job": "n"})
    assert third.compression_ratio == 0.75


def test_bad_rows_of_a_parquet_file_are_error_rows_with_their_numbers(tmp_path: Path) -> None:
    file = parquet(tmp_path / "x.parquet", custom_id=["a", "b", "a"], document=["one", None, "three"])
    assert errors(read(file)) == [("x.parquet", 2, "invalid_request"), ("x.parquet", 3, "invalid_request")]


def test_a_value_that_python_has_nothing_for_is_its_row_s_error_alone(tmp_path: Path) -> None:
    no_text = pa.array([b"one", b"two", b"\xff", b"four", b"five"], pa.binary()).view(pa.string())
    file = parquet(
        tmp_path / "x.parquet",
        custom_id=list("abcde"),
        document=no_text,
        expires_at=pa.array([None, 2**61, None, None, None], pa.timestamp("us")),
        labels=pa.array([None, None, None, [("k", "1"), ("k", "2")], []], pa.map_(pa.string(), pa.string())),
    )
    rows = read(file)
    assert documents(rows) == {"a": "one", "e": "five"}
    problems = [(row.line, row.custom_id, row.error.code, row.error.message.split(":")[0]) for row in rows if row.error]
    assert problems == [
        (2, "b", "invalid_request", "expires_at"),
        (3, "c", "invalid_request", "document"),
        (4, "d", "invalid_request", "labels"),
    ]


def test_a_missing_column_and_a_broken_file_are_error_rows(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", text=["one"])
    (tmp_path / "b.parquet").write_bytes(b"PAR1 and then nothing")
    missing, broken = read(tmp_path)
    assert missing.error is not None
    assert "has no column document, messages or token_ids; it has text" in missing.error.message
    assert broken.error is not None
    assert (broken.source, broken.error.code) == ("b.parquet", "invalid_request")


def test_many_texts_are_cut_into_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(600):
        (tmp_path / f"{number:03}.txt").write_text(f"text {number}")
    shards = FileCorpus(str(tmp_path), {}).shards()
    assert [shard.rows for shard in shards] == [256, 256, 88]
    monkeypatch.setattr(files, "SHARD_BYTES", 100)
    assert all(shard.nbytes <= 100 for shard in FileCorpus(str(tmp_path), {}).shards())


def test_names_that_are_not_utf8_are_read_and_named(tmp_path: Path) -> None:
    """In a folder, alone, in a pattern, below a folder of such a name; as text, PDF, JSONL, compressed and Parquet."""
    top = tmp_path / "caf\udce9"
    top.mkdir()
    rows = b'{"custom_id": "%s", "document": "A row."}\n'
    written = {
        "a\udce9.txt": b"A text.",
        "b\udce9.pdf": pdf(LINE),
        "c\udce9.jsonl": rows % b"c",
        "d\udce9.jsonl.gz": gzip.compress(rows % b"d"),
    }
    for name, data in written.items():
        (top / name).write_bytes(data)
    table = io.BytesIO()
    pq.write_table(pa.table({"custom_id": ["e"], "document": ["A row."]}), table)
    (top / "e\udce9.parquet").write_bytes(table.getvalue())
    expected = {r"a\xe9.txt": "A text.", r"b\xe9.pdf": LINE, "c": "A row.", "d": "A row.", "e": "A row."}
    assert documents(read(top)) == expected
    assert documents(read(tmp_path)) == {
        f"caf\\xe9/{name}" if "." in name else name: text for name, text in expected.items()
    }
    for name in (*written, "e\udce9.parquet"):
        (row,) = read(top / name)
        assert (row.error, row.custom_id in expected) == (None, True)
    assert documents(read(top / "*.txt")) == {r"a\xe9.txt": "A text."}
    with pytest.raises(InvalidRequest, match=r"no file or folder '.*gone\\\\xe9'"):
        FileCorpus(str(tmp_path / "gone\udce9"), {})
