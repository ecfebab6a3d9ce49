"""Images beside text, for models of one family (Idefics 3 and SmolVLM): from the bytes of a file to the states that
stand in the places of its tokens.

Of this family an image changes the embeddings of its tokens and nothing else: they have one position each and see what
comes before them, as words do. So all that kvshelf does with keys and values is the same.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.util import find_spec
from io import BytesIO
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvshelf.artifact.identity import canonical_json, digest
from kvshelf.errors import InvalidRequest
from kvshelf.model.devices import weights_digest
from kvshelf.model.layers import layer_kinds

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile
    from transformers import PreTrainedModel

FAMILIES: Final = ("idefics3", "smolvlm")
"""Types of models, as transformers names them."""

MAX_PIXELS: Final = 1 << 24
"""Of one image: a page of A4 at 400 dots an inch has a few less. To make such a one smaller takes seconds."""

_FORMATS: Final = ("PNG", "JPEG")
_MODES: Final = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")
"""Of Pillow, with at most eight bits a channel: of more it would keep some."""

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


def num_pixels(data: bytes, param: str) -> int:
    """Of a PNG or JPEG file, by its header. Raises `InvalidRequest` about `param`."""
    image = _opened(data, param)
    return image.width * image.height


def pixels(data: bytes, param: str) -> Image:
    """The pixels of a PNG or JPEG file, RGB, turned as its EXIF says; what is transparent lies on white.

    The size is read before any pixel. Raises `InvalidRequest` about `param`.
    """
    from PIL import Image, ImageOps

    image = _opened(data, param)
    try:
        image.load()
        turned = ImageOps.exif_transpose(image)
        if turned.has_transparency_data:
            turned = Image.alpha_composite(Image.new("RGBA", turned.size, "white"), turned.convert("RGBA"))
        return turned.convert("RGB")
    except Exception as error:  # whatever a decoder raises for a broken file
        raise _refused(param, f"is broken ({type(error).__name__}: {error})") from error


def _opened(data: bytes, param: str) -> ImageFile:
    """The header of a file."""
    from PIL import Image

    try:
        image = Image.open(BytesIO(data), formats=_FORMATS)
    except Exception as error:  # as above
        raise _refused(param, f"is no PNG or JPEG that can be read ({type(error).__name__}: {error})") from error
    if image.width * image.height > MAX_PIXELS:
        raise _refused(param, f"has {image.width} x {image.height} pixels, and {MAX_PIXELS} are taken; make it smaller")
    if image.mode not in _MODES or getattr(image, "n_frames", 1) > 1:
        raise _refused(param, f"has several frames or the mode {image.mode}; give one still image of 8 bits a channel")
    return image


def pixels_digest(image: Image) -> str:
    """Hex SHA-256 of an image's mode, size and pixels: the same for the same pixels, in whatever file they were."""
    head = f"{image.mode} {image.width} {image.height}\n".encode()
    return hashlib.sha256(head + image.tobytes()).hexdigest()


@dataclass(frozen=True, eq=False)
class ImageEncoder:
    """The vision tower of a model and its processor. Thread-safe, but for `states`: that is the model's thread.

    token_id: that of each place of an image. digest: of all that the states of given pixels depend on. nbytes: of the
    weights beside those of the language part.
    """

    token_id: int
    digest: str
    nbytes: int
    _whole: Any
    _processor: Any
    _lock: Lock

    @staticmethod
    def of(model: PreTrainedModel) -> ImageEncoder | None:
        """That of a language part which `beside` was told of; None for a model without images."""
        return _ENCODERS.get(model)

    @classmethod
    def beside(cls, model: PreTrainedModel, whole: PreTrainedModel, source: str) -> None:
        """Keep the vision tower of a model for its language part, where there is one of `FAMILIES`, with a processor in
        the folder, and Pillow. source: the folder or hub id."""
        config = whole.config
        if config.model_type not in FAMILIES or find_spec("PIL") is None:
            return
        if any(kind.states for kind in layer_kinds(model.config)):
            return
        import transformers
        from transformers import AutoImageProcessor, AutoTokenizer, Idefics3Processor

        if not hasattr(transformers, "Idefics3ImageProcessorPil"):  # older ones want torchvision
            return
        try:
            reader = AutoImageProcessor.from_pretrained(source, backend="pil", trust_remote_code=False)
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        except (OSError, ValueError, ImportError):  # the folder has none: a model of text
            return
        inner: Any = whole.base_model
        count = int(inner.image_seq_len)
        # SmolVLM's own processor is the same for images, and needs two more packages for videos.
        processor = Idefics3Processor(reader, tokenizer, image_seq_len=count)
        if processor.image_token_id != config.image_token_id:
            return
        towers = [inner.vision_model, inner.connector]
        tensors = [tensor for part in towers for tensor in part.state_dict().values()]
        if any(tensor.is_meta for tensor in tensors):  # offloaded, or without weights
            return
        said = {name: str(getattr(reader, name, None)) for name in _OF_READER}
        said |= {name: str(getattr(config.vision_config, name, None)) for name in _OF_TOWER}
        said |= {"family": config.model_type, "tokens": str(count), "scale": str(config.scale_factor)}
        made = digest("kvshelf.image-encoder", canonical_json(said), *map(weights_digest, towers))
        nbytes = sum(tensor.nbytes for tensor in tensors)
        _ENCODERS[model] = cls(int(config.image_token_id), made, nbytes, inner, processor, Lock())

    def token_ids(self, image: Image, param: str) -> list[int]:
        """The tokens of an image, from the mark before it to the one behind it. Raises `InvalidRequest` about
        `param`."""
        ids: list[int] = self._processed(image, param)["input_ids"][0].tolist()
        return ids

    def states(self, image: Image, param: str) -> Tensor:
        """What stands in the places of its tokens `token_id`, in order, `[n, width]`."""
        inputs = self._processed(image, param)
        device = next(self._whole.vision_model.parameters()).device
        with torch.no_grad():
            out = self._whole.get_image_features(
                inputs["pixel_values"].to(device), inputs["pixel_attention_mask"].to(device)
            )
        states = getattr(out, "pooler_output", out)  # older versions of transformers 5 give them alone
        states = torch.cat(list(states)) if isinstance(states, list | tuple) else states
        states = states.reshape(-1, states.shape[-1])
        if len(states) != int((inputs["input_ids"] == self.token_id).sum()):
            raise _refused(param, "is one that the model takes for padding; give another")
        return states

    def _processed(self, image: Image, param: str) -> Any:
        with self._lock:  # a tokenizer that pads is not thread-safe
            try:
                text = self._processor.image_token
                return self._processor(text=text, images=[image], return_tensors="pt", add_special_tokens=False)
            except (ValueError, ZeroDivisionError, OverflowError) as error:  # a line of pixels has no size to scale to
                raise _refused(param, f"is of a size that the model does not take: {error}") from error


def _refused(param: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{param}: the image {why}", param=param)
