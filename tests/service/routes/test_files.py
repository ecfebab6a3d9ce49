"""/v1/files: what goes in comes out, streamed, and never half."""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

from tests.service.conftest import refused

if TYPE_CHECKING:
    from tests.conftest import LiveService

ROWS = b'{"custom_id": "a", "document": "one"}\n{"custom_id": "b", "document": "two"}\n'


def upload(http: httpx.Client, data: bytes = ROWS, name: str = "rows.jsonl", **fields: Any) -> httpx.Response:
    return http.post("/v1/files", files={"file": (name, data)}, data={"purpose": "batch"} | fields)


def uploaded(http: httpx.Client, data: bytes = ROWS, **fields: Any) -> dict[str, Any]:
    response = upload(http, data, **fields)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def test_a_file_comes_back_as_it_went_in(http: httpx.Client) -> None:
    data = secrets.token_bytes(700_000)
    file = uploaded(http, data, **{"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"})
    assert (file["object"], file["bytes"], file["purpose"]) == ("file", len(data), "batch")
    assert (file["filename"], file["status"]) == ("rows.jsonl", "processed")
    assert file["expires_at"] == pytest.approx(time.time() + 3600, abs=60)
    assert http.get(f"/v1/files/{file['id']}").json() == file
    content = http.get(f"/v1/files/{file['id']}/content")
    assert (content.content, content.headers["etag"]) == (data, f'"{file["digest"]}"')
    for asked, status, start, end in (("bytes=10-19", 206, 10, 20), ("bytes=-5", 206, len(data) - 5, len(data))):
        part = http.get(f"/v1/files/{file['id']}/content", headers={"range": asked})
        assert (part.status_code, part.content) == (status, data[start:end])
    beyond = http.get(f"/v1/files/{file['id']}/content", headers={"range": f"bytes={len(data)}-"})
    refused(beyond, 416, "invalid_request")
    long = http.get(f"/v1/files/{file['id']}/content", headers={"range": f"bytes={'9' * 5000}-"})
    refused(long, 416, "invalid_request")
    same = http.get(f"/v1/files/{file['id']}/content", headers={"if-none-match": content.headers["etag"]})
    assert same.status_code == 304
    assert http.delete(f"/v1/files/{file['id']}").json() == {"id": file["id"], "object": "file", "deleted": True}
    for gone in (http.get, http.delete):
        refused(gone(f"/v1/files/{file['id']}"), 404, "file_not_found")
    refused(http.get(f"/v1/files/{file['id']}/content"), 404, "file_not_found")


def test_an_empty_file_is_a_file(http: httpx.Client) -> None:
    file = uploaded(http, b"")
    assert http.get(f"/v1/files/{file['id']}/content").content == b""
    http.delete(f"/v1/files/{file['id']}")


def test_pages_of_files(http: httpx.Client) -> None:
    files = [uploaded(http, b"%d" % number) for number in range(5)]
    newest = [file["id"] for file in reversed(files)]
    page = http.get("/v1/files", params={"limit": 3, "purpose": "batch"}).json()
    assert ([file["id"] for file in page["data"]], page["has_more"]) == (newest[:3], True)
    assert (page["first_id"], page["last_id"]) == (newest[0], newest[2])
    rest = http.get("/v1/files", params={"limit": 2, "after": page["last_id"]}).json()
    assert [file["id"] for file in rest["data"]] == newest[3:]
    assert http.get("/v1/files", params={"purpose": "nothing"}).json()["data"] == []
    refused(http.get("/v1/files", params={"after": "file_0"}), 400, "invalid_request")
    refused(http.get("/v1/files", params={"limit": 0}), 400, "invalid_request")
    for file_id in newest:
        http.delete(f"/v1/files/{file_id}")


@pytest.mark.parametrize(
    ("files", "fields", "param"),
    [
        ({}, {"purpose": "batch"}, "file"),
        ({"file": ("x", b"x")}, {}, "purpose"),
        ({"file": ("x", b"x")}, {"purpose": "fine-tune"}, "purpose"),
        ({"file": ("x", b"x")}, {"purpose": "batch", "colour": "red"}, "colour"),
        ({"file": ("x", b"x")}, {"purpose": "batch", "expires_after[seconds]": "0"}, "expires_after.seconds"),
        ({"file": ("x", b"x")}, {"purpose": "batch", "expires_after[seconds]": "soon"}, "expires_after.seconds"),
        ({"file": ("x", b"x")}, {"purpose": "batch", "expires_after[anchor]": "now"}, "expires_after.anchor"),
        ({"file": ("x", b"x")}, {"purpose": "batch", "expires_after": "3600"}, "expires_after"),
    ],
)
def test_bad_forms_are_refused_by_name(
    http: httpx.Client, files: dict[str, Any], fields: dict[str, str], param: str
) -> None:
    before = http.get("/v1/files").json()["data"]
    form = [(name, (None, value)) for name, value in fields.items()] + list(files.items())
    error = refused(http.post("/v1/files", files=form), 400, "invalid_request")
    assert error["param"] == param
    assert http.get("/v1/files").json()["data"] == before


def test_other_bodies_are_refused(http: httpx.Client) -> None:
    refused(http.post("/v1/files", json={"purpose": "batch"}), 415, "unsupported_media_type")
    two = [("file", ("a", b"x")), ("file", ("b", b"y")), ("purpose", (None, "batch"))]
    refused(http.post("/v1/files", files=two), 400, "invalid_request")
    broken = {"content-type": "multipart/form-data; boundary=x"}
    refused(http.post("/v1/files", content=b"--x\r\nnonsense", headers=broken), 400, "invalid_request")


def test_a_file_beyond_the_cap_is_cut_off_and_nothing_stays(http: httpx.Client, service: LiveService) -> None:
    """The cap of these services is 8 MiB. What is announced and what only goes on are refused both."""
    before = http.get("/v1/files").json()["data"]
    refused(upload(http, bytes(9 << 20)), 413, "body_too_large")

    def endless() -> Any:
        yield b'--x\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n'
        for _ in range(20):
            yield bytes(1 << 20)

    headers = {"content-type": "multipart/form-data; boundary=x"}
    try:
        response = http.post("/v1/files", content=endless(), headers=headers)
    except httpx.WriteError:
        pass  # it was refused while it was sent
    else:
        refused(response, 413, "body_too_large")
    assert http.get("/v1/files").json()["data"] == before
    assert service.process.poll() is None


def test_names_of_files_are_only_names(http: httpx.Client) -> None:
    for name in ("../../etc/passwd", "naïve 漢字.jsonl", "x" * 3000, "a\\b", "<img onerror=x>"):
        file = uploaded(http, b"{}", name=name) if "\n" not in name else {}
        assert len(file["filename"]) <= 255
        assert http.get(f"/v1/files/{file['id']}").json()["filename"] == file["filename"]
        http.delete(f"/v1/files/{file['id']}")


def test_memory_stays_flat_while_files_come_and_go(http: httpx.Client, service: LiveService, soak: bool) -> None:
    """The service never holds a file: its memory grows by less than one of them while many pass through."""
    data = os.urandom(7 << 20)

    def once() -> None:
        file = uploaded(http, data)
        assert http.get(f"/v1/files/{file['id']}/content").content == data
        http.delete(f"/v1/files/{file['id']}")

    for _ in range(3):
        once()
    before = private_bytes(service.front_end_pid())
    for _ in range(40 if soak else 6):
        once()
    assert private_bytes(service.front_end_pid()) - before < len(data)


def private_bytes(pid: int) -> int:
    """Memory that the process has for itself, its children included; pages of files do not count."""
    found = 0
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Private_Dirty:"):
            found += int(line.split()[1]) * 1024
    return found


def test_openai_s_client_uploads_lists_reads_and_deletes(service_url: str) -> None:
    with openai.OpenAI(base_url=f"{service_url}/v1", api_key="anything", max_retries=0) as client:
        file = client.files.create(
            file=("rows.jsonl", ROWS), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
        )
        assert (file.purpose, file.bytes, file.status, file.filename) == ("batch", len(ROWS), "processed", "rows.jsonl")
        assert file.expires_at == file.created_at + 3600
        assert client.files.content(file.id).read() == ROWS
        assert client.files.retrieve(file.id) == file
        assert file.id in [each.id for each in client.files.list(purpose="batch", limit=100)]
        assert client.files.delete(file.id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(file.id)
