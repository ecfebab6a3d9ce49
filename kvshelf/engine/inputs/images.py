"""A document with images: their tokens among those of its text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from kvshelf.api.options import MAX_IMAGE_PIXELS, MAX_PIXELS, ImagePart
from kvshelf.artifact.identity import Layout
from kvshelf.errors import InvalidRequest, PolicyUnsupported
from kvshelf.model.images import FAMILIES, ImageEncoder, PlacedImage, pixels, pixels_digest, size_of
from kvshelf.model.text import EncodedDocument, TemplateOptions, TextFormat
from kvshelf.model.tokens import Place

Span = tuple[int, int]


def require_encoder(encoder: ImageEncoder | None, name: str) -> ImageEncoder:
    """Raises `PolicyUnsupported` where the engine reads no images. name: the model's."""
    if encoder is None:
        raise PolicyUnsupported(
            f"{name!r} takes no images here: kvshelf takes them for models of the types {' and '.join(FAMILIES)}, "
            "loaded by one process from a folder with an image processor, with Pillow (the extra images) and "
            "transformers 5.24; send their text",
            param="images",
        )
    return encoder


def files_of(images: Sequence[ImagePart]) -> list[bytes]:
    """Raises `InvalidRequest` about an image, by its number."""
    return [image.file(f"images[{number}]") for number, image in enumerate(images)]


def fewest_tokens(encoder: ImageEncoder, files: Sequence[bytes]) -> int:
    """Fewest tokens of the images of a document, by their headers: each image may be turned, as its EXIF says. Raises
    `InvalidRequest` about an image, by its number, or about too many pixels."""
    sizes = [size_of(data, f"images[{number}]") for number, data in enumerate(files)]
    for number, (width, height) in enumerate(sizes):
        if width * height > MAX_IMAGE_PIXELS:
            raise InvalidRequest(
                f"images[{number}]: the image has {width} x {height} pixels, and {MAX_IMAGE_PIXELS} are taken; make it "
                "smaller",
                param=f"images[{number}]",
            )
    if (total := sum(width * height for width, height in sizes)) > MAX_PIXELS:
        raise InvalidRequest(
            f"the images have {total} pixels together, and {MAX_PIXELS} are taken; make them smaller", param="images"
        )
    return sum(
        min(len(encoder.token_ids(turned, f"images[{number}]")) for turned in (size, size[::-1]))
        for number, size in enumerate(sizes)
    )


def with_images(
    form: TextFormat,
    encoder: ImageEncoder,
    text: str,
    images: Sequence[ImagePart],
    layout: Layout,
    options: TemplateOptions,
    require_length: Callable[..., None],
) -> tuple[EncodedDocument, list[Span]]:
    """A text with images at their places, and the characters of the text in each token behind the template's, as of
    `TextFormat.spans`; tokens of an image have none. require_length: raises for too many tokens; its second argument
    stands before the number in the message.

    The text behind an image is tokenized apart from the text before it, as transformers does: special tokens stand
    around an image. Raises `InvalidRequest` about an image, by its number.
    """
    ends = [image.at for image in images]
    for number, (before, at) in enumerate(zip([0, *ends], ends, strict=False)):
        if not before <= at <= len(text):
            raise InvalidRequest(
                f"images[{number}].at is {at}, and images stand in the order of their places in the document's "
                f"{len(text)} characters",
                param=f"images[{number}].at",
            )
    files = files_of(images)
    require_length(fewest_tokens(encoder, files), "at least ")  # before any pixel is read
    document = form.document(text[: ends[0]], layout, options)
    ids, chars = list(document.token_ids), form.spans(text[: ends[0]], document)
    placed = list[PlacedImage]()
    for number, (image, data, end) in enumerate(zip(images, files, [*ends[1:], len(text)], strict=True)):
        picture = pixels(data, param := f"images[{number}]")
        image_ids = encoder.token_ids(picture.size, param)
        placed.append(PlacedImage(len(ids), len(ids) + len(image_ids), pixels_digest(picture), data))
        mark = next((mark for mark in form.tokens.marks.values() if mark.id == image_ids[-1]), None)
        place: Place = "behind text" if mark is None or mark.normalized else "behind mark"
        piece = text[image.at : end]
        chars += [(image.at, image.at)] * len(image_ids)
        chars += [(image.at + a, image.at + b) for a, b in form.tokens.spans(piece, place)]
        ids += image_ids + form.tokens.encode(piece, place)
        require_length(len(ids))
    named = document.named_ids
    if named is not None:
        named = named + ids[len(document.token_ids) :]
    return replace(document, token_ids=ids, named_ids=named, images=tuple(placed)), chars
