"""A small random model that sees images, in a folder, and images for it."""

from __future__ import annotations

import base64
import struct
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from transformers import CONFIG_MAPPING, AutoImageProcessor, AutoModelForMultimodalLM, AutoTokenizer, Idefics3Processor

from kvshelf.model.source import bundled_folder

OLDER = not hasattr(transformers, "Idefics3ImageProcessorPil")
"""Whether this transformers needs torchvision to see."""

ROWS = 4
"""Of the parts that a large image is split into."""
_MARKS = ["<fake_token_around_image>", "<image>", "<global-img>"]
_MARKS += [f"<row_{row + 1}_col_{column + 1}>" for row in range(ROWS) for column in range(ROWS)]


def save_image_model(folder: Path, family: str = "smolvlm", *, split: bool = True, seed: int = 0) -> Any:
    """A model of 2 layers whose images have 4 tokens a part, saved with its tokenizer and processor. Returns it."""
    tokenizer = AutoTokenizer.from_pretrained(bundled_folder("kvshelf-tiny"))
    tokenizer.add_special_tokens({"additional_special_tokens": _MARKS})
    text = {
        "model_type": "llama", "vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
        "pad_token_id": 0, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id,
    }  # fmt: skip
    sees = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": 32, "patch_size": 8,
    }  # fmt: skip
    image = tokenizer.convert_tokens_to_ids("<image>")
    config = CONFIG_MAPPING[family](text_config=text, vision_config=sees, scale_factor=2, image_token_id=image)
    torch.manual_seed(seed)
    model = AutoModelForMultimodalLM.from_config(config).eval().requires_grad_(False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(_READER.replace("SPLIT", str(split).lower()))
    return model


_READER = """{"image_processor_type": "SmolVLMImageProcessor", "do_image_splitting": SPLIT, "do_convert_rgb": true,
"do_resize": true, "do_rescale": true, "do_normalize": true, "do_pad": true, "resample": 1,
"rescale_factor": 0.00392156862745098, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}"""


def processor(folder: Path) -> Idefics3Processor:
    """transformers' own."""
    reader = AutoImageProcessor.from_pretrained(folder, backend="pil")
    return Idefics3Processor(reader, AutoTokenizer.from_pretrained(folder), image_seq_len=4)


def picture(seed: int, width: int = 60, height: int = 40) -> Image.Image:
    """Random pixels."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def block(image: Image.Image, form: str = "PNG", **options: Any) -> dict[str, str]:
    """An image as a block of a document."""
    image.save(file := BytesIO(), form, **options)
    return {"type": "image", "data": base64.b64encode(file.getvalue()).decode()}


def png(size: tuple[int, int], bits: int = 8) -> bytes:
    """A file of so many pixels in RGB and bits a channel, of which only a black first row is there."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", *size, bits, 2, 0, 0, 0))
    row = zlib.compress(bytes(1 + 3 * size[0] * bits // 8))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", row) + chunk(b"IEND", b"")
