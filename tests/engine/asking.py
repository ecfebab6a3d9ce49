"""Documents and questions of random tokens, and what an engine says behind a cache."""

from __future__ import annotations

import torch
from torch import Tensor

from kvshelf.artifact.cache import CompressedCache
from kvshelf.engine.attention.attached import CACHE_ARGUMENT
from kvshelf.engine.engine import Engine


def ids(count: int, seed: int = 1) -> list[int]:
    return torch.randint(5, 500, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def logits_behind(engine: Engine, cache: CompressedCache, tokens: list[int], pieces: list[int]) -> Tensor:
    """Logits of all tokens, given in pieces of these lengths, or shorter ones where the model takes no such."""
    with torch.no_grad(), engine.attached(cache) as past:
        asked = [each for piece in torch.split(torch.tensor([tokens]), pieces, dim=1) for each in past.pieces(piece)]
        return torch.cat([engine.model(piece, **{CACHE_ARGUMENT: past}).logits[0] for piece in asked])
