"""Which models see, and what the pixels of a file are."""

from __future__ import annotations

import base64
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image
from safetensors.torch import load_file, save_file

from kvshelf.errors import InvalidRequest
from kvshelf.model.images import ImageEncoder, pixels, pixels_digest, size_of
from kvshelf.model.loading import load
from tests.images import OLDER, block, picture, png, processor, save_image_model


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
    ids = encoder.token_ids(image.size, "image")
    assert (
        len(encoder.states(encoder.scaled(file_of(image), ids, "image"), "image")) == ids.count(encoder.token_id) == 20
    ), "four parts and the whole"
    again = load(str(tmp_path), device="cpu", dtype="float32")[0]
    assert (other := ImageEncoder.of(again)) is not None
    assert other.digest == encoder.digest
    settings = tmp_path / "preprocessor_config.json"
    settings.write_text(settings.read_text().replace('"longest_edge": 64', '"longest_edge": 96'))
    changed = ImageEncoder.of(load(str(tmp_path), device="cpu", dtype="float32")[0])
    assert changed is not None
    assert changed.digest != encoder.digest
    read = settings.read_text()
    for wrong in (
        read.replace("SmolVLMImageProcessor", "CLIPImageProcessor"),
        read.replace('"longest_edge": 96', '"longest_edge": 90'),
        read.replace('"do_pad": true', '"do_pad": false'),
    ):
        assert wrong != read
        settings.write_text(wrong)
        assert ImageEncoder.of(load(str(tmp_path), device="cpu", dtype="float32")[0]) is None
    settings.unlink()
    assert ImageEncoder.of(load(str(tmp_path), device="cpu", dtype="float32")[0]) is None


@pytest.mark.skipif(OLDER, reason="this transformers needs torchvision to see")
@pytest.mark.parametrize("part", ["vision_model.embeddings", "connector"])
def test_a_model_without_weights_of_its_tower_is_one_of_text(
    tmp_path: Path, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    save_image_model(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if part not in name}
    assert 0 < len(tensors) < len(load_file(file))
    save_file(tensors, file, {"format": "pt"})
    assert ImageEncoder.of(load(str(tmp_path), device="cpu", dtype="float32")[0]) is None
    assert f"not all is there that {tmp_path} needs to see" in caplog.text


@pytest.mark.skipif(OLDER, reason="this transformers needs torchvision to see")
@pytest.mark.parametrize("split", [True, False])
def test_the_tokens_of_a_size_are_those_of_its_image(tmp_path: Path, split: bool) -> None:
    save_image_model(tmp_path, split=split)
    encoder = ImageEncoder.of(load(str(tmp_path), device="cpu", dtype="float32")[0])
    assert encoder is not None
    own = processor(tmp_path)
    for size in ((1, 1), (1, 500), (500, 1), (33, 32), (32, 33), (64, 65), (200, 7), (121, 90), (90, 121), (3, 200)):
        inputs = own(text="<image>", images=[Image.new("RGB", size)], return_tensors="pt", add_special_tokens=False)
        assert encoder.token_ids(size, "image") == inputs["input_ids"][0].tolist(), size


def test_colours_of_sixteen_bits_are_refused() -> None:
    assert pixels(png((1, 1)), "image").getpixel((0, 0)) == (0, 0, 0)
    for read in (size_of, pixels):
        with pytest.raises(InvalidRequest, match="at most 8 bits"):
            read(png((1, 1), 16), "image")


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
    assert size_of(data, "image") == (1 << 12, 1 << 12)
    begun = data[:60]
    assert size_of(begun, "image") == (1 << 12, 1 << 12)
    with pytest.raises(InvalidRequest, match="is broken"):
        pixels(begun, "image")
    (file := BytesIO()).write(b"\x89PNG\r\n\x1a\n" + bytes(30))
    with pytest.raises(InvalidRequest, match="no PNG or JPEG"):
        size_of(file.getvalue(), "image")
