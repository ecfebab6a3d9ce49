"""/v1/caches/{id}/export: files of llama.cpp and mlx-lm, over HTTP, through both clients and the command line."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from kvshelf import AsyncClient, Client, CompressedCache, Engine
from kvshelf.cli import app
from kvshelf.engine.files import llamacpp
from kvshelf.engine.files.export import engine_file
from kvshelf.errors import PolicyUnsupported
from tests.service.conftest import created, refused

DOCUMENT = "The harbour master keeps the tide tables in a green book. " * 20


@pytest.mark.parametrize(("to", "policy", "codec"), [("llama.cpp", "full", "klt"), ("mlx", "keydiff", "none")])
def test_the_file_is_that_of_the_engine(
    http: httpx.Client, service_url: str, tiny_folder: Path, to: Any, policy: str, codec: str
) -> None:
    cache = created(http, document=DOCUMENT, policy=policy, codec=codec, keep_source=True)
    with Client(service_url) as client:
        file = client.caches.export(cache["id"], to, dtype="float16")
        own = CompressedCache.from_bytes(client.caches.download(cache["id"]))
    engine = Engine.load(str(tiny_folder), device="cpu")
    ids = engine.encode_document(DOCUMENT).token_ids
    wanted = engine_file(engine, own, to, dtype="float16", document=ids)
    assert len(file) == wanted.nbytes
    assert file == b"".join(wanted.pieces)

    async def fetched() -> bytes:
        async with AsyncClient(service_url) as client:
            return await client.caches.export(cache["id"], to, dtype="float16")

    assert asyncio.run(fetched()) == file
    answer = http.get(
        f"/v1/caches/{cache['id']}/export", params={"to": to, "dtype": "float16"}, headers={"range": "bytes=0-7"}
    )
    assert (answer.status_code, answer.content) == (206, file[:8])


def test_what_no_engine_holds_is_refused_and_nothing_is_written(
    http: httpx.Client, service_url: str, tmp_path: Path
) -> None:
    cache = created(http, document=DOCUMENT, policy="kvzip", compression_ratio=0.5)
    path = f"/v1/caches/{cache['id']}/export"
    refused(http.get(path, params={"to": "llama.cpp"}), 422, "policy_unsupported")
    refused(http.get(path, params={"to": "sglang"}), 400, "invalid_request")
    refused(http.get(path), 400, "invalid_request")
    refused(http.get(path, params={"to": "mlx", "dtype": "int4"}), 400, "invalid_request")
    refused(http.get(path, params={"to": "llama.cpp", "engine_model": "x"}), 400, "invalid_request")
    refused(http.get("/v1/caches/kvs_" + "0" * 40 + "/export", params={"to": "mlx"}), 404, "cache_not_found")
    with Client(service_url) as client, pytest.raises(PolicyUnsupported, match="different numbers of entries"):
        client.caches.export(cache["id"], "mlx")
    output = tmp_path / "file.bin"
    ran = CliRunner().invoke(
        app, ["export", cache["id"], "--to", "llama.cpp", "--output", str(output), "--url", service_url]
    )
    assert ran.exit_code == 2, ran.output
    assert not [*tmp_path.iterdir()]


def test_the_command_writes_it_if_the_weights_are_the_cache_s(
    http: httpx.Client, service_url: str, tmp_path: Path
) -> None:
    cache = created(http, document=DOCUMENT, policy="keydiff", compression_ratio=0.5)
    output, gguf = tmp_path / "file.bin", tmp_path / "model.gguf"
    command = ["export", cache["id"], "--to", "llama.cpp", "--output", str(output), "--url", service_url]
    gguf.write_bytes(b"GGUF")
    refusal = CliRunner().invoke(app, [*command, "--engine-model", str(gguf)])
    assert refusal.exit_code == 2, refusal.output
    assert "no GGUF file" in refusal.output.replace("\n", " ")
    assert not output.exists()
    ran = CliRunner().invoke(app, command)
    assert ran.exit_code == 0, ran.output
    assert llamacpp.about_file(output)["policy"] == "keydiff"
