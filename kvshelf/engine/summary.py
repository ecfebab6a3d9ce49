"""Summaries of documents: codes of keys, by which a search finds the documents that hold the words of a question.

The keys of the first two layers, without their rotation, depend on the token, and in the second layer also on the
tokens before it. A key becomes 64 bits, the signs of random projections (SimHash, Charikar 2002). As in late
interaction (ColBERT, Khattab and Zaharia 2020), each token of the question is compared with its nearest code in a
document; as in BM25, a find counts for more in fewer documents. Paraphrases are found only as far as keys are near.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from blake3 import blake3
from torch import Tensor

from kvshelf.artifact.shape import CODE_BYTES, MAX_CODES
from kvshelf.engine.attention.function import Attended
from kvshelf.engine.attention.inspection import FirstLayers, FirstLayersSeen
from kvshelf.engine.exclusions import Combination, require_possible
from kvshelf.engine.forward.passes import Passes
from kvshelf.engine.inputs.encode import REFERENCE_TOKENS, Encoder
from kvshelf.errors import PolicyUnsupported
from kvshelf.kernels.transfer import download
from kvshelf.model.rope import Rope

Codes = npt.NDArray[np.uint64]

LAYERS: Final = 2
"""How many layers, from the first on, give codes. Measured on kvshelf-tiny alone (docs/internals/answers.md)."""

_AT_ONCE: Final = 4096
"""Keys of a document in fp32 at once: a whole layer of them would take more memory than the layer."""

_TOKENS: Final = 16
"""Tokens of a question that are compared at once: their distances to 100,000 documents take 6 MB."""

_FAR_BITS: Final = 6.4
"""Codes this many bits apart have nothing in common: the cosine of their signs is 0.8."""


@dataclass(frozen=True, eq=False)
class KeyCoder:
    """Makes codes of one model's keys.

    reference: token ids spread over the vocabulary. means: of their keys in each layer, `[kv_heads * D]`. projections:
    likewise, `[kv_heads * D, 64]`; those of keys less their mean have both signs.
    """

    passes: Passes
    rope: Rope
    reference: tuple[int, ...]
    means: tuple[Tensor, ...]
    projections: tuple[Tensor, ...]

    @classmethod
    def of(cls, passes: Passes) -> KeyCoder:
        """Runs the reference through the first layers; on the thread that owns the model."""
        rope, vocab_size = passes.facts.rope, passes.facts.model.config.vocab_size
        assert rope is not None
        count = min(REFERENCE_TOKENS, vocab_size)
        reference = tuple(index * vocab_size // count for index in range(count))
        keys = _first_layers(passes, rope, reference)
        projections = tuple(_projections(rows.shape[1]).to(rows.device) for rows in keys)
        return cls(passes, rope, reference, tuple(rows.mean(0) for rows in keys), projections)

    def question(self, token_ids: Sequence[int]) -> list[Codes]:
        """The codes of each token of a question, by layer. The tokens stand behind the reference, because keys of the
        first few tokens of a text differ from those of the same words inside one. On the thread that owns the model."""
        keys = _first_layers(self.passes, self.rope, [*self.reference, *token_ids])
        return [codes_of(self.signs(layer, rows[len(self.reference) :])) for layer, rows in enumerate(keys)]

    def signs(self, layer: int, keys: Tensor) -> Tensor:
        """The bits of the code of each key of a layer, `[N, 64]` bool, on the device of the keys. keys:
        `[N, kv_heads * D]` fp32, without their rotation."""
        return (keys - self.means[layer]) @ self.projections[layer] > 0


class Searcher:
    """Makes the codes of questions, and the coder of the summaries of documents."""

    def __init__(self, passes: Passes, encoder: Encoder) -> None:
        self._passes = passes
        self._encoder = encoder

    def require(self) -> None:
        """Raises `PolicyUnsupported` for a model whose documents have no summaries."""
        require_possible(Combination(facts=self._passes.facts, verb="search"))

    @cached_property
    def key_coder(self) -> KeyCoder:
        """Makes the summaries of documents, by which a search finds them. Raises as `require`."""
        self.require()
        return KeyCoder.of(self._passes)

    @property
    def key_coder_or_none(self) -> KeyCoder | None:
        """As `key_coder`; None for a model whose documents have no summaries."""
        try:
            self.require()
        except PolicyUnsupported:
            return None
        return self.key_coder

    @property
    def summary_layers(self) -> int:
        """How many layers have codes in a summary."""
        return min(LAYERS, len(self._passes.facts.kinds))

    def encode(self, query: str) -> list[int]:
        """Token ids of a question for `codes`. Thread-safe. Raises `InvalidRequest` for a question that is empty or
        longer than the model takes, and as `require`."""
        self.require()
        return self._encoder.search(query)

    def codes(self, token_ids: Sequence[int]) -> list[Codes]:
        """The codes of a question's tokens, by layer, which `summary.scores` compares with documents."""
        return self.key_coder.question(token_ids)


@dataclass(eq=False)
class SummaryMaker:
    """Makes the summary of a document from the layers of its prefill. first_position: as of a `DocumentView`."""

    coder: KeyCoder | None
    num_tokens: int
    first_position: int = 0
    _signs: list[Tensor] = field(default_factory=list, init=False)

    def after_attention(self, layer: Attended) -> None:
        if self.coder is None or layer.layer_idx >= LAYERS:
            return
        signs = []
        for start in range(0, self.num_tokens, _AT_ONCE):
            end = min(start + _AT_ONCE, self.num_tokens)
            keys = _plain_keys(layer, self.coder.rope, start, end, self.first_position)
            signs.append(self.coder.signs(layer.layer_idx, keys))
        self._signs.append(torch.cat(signs))

    @property
    def summary(self) -> tuple[bytes, ...]:
        """By layer, the distinct codes of the document, ascending; empty without a coder. Waits for the device."""
        return tuple(packed(codes_of(signs)) for signs in download(self._signs))


def codes_of(signs: Tensor) -> Codes:
    """The codes `[N]` of their bits, `[N, 64]` bool."""
    codes: Codes = np.packbits(signs.cpu().numpy(), axis=1, bitorder="little").view("<u8")[:, 0]
    return codes


def packed(codes: Codes) -> bytes:
    """The distinct codes; of more than `MAX_CODES`, as many from places spread over the document."""
    _, first = np.unique(codes, return_index=True)
    if len(first) > MAX_CODES:
        first = np.sort(first)[np.arange(MAX_CODES) * len(first) // MAX_CODES]
    return np.sort(codes[first]).astype("<u8").tobytes()


def unpacked(summary: Sequence[bytes]) -> list[Codes]:
    """The codes of a stored summary, by layer."""
    return [np.frombuffer(codes, "<u8") for codes in summary]


@dataclass(frozen=True, eq=False)
class Block:
    """The summaries of several documents, side by side. codes: by layer, those of one document after another. starts:
    by layer, `[documents]`, where those of each begin."""

    codes: tuple[Codes, ...]
    starts: tuple[npt.NDArray[np.int64], ...]

    @classmethod
    def of(cls, documents: Sequence[Sequence[Codes]]) -> Block:
        """documents: the codes of each, by layer; at least one in each layer."""
        layers = list(zip(*documents, strict=True))
        sizes = [np.fromiter(map(len, layer), np.int64, len(documents)) for layer in layers]
        return cls(tuple(map(np.concatenate, layers)), tuple(np.cumsum(size) - size for size in sizes))

    @property
    def nbytes(self) -> int:
        return sum(codes.nbytes + starts.nbytes for codes, starts in zip(self.codes, self.starts, strict=True))

    def nearest(self, layer: int, tokens: Codes) -> npt.NDArray[np.uint8]:
        """`[tokens, documents]`: how many bits the nearest code of each document is apart from that of a token."""
        codes, starts = self.codes[layer], self.starts[layer]
        apart, bits = np.empty_like(codes), np.empty(len(codes), np.uint8)
        nearest = np.empty((len(tokens), len(starts)), np.uint8)
        for place, token in enumerate(tokens):
            np.bitwise_count(np.bitwise_xor(codes, token, out=apart), out=bits)
            np.minimum.reduceat(bits, starts, out=nearest[place])
        return nearest


def score(question: Sequence[Codes], documents: Sequence[Sequence[Codes]]) -> list[float]:
    """As `scores`, of documents that are in no block."""
    values: list[float] = scores(question, [Block.of(documents)], np.arange(len(documents))).tolist()
    return values


def scores(
    question: Sequence[Codes],
    blocks: Sequence[Block],
    chosen: npt.NDArray[np.int64],
    checkpoint: Callable[[], None] = lambda: None,
) -> npt.NDArray[np.float64]:
    """How much of a question each chosen document holds, from 0 to 1; comparable among these documents alone.

    chosen: `[documents]`, their places among those of all blocks. checkpoint: called before each block; may raise.

    A token's find in a document falls from 1 for an equal code to 0 for one `_FAR_BITS` away. The score is the mean of
    the finds, over layers and tokens, weighed by BM25's inverse document frequency, for which finds are counted as the
    fractions that they are.
    """
    total, weights = np.zeros(len(chosen)), 0.0
    for layer, tokens in enumerate(question):
        for some in np.split(tokens, range(_TOKENS, len(tokens), _TOKENS)):
            bits = []
            for block in blocks:
                checkpoint()
                bits.append(block.nearest(layer, some))
            finds = np.maximum(0.0, 1 - np.concatenate(bits, axis=1)[:, chosen] / np.float32(_FAR_BITS))
            frequency = finds.sum(axis=1, dtype=np.float64)
            weight = np.log1p((len(chosen) - frequency + 0.5) / (frequency + 0.5))
            total += weight @ finds
            weights += weight.sum()
    return total / weights


def _projections(channels: int) -> Tensor:
    """`[channels, 64]` of 1 and -1, drawn by BLAKE3, so that every version and machine has the same ones."""
    random = blake3(b"kvshelf.summary/1").digest(length=channels * CODE_BYTES)
    bits = np.unpackbits(np.frombuffer(random, np.uint8)).reshape(channels, 8 * CODE_BYTES)
    return torch.from_numpy(bits.astype(np.float32) * 2 - 1)


def _plain_keys(layer: Attended, rope: Rope, start: int, end: int, first: int = 0) -> Tensor:
    """The keys of some of a layer's tokens without their rotation, heads side by side: `[N, kv_heads * D]` fp32. first:
    position of the layer's first token."""
    keys = layer.keys[0, :, start:end]
    plain = rope.unrotate(keys, torch.arange(first + start, first + end, device=keys.device))
    return plain.transpose(0, 1).flatten(1)


def _first_layers(passes: Passes, rope: Rope, token_ids: Sequence[int]) -> list[Tensor]:
    """The keys of each of the first layers, as of `_plain_keys`, in a pass that ends there."""
    observer = FirstLayers(min(LAYERS, passes.model.config.num_hidden_layers))
    device = passes.devices.inputs
    inputs = {
        "input_ids": torch.tensor([list(token_ids)], device=device),
        "position_ids": torch.arange(len(token_ids), device=device).unsqueeze(0),
    }
    with suppress(FirstLayersSeen):
        passes.causal(inputs, observer)
    return [_plain_keys(layer, rope, 0, layer.keys.shape[2]) for layer in observer.attended]
