"""Models of GGUF files, as llama.cpp and Ollama keep them, converted once into folders that transformers loads.

transformers dequantizes a GGUF file each time it is loaded, which takes seconds for each 100 MB, and cannot save the
model. The folder here has the weights in float32, in which they are dequantized, and the tokenizer and the chat
template of the file. Its configuration names the file's digest, and so does the identity of each cache.
"""

from __future__ import annotations

import fcntl
import math
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from blake3 import blake3

from kvshelf.errors import InvalidRequest

if TYPE_CHECKING:
    from gguf import GGUFReader

CONVERSION: Final = 1
"""Raised when a conversion gives other weights or another tokenizer: models converted before are converted anew."""

_ITEMSIZE: Final = torch.float32.itemsize
_ROOM: Final = 1 << 28
"""Bytes beside the weights that a conversion leaves free on the disk."""


def models_folder() -> Path:
    """The folder of converted models (XDG base directories). It may be deleted: models are converted again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvshelf" / "models"


def converted(file: Path) -> Path:
    """The folder of the model in a GGUF file, converted now if it was not before. Several processes may ask at once.

    Raises `InvalidRequest` for a file that is damaged or cut off, one of several parts, an architecture that
    transformers does not read, and where the folder cannot be written.
    """
    digest = blake3(max_threads=blake3.AUTO).update_mmap(file).hexdigest(length=16)
    folder = models_folder() / f"{digest}-{CONVERSION}"
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the replicas of a service start at once, and one of them converts
            if not folder.is_dir():
                _convert(file, folder, digest)
    except OSError as error:
        raise InvalidRequest(
            f"the model {str(file)!r} is converted once into {folder.parent}, and that failed: {error}; "
            "XDG_CACHE_HOME names another place",
            param="model",
        ) from error
    return folder


def _convert(file: Path, folder: Path, digest: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _require_convertible(file, folder.parent)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".converting-") as temporary:
        whole = Path(temporary) / folder.name
        try:
            model = AutoModelForCausalLM.from_pretrained(
                file.parent, gguf_file=file.name, dtype=torch.float32, trust_remote_code=False
            )
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)
        except (ValueError, KeyError, ImportError, RuntimeError) as error:
            raise InvalidRequest(
                f"transformers cannot read the GGUF file {str(file)!r}: {error}", param="model"
            ) from error
        plain = _without_quantizer(model)
        plain.config.gguf = {"blake3": digest, "conversion": CONVERSION}
        plain.save_pretrained(whole, state_dict=model.state_dict())
        tokenizer.save_pretrained(whole)
        for path in whole.iterdir():
            with path.open("rb") as written:
                os.fsync(written.fileno())
        shutil.rmtree(folder, ignore_errors=True)
        whole.rename(folder)


def _without_quantizer(model: Any) -> Any:
    """A model of the same configuration without weights of its own. The loaded model calls itself quantized, though its
    weights are plain, and refuses to be saved."""
    config = model.config
    if hasattr(config, "quantization_config"):  # transformers 5.2 notes it on the model alone
        del config.quantization_config
    with torch.device("meta"):
        plain = type(model)(config)
    plain.generation_config = model.generation_config
    return plain


def _require_convertible(file: Path, folder: Path) -> None:
    from gguf import GGUFReader
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    try:
        reader = GGUFReader(file)
    except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError) as error:
        raise InvalidRequest(
            f"the GGUF file {str(file)!r} is damaged or cut off ({error}); fetch it again", param="model"
        ) from error
    architecture = _field(reader, "general.architecture")
    if (parts := _field(reader, "split.count")) and parts > 1:
        raise InvalidRequest(
            f"the GGUF file {str(file)!r} is one of {parts} parts; merge them with llama.cpp's `llama-gguf-split "
            "--merge`",
            param="model",
        )
    if architecture not in GGUF_SUPPORTED_ARCHITECTURES:
        raise InvalidRequest(
            f"the GGUF file {str(file)!r} has the architecture {architecture!r}, and transformers reads "
            f"{', '.join(sorted({*GGUF_SUPPORTED_ARCHITECTURES} - {'general', 'tokenizer'}))}",
            param="model",
        )
    needed = sum(math.prod(map(int, tensor.shape)) for tensor in reader.tensors) * _ITEMSIZE + _ROOM
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise InvalidRequest(
            f"the weights of {str(file)!r} take {needed / 1e9:.1f} GB in float32, and {folder} has {free / 1e9:.1f} GB "
            "free; XDG_CACHE_HOME names another place",
            param="model",
        )


def _field(reader: GGUFReader, name: str) -> Any:
    field = reader.get_field(name)
    return None if field is None else field.contents()
