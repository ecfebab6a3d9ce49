"""Which models see, and what the pixels of a file are."""

from __future__ import annotations

import base64
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image

from kvshelf.errors import InvalidRequest
from kvshelf.model.images import ImageEncoder, num_pixels, pixels, pixels_digest
from kvshelf.model.loading import load
from tests.images import OLDER, block, picture, save_image_model


def file_of(image: Image.Image, form: str = "PNG", **options: object) -> bytes:
    return base64.b64decode(block(image, form, **options)["data"])


@pytest.mark.skipif(OLDER, reason="this transformers needs torchvision to see")
def test_a_model_sees_with_a_tower_and_a_processor(tmp_path: Path) -> None:
    whole = save_image_model(tmp_path)
    model, _ = load(str(tmp_path), device="cpu", dtype="float32")
    encoder = ImageEncoder.of(model)
    assert encoder is not None
    parts = [whole.model.vision_model, whole.model.connector]
    assert encoder.nbytes == sum(tensor.nbytes for part in parts for tensor in part.state_dict().values())
    image = picture(1)
    ids = encoder.token_ids(image, "image")
    assert len(encoder.states(image, "image")) == ids.count(encoder.token_id) == 20, "four parts and the whole"
    again = load(str(tmp_path), device="cpu", dtype="float32")[0]
    assert (other := ImageEncoder.of(again)) is not None
    assert other.digest == encoder.digest
    settings = tmp_path / "preprocessor_config.json"
    settings.write_text(settings.read_text().replace('"longest_edge": 64', '"longest_edge": 96'))
    changed = ImageEncoder.of(load(str(tmp_path), device="cpu", dtype="float32")[0])
    assert changed is not None
    assert changed.digest != encoder.digest
    settings.unlink()
    assert ImageEncoder.of(load(str(tmp_path), device="cpu", dtype="float32")[0]) is None


def test_pixels_are_turned_and_lie_on_white() -> None:
    image = picture(1, 6, 4)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    turned = pixels(file_of(image, exif=exif), "image")
    assert turned.size == (4, 6)
    assert pixels_digest(turned) == pixels_digest(image.transpose(Image.Transpose.ROTATE_270))
    clear = Image.new("RGBA", (3, 2), (9, 9, 9, 0))
    assert pixels_digest(pixels(file_of(clear), "image")) == pixels_digest(Image.new("RGB", (3, 2), "white"))
    grey = Image.new("L", (3, 2), 7)
    assert pixels_digest(pixels(file_of(grey), "image")) == pixels_digest(grey.convert("RGB"))
    sizes = {pixels_digest(Image.new("RGB", size)) for size in ((2, 3), (3, 2), (6, 1), (1, 6))}
    assert len(sizes) == 4, "as many bytes"


def test_the_size_is_read_before_any_pixel() -> None:
    data = file_of(Image.new("1", (1 << 12, 1 << 12)))
    assert num_pixels(data, "image") == 1 << 24
    begun = data[:60]
    assert num_pixels(begun, "image") == 1 << 24
    with pytest.raises(InvalidRequest, match="is broken"):
        pixels(begun, "image")
    with pytest.raises(InvalidRequest, match="4097 x 4096"):
        num_pixels(file_of(Image.new("1", ((1 << 12) + 1, 1 << 12))), "image")
    (file := BytesIO()).write(b"\x89PNG\r\n\x1a\n" + bytes(30))
    with pytest.raises(InvalidRequest, match="no PNG or JPEG"):
        num_pixels(file.getvalue(), "image")
