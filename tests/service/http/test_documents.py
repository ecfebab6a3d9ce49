"""PDF and HTML as documents: their text is what counts, and hostile files end where they are read."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from kvshelf import Client, open_store
from kvshelf.corpus.input import expendable
from kvshelf.corpus.input.extract import Upload
from kvshelf.errors import BodyTooLarge, InvalidRequest, KvshelfError, UnsupportedMediaType
from kvshelf.service.http.parsing import Extractor
from kvshelf.service.settings import Settings
from tests.amounts import amount
from tests.conftest import _children
from tests.service import files
from tests.service.conftest import created, refused
from tests.service.files import LINE
from tests.service.http.test_raw_input import memory_mib

if TYPE_CHECKING:
    from tests.conftest import LiveService

PAGE = f"""<!doctype html><html><head><title>Lock</title><style>p {{color: red}}</style>
<script>document.write("never")</script></head><body><h1>The lock</h1><p>{LINE} Caf&eacute;.</p>
<ul><li>one<li>two</ul>
<p style="color:red; display:none">hidden</p><div hidden>too</div><!-- a comment --></body></html>"""


def put(http: httpx.Client, name: str, data: bytes, media_type: str, **fields: str) -> httpx.Response:
    return http.post("/v1/caches", files={"file": (name, data, media_type)}, data=fields)


def taken(http: httpx.Client, service: LiveService, name: str, data: bytes, media_type: str) -> str:
    """What the service takes for the text of a file."""
    response = put(http, name, data, media_type, policy="full", keep_source="true")
    assert response.status_code in (200, 201), response.text
    with open_store(f"disk://{service.home}/shelf") as store:
        return store.source(response.json()["id"])


# What is taken


@pytest.mark.parametrize("quality", ["full", "fast", "false"])
def test_a_form_says_how_quality_is_measured(http: httpx.Client, quality: str) -> None:
    made = put(http, "lock.txt", (f"{quality} {LINE} " * 20).encode(), "text/plain", policy="lagkv", quality=quality)
    assert made.status_code == 201, made.text
    assert (made.json()["quality"] is None) == (quality == "false")
    error = refused(put(http, "lock.txt", LINE.encode(), "text/plain", quality="deep"), 400, "invalid_request")
    assert error["param"] == "quality"


@pytest.mark.parametrize("media_type", ["application/pdf", "application/octet-stream", "Application/PDF; x=y"])
def test_a_pdf_is_its_text(http: httpx.Client, service: LiveService, media_type: str) -> None:
    data = files.pdf(LINE, "A second page (short).")
    assert taken(http, service, "lock.pdf", data, media_type) == f"{LINE}\n\nA second page (short)."


def test_a_pdf_that_anybody_may_read_is_read(http: httpx.Client, service: LiveService) -> None:
    assert taken(http, service, "lock.pdf", files.encrypted(files.pdf(LINE), ""), "application/pdf") == LINE


@pytest.mark.parametrize("media_type", ["text/html", "application/xhtml+xml", "", "text/html; charset=utf-8"])
def test_html_is_what_a_reader_sees(http: httpx.Client, service: LiveService, media_type: str) -> None:
    text = taken(http, service, "lock", PAGE.encode(), media_type or "application/octet-stream")
    assert text == f"The lock\n\n{LINE} Café.\n\n  • one\n  • two"


@pytest.mark.parametrize(
    ("data", "media_type"),
    [
        ("<p>Zwölf Boxkämpfer</p>".encode("latin-1"), "text/html; charset=iso-8859-1"),
        ('<meta charset="windows-1252"><p>Zwölf Boxkämpfer</p>'.encode("cp1252"), "text/html"),
        ("\ufeff<html><p>Zwölf Boxkämpfer</p>".encode(), "application/octet-stream"),
        ("<p>Zwölf Boxkämpfer</p>".encode(), "text/html; charset=no-such-thing"),
        ("<p>Zwölf Boxkämpfer</p>".encode(), 'text/html; charset="-c; $(x) ../é"'),
        ("<p>Zwölf Boxkämpfer</p>".encode(), "text/html; charset=" + "a" * 2000),
    ],
)
def test_html_has_its_own_encoding(http: httpx.Client, service: LiveService, data: bytes, media_type: str) -> None:
    assert taken(http, service, "lock.html", data, media_type) == "Zwölf Boxkämpfer"


@pytest.mark.parametrize(
    ("media_type", "begin", "kind"),
    [
        ("application/pdf", b"%PDF-1.7", "pdf"),
        ("", b"%PDF-1.7\n1 0 obj", "pdf"),
        ("", b"%PDF-1.7\n%\xe2\xe3\xcf\xd3", "pdf"),
        ("text/html", b"no tags at all", "html"),
        ("", b"\xef\xbb\xbf \n<!DOCTYPE HTML>", "html"),
        ("", b"plain words", "text"),
        ("text/plain", b"<html>", "text"),
        ("text/markdown", b"# Title", "text"),
        ("application/ld+json", b"{}", "text"),
        ("application/json", b"{}", "text"),
        ("application/pdf", b"no PDF", None),
        ("text/plain", b"%PDF-1.7\n1 0 obj", None),
        ("text/html", b"%PDF-1.7\n1 0 obj", None),
        ("text/plain", b"%PDF- is how such a file begins.\nIts objects follow", "text"),
        ("", b"%PDF- is how such a file begins", "text"),
        ("text/plain", b"GIF89a has 256 colours", "text"),
        ("", b"GIF89a\x01\x00\x01\x00", None),
        ("text/plain", "BZhang's gr\u00f6\u00dfte notes".encode(), "text"),
        ("text/plain", b"BZh91AY&SY\x86\xb5", None),
        ("text/plain", b"PK\x03\x04", None),
        ("application/octet-stream", b"\x89PNG\r\n", None),
        ("application/vnd.openxmlformats-officedocument.wordprocessingml.document", b"PK\x03\x04", None),
        ("image/svg+xml", b"<svg>", None),
        ("audio/mpeg", b"ID3", None),
        ("", b"{\\rtf1\\ansi", None),
        ("", b"{\\rtf is how rich text begins", "text"),
    ],
)
def test_a_file_is_what_it_is_called_and_how_it_begins(media_type: str, begin: bytes, kind: str | None) -> None:
    upload = Upload(begin + b" and more", media_type)
    if kind is None:
        with pytest.raises(UnsupportedMediaType, match="send UTF-8 text, PDF or HTML"):
            _ = upload.kind
    else:
        assert upload.kind == kind


# What is refused


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (lambda: files.encrypted(files.pdf(LINE), "secret"), "encrypted"),
        (lambda: files.pdf_of([b""]), "empty"),
        (lambda: b"%PDF-1.7 and nothing of the kind", "malformed"),
        (lambda: files.pdf(LINE)[:300], "malformed"),
        (files.own_ancestor, "malformed"),
        (files.bomb, "expands"),
        (files.nested_bomb, "empty"),
    ],
    ids=["encrypted", "scanned", "garbage", "cut off", "its own ancestor", "bomb", "nested bomb"],
)
def test_pdfs_that_give_no_text(
    http: httpx.Client, service: LiveService, data: Callable[[], bytes], reason: str
) -> None:
    before, started = memory_mib(service), time.monotonic()
    error = refused(put(http, "a.pdf", data(), "application/pdf"), 400, "invalid_request")
    assert (error["param"], error["details"]) == ("file", {"reason": reason})
    assert error["message"].startswith("file: this PDF ")
    assert time.monotonic() - started < 60
    assert memory_mib(service) - before < 64


def test_a_table_of_objects_without_end_is_read_once(http: httpx.Client, service: LiveService) -> None:
    assert taken(http, service, "a.pdf", files.endless_tables(), "application/pdf") == LINE


def test_html_without_text(http: httpx.Client) -> None:
    error = refused(put(http, "a.html", b"<html><script>1</script>", "text/html"), 400, "invalid_request")
    assert error["details"] == {"reason": "empty"}


def test_entities_of_other_files_are_no_text(http: httpx.Client, service: LiveService) -> None:
    lines = "".join(f'<!ENTITY e{n} "{f"&e{n - 1};" * 10}">' for n in range(1, 10))
    page = f"""<?xml version="1.0"?><!DOCTYPE html [<!ENTITY x SYSTEM "file:///etc/passwd"><!ENTITY e0 "ha">{lines}]>
<html xmlns="http://www.w3.org/1999/xhtml"><body><p>{LINE}</p><p>&x;</p><p>&e9;</p></body></html>"""
    text = taken(http, service, "a.xhtml", page.encode(), "application/xhtml+xml")
    assert LINE in text
    assert "root:" not in text
    assert text.count("ha") < 99


def test_text_beyond_the_cap_of_a_body(http: httpx.Client) -> None:
    words = files.deflated(b" ".join(files.page_content("many words " * 100) for _ in range(1000)))
    data = files.pdf_of([words], filters="/Filter /FlateDecode")
    assert len(data) < 100_000
    error = refused(put(http, "a.pdf", data, "application/pdf"), 413, "body_too_large")
    assert error["details"] == {"max_body_bytes": 1 << 20}


def test_other_fields_are_checked_before_the_file_is_read(http: httpx.Client) -> None:
    response = put(http, "a.pdf", b"%PDF-1.7 and nothing", "application/pdf", compression_ratio="2")
    assert refused(response, 400, "invalid_request")["param"] == "compression_ratio"


@pytest.mark.parametrize("media_type", ["application/zip", "image/png", "application/pdf", "a" * 300])
def test_types_that_are_not_taken(http: httpx.Client, media_type: str) -> None:
    error = refused(put(http, "a", b"neither nor", media_type), 415, "unsupported_media_type")
    assert error["param"] == "file"
    assert len(error["message"]) < 400


# The process that reads


def text_of(data: bytes, kind: Any = "pdf", **settings: Any) -> str:
    return asyncio.run(Extractor(Settings(**settings)).text(Upload(data), kind, "me"))


@pytest.mark.parametrize(("kind", "library"), [("pdf", "pypdf"), ("html", "resiliparse")])
def test_without_the_extra(monkeypatch: pytest.MonkeyPatch, kind: str, library: str) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UnsupportedMediaType, match="Install the extra documents of kvshelf there"):
        text_of(files.pdf(LINE), kind)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "kind", "settings", "reason"),
    [
        (lambda: files.laborious(3_000_000), "pdf", {"extract_cpu_s": 1}, "time"),
        (lambda: b"<div>" * 4_000_000 + b"deep", "html", {"extract_memory_bytes": 256 << 20}, "memory"),
    ],
    ids=["time", "memory"],
)
def test_reading_has_its_bounds(data: Callable[[], bytes], kind: str, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        text_of(data(), kind, **settings)
    assert refusal.value.details == {"reason": reason}
    (setting,) = settings
    assert setting in refusal.value.message


@pytest.mark.parametrize(("tag", "end"), [("<div>", ""), ("<b><p>", ""), ("<table><tr><td>", ""), ("<!--", "-->")])
def test_tags_within_tags_without_end(tag: str, end: str) -> None:
    count = (
        amount(200_000, 1_000_000) if tag == "<div>" else amount(20_000, 100_000)
    )  # the others cost a browser's parser more than time in proportion
    assert text_of((tag * count + end + f"<p>{LINE}</p>").encode(), "html") == LINE


def test_what_is_no_character_does_not_get_through() -> None:
    page = b"<p>a\0b &#xd800; c</p>"
    assert not {"\0", "\ud800"} & set(text_of(page, "html"))


def ran(program: str, data: bytes = b"", most: int = 1000) -> tuple[int, bytes]:
    return asyncio.run(expendable.run([sys.executable, "-c", program], data, most))


def test_a_reader_that_crashes_hangs_or_floods_is_one_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    code, _ = ran("import os; os.abort()")
    assert expendable.ended_by(code) == "crashed"
    code, said = ran("while True: print('x' * 100_000)")
    assert code < 0
    assert len(said) < 4 << 20
    assert ran("print('deaf')", data=b"x" * (8 << 20)) == (0, b"deaf\n"), "it need not read what it is given"
    monkeypatch.setenv("KVSHELF_API_KEY", "kvsk_secret")
    monkeypatch.setenv("AWS_SECRET", "secret")
    assert b"secret" not in ran("import os; print(os.environ)")[1]


def test_a_reader_that_dies_slowly_while_it_floods_is_one_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full `StreamReader` stops reading the pipe, and `wait()` waits for the end of the output."""
    kill = asyncio.subprocess.Process.kill

    def late(process: asyncio.subprocess.Process) -> None:
        asyncio.get_running_loop().call_later(0.3, kill, process)

    async def flood() -> tuple[int, bytes]:
        command = [sys.executable, "-c", "while True: print('x' * 100_000)"]
        return await asyncio.wait_for(expendable.run(command, b"", 1000), 10)

    monkeypatch.setattr(asyncio.subprocess.Process, "kill", late)
    code, said = asyncio.run(flood())
    assert code < 0
    assert len(said) < 4 << 20


def test_who_does_not_wait_leaves_no_process() -> None:
    async def give_up() -> None:
        async with asyncio.timeout(1.5):
            await expendable.run([sys.executable, "-c", "import time; time.sleep(3600)"], b"", 10)

    with pytest.raises(TimeoutError):
        asyncio.run(give_up())
    assert not [pid for pid in _children(os.getpid()) if b"3600" in cmdline(pid)]


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize(
    ("data", "what"), [(b"a\0b", "zero bytes"), (b" \n\t", "is empty"), ("größe".encode("utf-16"), "UTF-8")]
)
def test_a_file_that_no_batch_takes_is_refused_here_too(http: httpx.Client, data: bytes, what: str) -> None:
    error = refused(put(http, "a.txt", data, "text/plain"), 400, "invalid_request")
    assert error["param"] == "file"
    assert what in error["message"]


# The clients


def test_the_client_and_the_command_line_take_files(service_url: str, http: httpx.Client, tmp_path: Path) -> None:
    (tmp_path / "lock.pdf").write_bytes(files.pdf(LINE))
    (tmp_path / "lock.HTM").write_text(f"<p>{LINE}</p>")
    (tmp_path / "lock.txt").write_text(LINE)
    (tmp_path / "lock.docx").write_bytes(b"PK\x03\x04 and so on")
    with Client(service_url) as client:
        made = [client.caches.create(file=tmp_path / f"lock.{kind}", policy="full") for kind in ("pdf", "HTM", "txt")]
        assert {cache.document_id for cache in made} == {created(http, document=LINE, policy="full")["document_id"]}
        with pytest.raises(UnsupportedMediaType, match="ZIP archive"):
            client.caches.create(file=tmp_path / "lock.docx")
    (tmp_path / "marked.txt").write_bytes(b"\xef\xbb\xbf" + LINE.encode())
    command = [sys.executable, "-m", "kvshelf", "put", "--policy", "full", "--url", service_url]
    given = subprocess.run(
        [*command, "-"], input=(tmp_path / "marked.txt").read_bytes(), capture_output=True, timeout=120
    )
    with Client(service_url) as client:
        marked = client.caches.create(file=tmp_path / "marked.txt", policy="full")
    assert {marked.id, given.stdout.decode().strip()} == {made[0].id}, "a byte order mark is no part of the document"
    paths = [str(tmp_path / name) for name in ("lock.pdf", "lock.docx", "lock.HTM")]
    done = subprocess.run([*command, *paths], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert done.stdout.split() == [made[0].id, made[0].id]
    assert "ZIP archive" in done.stderr.replace("\n", " ")


@pytest.mark.slow
def test_errors_of_files_are_of_our_tree() -> None:
    for data, kind, error in ((b"", "pdf", InvalidRequest), (b"", "html", InvalidRequest)):
        with pytest.raises(error):
            text_of(data, kind)
    with pytest.raises(BodyTooLarge) as refusal:
        text_of(b"<p>" + b"word " * 1000, "html", max_body_bytes=1024)
    assert isinstance(refusal.value, KvshelfError)
