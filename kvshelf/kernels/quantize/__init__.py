"""Affine quantization of key and value rows to 2, 4 or 8 bits, per channel or per token."""

from kvshelf.kernels.quantize.eager import (
    dequantize_channels,
    dequantize_tokens,
    quantize_channels,
    quantize_tokens,
)

__all__ = ["dequantize_channels", "dequantize_tokens", "quantize_channels", "quantize_tokens"]
