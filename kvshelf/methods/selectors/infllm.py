"""InfLLM: the blocks whose representative keys fit the question (Xiao et al., 2024, arXiv 2402.04617)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvshelf.artifact.records import Indexed, PackedRecord
from kvshelf.errors import PolicyUnsupported
from kvshelf.kernels.choose import Units
from kvshelf.methods.method import Needs, parameter
from kvshelf.methods.selectors.base import StoredLayer, UnitSelector


@dataclass(frozen=True)
class InfLLM(UnitSelector):
    """In part, as keys keep their true distances: read the blocks whose representative keys fit the question, for
    question and answer; no other block is read from disk or Redis.

    The cache is one of policy `infllm`, whose index has representative keys of each block. A block ranks by the product
    of the query of the question's last token and the key that fits it best, both without rotation, summed over the
    query heads; all heads of a layer read the same blocks (section 3.2 of the paper). The first block is always read,
    and those of the last `recent` tokens. The answer reads what the question chose; with `refresh` "step" each of its
    tokens chooses anew.

    Departures: the paper takes the mean query over the question's tokens. Of 52 questions at a quarter of the entries,
    mean queries find 8 %, that of the last token 33 % (kvshelf-tiny, blocks of 32 with mean keys). Queries and keys
    keep their true distances in attention; the paper reads all blocks at one distance. Of the 4,096 tokens before the
    question, which the paper always reads, `recent` stay: question and answer are always read whole. A question of more
    than 512 tokens chooses for each 512 of them.
    """

    name: ClassVar[str] = "infllm"
    source: ClassVar[str] = "InfLLM, arXiv 2402.04617"
    advice: ClassVar[str] = "for the first question to a long document that is not in memory."
    needs: ClassVar[Needs] = Needs.INDEX | Needs.ROPE

    recent: int = parameter(128, "last tokens of a document, whose blocks are always read", minimum=0)
    refresh: str = parameter("question", "when the answer chooses anew", choices=("question", "step"))

    @property
    def each_token(self) -> bool:
        return self.refresh == "step"

    def default_tokens(self, entries: int) -> int:
        return max(_LEAST_TOKENS, entries // 8)

    def units(self, stored: StoredLayer) -> list[Units]:
        index = next((record for record in stored.records if isinstance(record, Indexed)), None)
        if index is None:
            raise PolicyUnsupported(
                "the cache has no index, which selector infllm chooses by; compress the document by policy infllm, or "
                "take selector quest",
                param="select.method",
            )
        if index.summaries.shape[1] % (index.kv_heads * index.key_dim):
            raise PolicyUnsupported(
                f"the index of layer {stored.layer} has {index.summaries.shape[1]} numbers for each block, which are "
                f"no keys of {index.kv_heads} heads of {index.key_dim} channels; compress the document again",
                param="select.method",
            )
        return [self._units(record, index, stored.num_tokens) for record in stored.records]

    def scores(self, query: Tensor, summaries: Tensor) -> Tensor:
        keys = summaries.float().view(len(summaries), len(query), -1, query.shape[2])
        products = torch.einsum("hgd,bhrd->bhgr", query.float(), keys)
        return products.amax(dim=3).sum(dim=(1, 2))

    def _units(self, record: PackedRecord, index: Indexed, num_tokens: int) -> Units:
        """The blocks of the index; or all rows of another record, the last tokens that the codec keeps apart, as one
        unit with the summary of the index's last block."""
        device, rows = index.summaries.device, record.lengths[0]
        if record is index:
            low, ends = index.summaries, torch.arange(1, len(index.summaries) + 1, device=device) * index.block
            forced = ends > num_tokens - self.recent
            forced[0] = True
        else:
            low, ends = index.summaries[-1:], torch.tensor([rows], device=device)
            forced = torch.tensor([self.recent > 0], device=device)
        return Units(low, None, ends.clamp_max(rows).to(torch.int32), forced, (len(low),), views=True)


_LEAST_TOKENS = 1024
"""Eight blocks of the default size."""
