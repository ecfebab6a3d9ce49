"""Prefill token equivalents (PTE): what an answer costs in tokens of a prefill (arXiv 2604.05404)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

import torch

from kvshelf.model.devices import input_device
from kvshelf.model.layers import LayerKind

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvshelf.engine.attention.attachment import Attached

INTENSITIES: Final = {
    "cpu": 12.5,
    "NVIDIA A100-SXM4-40GB": 312e12 / 1.555e12,
    "NVIDIA A100-SXM4-80GB": 312e12 / 2.039e12,
    "NVIDIA H100 80GB HBM3": 989.4e12 / 3.35e12,
    "NVIDIA H100 PCIe": 756e12 / 2.0e12,
    "NVIDIA H200": 989.4e12 / 4.8e12,
    "NVIDIA L4": 121e12 / 0.3e12,
    "NVIDIA L40S": 362e12 / 0.864e12,
}
"""FLOP for each byte, by the name that torch gives a GPU: 16-bit products without sparsity, as NVIDIA publishes them.
cpu: in fp32 on 2 cores of an Intel Xeon (Sapphire Rapids), by `kvshelf doctor`."""


@dataclass(frozen=True)
class Equivalents:
    """Counts the PTE of one model on one device. A prefill is limited by operations, 2 * N for each token of a model of
    N parameters; a decode step by the bytes of the KV cache that it reads. The device's operational intensity (HOI),
    its peak FLOP a second over the bytes a second of its memory, turns bytes into operations.

    parameters: N, all of the model's, also those of experts that a token does not use. token_bytes: of the keys and
    values of one token in one layer, uncompressed. kinds: the layers. intensity: HOI, FLOP a byte; None: no PTE.
    """

    parameters: int
    token_bytes: int
    kinds: Sequence[LayerKind]
    intensity: float | None

    @classmethod
    def of(cls, model: PreTrainedModel, kv_bytes_per_token: int, kinds: Sequence[LayerKind], *, shared: bool) -> Self:
        """shared: whether other processes have a part of the model's weights; they count, too."""
        whole = model
        if shared:
            with torch.device("meta"):  # where weights take no memory
                whole = type(model)(model.config)
        token_bytes = kv_bytes_per_token // sum(kind.attends for kind in kinds)
        return cls(whole.num_parameters(), token_bytes, kinds, intensity_of(input_device(model)))

    def cost(self, prefilled: int, decoded: int, read_bytes: float) -> float | None:
        """PTE of one turn: D_prefill + gamma * L_seq * D_decode.

        The paper's gamma is 2 * n_layers * d_model * HOI / N: the 4 * n_layers * d_model bytes that a token has in 16
        bits under multi-head attention, times HOI / (2 * N). read_bytes takes the place of L_seq such tokens: what a
        step reads of the stored cache, whatever its heads and its codec. L_seq is the length at which the answer
        begins, so the cost is linear in its tokens.
        """
        if self.intensity is None:
            return None
        return prefilled + decoded * read_bytes * self.intensity / (2 * self.parameters)

    def answered(
        self, document: Attached, read_share: float, question: int, answer: int
    ) -> tuple[float | None, float | None]:
        """PTE of an answer behind stored documents, and how many more it would take without the shelf, which prefills
        the documents and reads all of them uncompressed.

        read_share: of the documents' entries, what a token of the answer read. Not counted: what a selector reads to
        choose them, recurrent states that are not stored, the prefill that made the cache. question, answer: tokens.
        """
        own = self._full_bytes(question)
        cost = self.cost(question, answer, document.read_bytes * read_share + own)
        tokens = document.num_tokens
        again = self.cost(tokens + question, answer, self._full_bytes(tokens) + own)
        return cost, None if cost is None or again is None else again - cost

    def _full_bytes(self, tokens: int) -> int:
        return sum(kind.seen(tokens) * self.token_bytes for kind in self.kinds if kind.attends)


def intensity_of(device: torch.device) -> float | None:
    """HOI of a device; None for one that `INTENSITIES` does not name."""
    return INTENSITIES.get(torch.cuda.get_device_name(device) if device.type == "cuda" else device.type)
