"""Images beside text, for models of one family (Idefics 3 and SmolVLM): from the bytes of a file to the states that
replace the embeddings of its tokens.

In this family an image changes nothing but these embeddings: its tokens have one position each and see the tokens
before them, as words do. So kvshelf treats their keys and values as those of words.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from io import BytesIO
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvshelf.artifact.identity import canonical_json, digest
from kvshelf.errors import InvalidRequest, PolicyUnsupported
from kvshelf.model.devices import weights_digest
from kvshelf.model.layers import layer_kinds

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile
    from transformers import PreTrainedModel

_LOG = logging.getLogger(__name__)

FAMILIES: Final = ("idefics3", "smolvlm")
"""Types of models, as transformers names them."""

_FORMATS: Final = ("PNG", "JPEG")
_MODES: Final = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")
"""Modes of Pillow with at most eight bits a channel."""

_READERS: Final = ("Idefics3ImageProcessorPil", "SmolVLMImageProcessorPil")
"""Classes of transformers that scale and normalize pixels for a tower."""

_BAD_SIZE: Final = (ValueError, ZeroDivisionError, OverflowError)
"""Errors of these classes for an image that has no size to scale to, such as a line of pixels."""

_OF_READER: Final = (
    "do_resize", "size", "resample", "do_image_splitting", "max_image_size", "do_rescale", "rescale_factor",
    "do_normalize", "image_mean", "image_std", "do_pad",
)  # fmt: skip
_OF_TOWER: Final = ("hidden_act", "image_size", "patch_size", "num_attention_heads", "layer_norm_eps")
"""Settings that change the states of an image. Not all there are: each version of transformers adds some."""

_ENCODERS: Final[WeakKeyDictionary[PreTrainedModel, ImageEncoder]] = WeakKeyDictionary()


class PlacedImage(NamedTuple):
    """An image of a document: its tokens from `first` up to `end`. digest: of its pixels. data: the file."""

    first: int
    end: int
    digest: str
    data: bytes


class Scaled(NamedTuple):
    """An image for a vision tower. pixels: its parts, `[1, parts, 3, height, width]`. mask: which of their pixels are
    no padding, `[1, parts, height, width]`. tokens: the number of its states."""

    pixels: Tensor
    mask: Tensor
    tokens: int


def size_of(data: bytes, param: str) -> tuple[int, int]:
    """Width and height of a PNG or JPEG file by its header, before it is turned. Raises `InvalidRequest` about
    `param`."""
    return _open(data, param).size


def pixels(data: bytes, param: str) -> Image:
    """The pixels of a PNG or JPEG file, RGB, turned as its EXIF says, transparent parts on white.

    The size is read before any pixel. Raises `InvalidRequest` about `param`.
    """
    from PIL import Image, ImageOps

    image = _open(data, param)
    try:
        image.load()
        turned = ImageOps.exif_transpose(image)
        if turned.has_transparency_data:
            turned = Image.alpha_composite(Image.new("RGBA", turned.size, "white"), turned.convert("RGBA"))
        return turned.convert("RGB")
    except Exception as error:  # whatever a decoder raises for a broken file
        raise _refusal(param, f"is broken ({type(error).__name__}: {error})") from error


def _open(data: bytes, param: str) -> ImageFile:
    """The header of a file."""
    from PIL import Image

    try:
        image = Image.open(BytesIO(data), formats=_FORMATS)
    except Exception as error:  # as above
        raise _refusal(param, f"is no PNG or JPEG that can be read ({type(error).__name__}: {error})") from error
    if image.mode not in _MODES or getattr(image, "n_frames", 1) > 1:
        raise _refusal(param, f"has several frames or the mode {image.mode}; give one still image of 8 bits a channel")
    if image.format == "PNG" and (data[12:16] != b"IHDR" or data[24] > 8):  # of 16 bits in colour Pillow keeps 8
        raise _refusal(param, "does not begin with a header of at most 8 bits a channel; give it with 8")
    return image


def pixels_digest(image: Image) -> str:
    """Hex SHA-256 of an image's mode, size and pixels: the same for the same pixels, in whatever file they were."""
    head = f"{image.mode} {image.width} {image.height}\n".encode()
    return hashlib.sha256(head + image.tobytes()).hexdigest()


@dataclass(frozen=True, eq=False)
class ImageEncoder:
    """The vision tower of a model and its processor. Thread-safe, but for `states`: that is for the model's thread.

    token_id: the token that stands for each state of an image. digest: of everything but the pixels that the states
    depend on. nbytes: of its weights.
    """

    token_id: int
    digest: str
    nbytes: int
    _whole: Any
    _processor: Any
    _lock: Lock

    @staticmethod
    def of(model: PreTrainedModel) -> ImageEncoder | None:
        """The encoder that `beside` has kept for a language part; None for a model without images."""
        return _ENCODERS.get(model)

    @classmethod
    def beside(cls, model: PreTrainedModel, whole: PreTrainedModel, source: str, missing: set[str]) -> None:
        """Keep the vision tower of a model for its language part, where there is one of `FAMILIES` with all its
        weights, with a processor in the folder, and Pillow. source: the folder or hub id. missing: as of
        `require_weights`."""
        config = whole.config
        if config.model_type not in FAMILIES or find_spec("PIL") is None:
            return
        if any(kind.states for kind in layer_kinds(model.config)):
            return
        import transformers
        from transformers import AutoImageProcessor, AutoTokenizer, Idefics3Processor

        from kvshelf.model.language import require_weights

        if not hasattr(transformers, "Idefics3ImageProcessorPil"):  # older ones want torchvision
            return
        inner: Any = whole.base_model
        towers, count = [inner.vision_model, inner.connector], int(inner.image_seq_len)
        try:
            for tower in towers:
                require_weights(whole, missing, tower, source)
            reader = AutoImageProcessor.from_pretrained(source, backend="pil", trust_remote_code=False)
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
            # SmolVLM's own processor is the same for images, and needs two more packages for videos. It adds the marks
            # around an image to its tokenizer anew, as such that take no white space beside them.
            processor = Idefics3Processor(reader, tokenizer, image_seq_len=count)
        except (PolicyUnsupported, OSError, ValueError, TypeError, ImportError) as error:
            _LOG.warning("not all is there that %s needs to see, so it is a model of text: %s", source, error)
            return
        if type(reader).__name__ not in _READERS or not reader.do_pad or not _counted_by_size(reader):
            return
        if processor.image_token_id != config.image_token_id:
            return
        tensors = [tensor for part in towers for tensor in part.state_dict().values()]
        if any(tensor.is_meta for tensor in tensors):  # offloaded, or without weights
            return
        settings = {name: str(getattr(reader, name, None)) for name in _OF_READER}
        settings |= {name: str(getattr(config.vision_config, name, None)) for name in _OF_TOWER}
        settings |= {"reader": type(reader).__name__, "family": config.model_type}
        settings |= {"tokens": str(count), "scale": str(config.scale_factor)}
        identity = digest("kvshelf.image-encoder", canonical_json(settings), *map(weights_digest, towers))
        nbytes = sum(tensor.nbytes for tensor in tensors)
        _ENCODERS[model] = cls(int(config.image_token_id), identity, nbytes, inner, processor, Lock())

    def token_ids(self, size: tuple[int, int], param: str) -> list[int]:
        """The tokens of an image of this width and height, from the mark before it to the one behind it. Raises
        `InvalidRequest` about `param`."""
        width, height = size
        try:
            _, rows, columns = self._processor.image_processor.get_number_of_image_patches(height, width)
        except _BAD_SIZE as error:
            raise _bad_size(param, error) from error
        return self._tokens(rows, columns)

    def _tokens(self, rows: int, columns: int) -> list[int]:
        """The tokens of an image in so many rows and columns of parts."""
        text = self._processor.replace_image_token({"rows": [[rows]], "cols": [[columns]]}, 0)
        with self._lock:  # a tokenizer that pads is not thread-safe
            ids: list[int] = self._processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def scaled(self, data: bytes, token_ids: Sequence[int], param: str) -> Scaled:
        """The pixels of a file for the tower: seconds for a large one. token_ids: of a document, at the place of the
        image. Raises as `pixels`, and `InvalidRequest` about `param` where the image has other tokens."""
        image = pixels(data, param)
        try:
            inputs = self._processor.image_processor([[image]], return_row_col_info=True, return_tensors="pt")
        except _BAD_SIZE as error:
            raise _bad_size(param, error) from error
        (rows,), (columns,) = inputs["rows"][0], inputs["cols"][0]
        if self._tokens(int(rows), int(columns)) != list(token_ids):
            raise _refusal(param, "has other tokens than the document at its place; send the document anew")
        return Scaled(inputs["pixel_values"], inputs["pixel_attention_mask"], token_ids.count(self.token_id))

    def states(self, image: Scaled, param: str) -> Tensor:
        """The states that replace the embeddings of its tokens `token_id`, in order, `[n, width]`. Raises
        `InvalidRequest` about `param` for an image that counts as padding."""
        device = next(self._whole.vision_model.parameters()).device
        with torch.no_grad():
            out = self._whole.get_image_features(image.pixels.to(device), image.mask.to(device))
        states = getattr(out, "pooler_output", out)  # older versions of transformers 5 give them alone
        states = torch.cat(list(states)) if isinstance(states, list | tuple) else states
        states = states.reshape(-1, states.shape[-1])
        if len(states) != image.tokens:
            raise _refusal(param, "is one that the model takes for padding; give another")
        return states


def _counted_by_size(reader: Any) -> bool:
    """Whether transformers counts the parts of an image rightly from its size: it leaves out the rounding of a size
    that is no multiple of a part's size."""
    part = reader.max_image_size["longest_edge"]
    whole = reader.do_resize and part % 2 == 0 and reader.size["longest_edge"] % part == 0
    return bool(whole or not reader.do_image_splitting)


def _bad_size(param: str, error: Exception) -> InvalidRequest:
    return _refusal(param, f"is of a size that the model does not take: {error}")


def _refusal(param: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{param}: the image {why}", param=param)
