"""Documents with images over HTTP: stored once for the same pixels, asked like any other, refused by name."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import anyio
import pytest

from kvshelf.client import Client
from kvshelf.corpus.input.extract import ExtractLimits, page_images
from kvshelf.errors import InvalidRequest, PolicyUnsupported, SourceNotKept
from tests.conftest import LiveService
from tests.images import OLDER, block, picture, png, save_image_model
from tests.service.files import pdf

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(OLDER, reason="this transformers needs torchvision to see"),
]
LIMITS = ExtractLimits(64 << 20, 1 << 30, 60.0)
TEXT = "The harbour of Brask has forty berths. The wheel is under the kettle. " * 4
DOCUMENT: list[Any] = [{"text": TEXT, "protect": True}, block(picture(1)), {"text": "The tide is on the other page."}]


@pytest.fixture(scope="module")
def running(
    start_service: Callable[..., AbstractContextManager[LiveService]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveService]:
    folder = tmp_path_factory.mktemp("sees")
    save_image_model(folder)
    with start_service(tmp_path_factory.mktemp("service"), folder) as service:
        yield service


@pytest.fixture(scope="module")
def client(running: LiveService) -> Iterator[Client]:
    with Client(running.url) as opened:
        yield opened


def test_the_same_pixels_are_one_cache_that_answers(client: Client) -> None:
    first = client.caches.create(document=DOCUMENT)
    again = client.caches.create(document=[DOCUMENT[0], block(picture(1), compress_level=0), DOCUMENT[2]])
    other = client.caches.create(document=[DOCUMENT[0], block(picture(2)), DOCUMENT[2]])
    assert (again.id, again.existing) == (first.id, True)
    assert other.id != first.id
    assert other.document_id != first.document_id
    assert first.tokens.protected > 0
    assert first.quality is not None
    for cache in (first, other):
        answer = client.caches.query(cache.id, prompt="Where is the wheel?", max_tokens=4)
        assert answer.usage.cache_read_tokens == cache.tokens.document
    longer = client.caches.append(first.id, document=" The mill is by the weir.")
    assert client.caches.query(longer.id, prompt="Where is the mill?", max_tokens=2).text is not None
    removed = client.caches.create(document=DOCUMENT, policy="keydiff", compression_ratio=0.3)
    assert removed.tokens.kept < removed.tokens.document
    chosen = client.caches.create(document=DOCUMENT, policy="auto")
    assert client.caches.query(chosen.id, prompt="Where is the wheel?", max_tokens=2).text is not None
    assert client.estimate(document=DOCUMENT).tokens == first.tokens.document


def test_a_request_in_the_background_keeps_its_images(client: Client) -> None:
    request = client.caches.create(document=[{"text": TEXT}, block(picture(3))], respond_async=True)
    done = client.requests.retrieve(request.id, wait_s=60)
    direct = client.caches.create(document=[{"text": TEXT}, block(picture(3), optimize=True)])
    assert direct.existing
    assert done.cache_id == direct.id


@pytest.mark.parametrize(
    ("document", "more", "param", "error"),
    [
        ([{"text": "a"}, {"type": "image", "data": "QUJD"}], {}, "images[0]", InvalidRequest),
        ([{"type": "image", "data": "?"}], {}, "images[0].data", InvalidRequest),
        ([{"type": "image", "url": "http://127.0.0.1/a.png"}], {}, "document[0]", InvalidRequest),
        (DOCUMENT, {"policy": "kvzip", "compression_ratio": 0.3}, "policy", PolicyUnsupported),
        (DOCUMENT, {"keep_source": True}, "keep_source", InvalidRequest),
    ],
    ids=["no image", "no base64", "an address", "a policy", "a source"],
)
def test_it_is_refused_by_name(
    client: Client, document: Any, more: dict[str, Any], param: str, error: type[Exception]
) -> None:
    with pytest.raises(error) as refusal:
        client.caches.create(document=document, **more)
    assert refusal.value.param == param  # type: ignore[attr-defined]


def test_a_bomb_is_refused_by_its_size(client: Client) -> None:
    data = base64.b64encode(png((1 << 15, 1 << 15))).decode()
    with pytest.raises(InvalidRequest, match="1073741824 pixels") as refusal:
        client.caches.create(document=[{"type": "image", "data": data}])
    assert refusal.value.param == "images[0]"


def test_kept_tokens_need_a_source(client: Client) -> None:
    cache = client.caches.create(document=DOCUMENT)
    with pytest.raises(SourceNotKept):
        client.caches.kept(cache.id)


def test_the_command_puts_images_behind_a_text(client: Client, running: LiveService, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "a.png").write_bytes(base64.b64decode(block(picture(4))["data"]))
    command = [sys.executable, "-m", "kvshelf", "put", "a.txt", "--image", "a.png", "--json", "--url", running.url]
    put = subprocess.run(command, cwd=tmp_path, env={**os.environ}, capture_output=True, text=True, check=False)
    assert put.returncode == 0, put.stderr
    made = client.caches.create(document=[{"text": TEXT}, block(picture(4))])
    assert json.loads(put.stdout)["id"] == made.id
    command[6] = "gone.png"
    gone = subprocess.run(command, cwd=tmp_path, env={**os.environ}, capture_output=True, text=True, check=False)
    assert gone.returncode == 2
    assert "gone.png" in gone.stdout + gone.stderr


def test_the_command_puts_the_pages_of_a_pdf(client: Client, running: LiveService, tmp_path: Path) -> None:
    pytest.importorskip("pypdfium2", reason="the extra pages")
    (tmp_path / "report.pdf").write_bytes(pdf("The wheel is under the kettle.", "The tide is on the other page."))
    command = [sys.executable, "-m", "kvshelf", "put", "report.pdf", "--pages-as-images", "--dpi", "40", "--json"]
    put = subprocess.run([*command, "--url", running.url], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert put.returncode == 0, put.stderr
    made = json.loads(put.stdout)
    pages = anyio.run(page_images, (tmp_path / "report.pdf").read_bytes(), LIMITS, "report.pdf", 40)
    assert made["id"] == client.caches.create(document=[{"type": "image", "data": page} for page in pages]).id
    assert made["name"] == "report.pdf"
    (tmp_path / "report.pdf").write_text("no PDF")
    put = subprocess.run([*command, "--url", running.url], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (put.returncode, "report.pdf is no PDF" in put.stderr + put.stdout) == (2, True)


@pytest.mark.slow
def test_a_conversation_about_images_goes_on_after_a_restart(
    start_service: Callable[..., AbstractContextManager[LiveService]], tmp_path: Path
) -> None:
    """Its slot is the cache of the turn: with the images, which nobody sends or encodes again."""
    save_image_model(tmp_path / "model")
    with start_service(tmp_path, tmp_path / "model") as service, Client(service.url) as client:
        document = client.caches.create(document=DOCUMENT)
        turn = client.caches.query(document.id, prompt="Where is the wheel?", max_tokens=4, store=True)
        assert turn.stored_cache_id is not None
        before = client.caches.query(turn.stored_cache_id, prompt="And the tide?", max_tokens=8)
        other = client.caches.create(document=[DOCUMENT[0], block(picture(2)), DOCUMENT[2]])
    with start_service(tmp_path, tmp_path / "model") as service, Client(service.url) as client:
        after = client.caches.query(turn.stored_cache_id, prompt="And the tide?", max_tokens=8)
        assert (after.text, after.usage) == (before.text, before.usage)
        assert after.usage.cache_read_tokens > document.tokens.document
        assert after.usage.prefill_tokens < 30, "the question alone"
        for at, cache in ((1, document), (2, other)):  # each image has its own
            again = client.caches.create(document=[DOCUMENT[0], block(picture(at)), DOCUMENT[2]])
            assert (again.id, again.existing) == (cache.id, True)
