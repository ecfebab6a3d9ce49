"""ChunkKV: keep or drop whole chunks of neighbouring tokens (Liu et al., 2025, arXiv 2502.00299)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kvshelf.errors import PolicyUnsupported
from kvshelf.kernels.select import select
from kvshelf.kernels.window_scores import pooled
from kvshelf.methods.method import Needs, parameter
from kvshelf.methods.policies.base import TailPolicy, pooling_kernel
from kvshelf.methods.policies.budgets import Budget, LayerBudget
from kvshelf.methods.policies.view import DocumentView, LayerView


@dataclass(frozen=True)
class ChunkKV(TailPolicy):
    """Keep the whole chunks of neighbouring tokens that the end of the prompt attends to most, the same chunks in every
    head of a layer, and with `reuse` in several adjacent layers.

    Tokens are scored as in SnapKV; a chunk's score is the mean over its tokens of the sum over KV heads. The document
    is cut from its start into chunks of `chunk` tokens, and the last one may be shorter. Chunks that touch the
    template's tokens or the window stay. With `reuse` n the first of each n adjacent layers chooses, and the others
    keep the same chunks (the paper's N_reuse).

    Granularity: of n chunks, the shorter one included, max(1, floor(n * (1 - compression_ratio))) are kept, as in
    kvpress. So the kept total can differ from the budget by up to two chunks: fewer entries, because only whole chunks
    stay, or more, because the shorter chunk can be among the dropped ones.

    Departures: scores are pooled as in kvpress's SnapKV (`kernel=1` for none). Chunks have 20 tokens as
    there (the paper: 10).
    """

    name: ClassVar[str] = "chunkkv"
    source: ClassVar[str] = "ChunkKV, arXiv 2502.00299"
    advice: ClassVar[str] = "with expected questions, where passages must stay whole."
    shared_by_heads: ClassVar[bool] = True
    exact: ClassVar[bool] = False
    ragged: ClassVar[bool] = False  # only where a shorter last chunk goes in some layers
    settled: ClassVar[Mapping[str, str]] = {
        **TailPolicy.settled,
        "reuse": "layers of a stored cache may hold different tokens",
    }

    window: int = parameter(32, "last tokens that observe; those of the document are kept", minimum=1)
    kernel: int = pooling_kernel(5)
    chunk: int = parameter(20, "tokens per chunk", minimum=1)
    reuse: int = parameter(1, "adjacent layers that keep the chunks of the first of them", minimum=1, added=True)
    share: float | None = field(default=None, compare=False, repr=False)
    """The fraction of chunks to keep. It comes from the request, as the budget's number of entries is rounded."""

    @property
    def needs(self) -> Needs:
        return super().needs | (Needs.BEFORE if self.reuse > 1 else Needs.NOTHING)

    def fitted(self, document: DocumentView, budget: Budget, given: frozenset[str]) -> Self:
        policy = super().fitted(document, budget, given)
        policy = replace(policy, share=1 - budget.compression_ratio)
        while "chunk" not in given and policy.chunk > 1 and not policy._fits(document, budget):
            policy = replace(policy, chunk=policy.chunk // 2)
        while "window" not in given and policy.window > 1 and not policy._fits(document, budget):
            policy = replace(policy, window=policy.window // 2)
        if policy._fits(document, budget):
            return policy
        smaller = (replace(policy, chunk=chunk) for chunk in range(min(self.chunk, budget.tokens), 0, -1))
        largest = next(policy.chunk for policy in smaller if policy._fits(document, budget))
        raise PolicyUnsupported(
            f"chunk is {self.chunk}, and the budget of {budget.tokens} of {document.num_tokens} entries per KV head "
            f"does not hold the whole chunks of the template and of a window of {policy.window}; lower chunk to at "
            f"most {largest}, or raise the budget",
            param="policy_params.chunk",
        )

    def score(self, layer: LayerView) -> Tensor:
        if layer.before is not None and layer.place % self.reuse:
            return layer.before.float().repeat(layer.kv_heads, 1)
        window = layer.window(self.window)
        tokens = window.pad(layer.all_heads(pooled(window.mean(), self.kernel)).sum(dim=0))  # [N]
        whole = F.pad(tokens, (0, -layer.num_tokens % self.chunk)).view(-1, self.chunk).sum(dim=1)
        return self._of_tokens(whole / self._lengths(layer), layer).repeat(layer.kv_heads, 1)

    def protected(self, layer: LayerView) -> Tensor:
        chunks = torch.split(super().protected(layer), self.chunk)
        return self._of_tokens(torch.stack([chunk.any() for chunk in chunks]), layer)

    def counts(self, layer: LayerView, scores: Tensor, protected: Tensor, budget: LayerBudget) -> Sequence[int]:  # noqa: ARG002
        """The tokens of the best chunks. A chunk's tokens share one score, so they are the best tokens."""
        kept, missing = self._kept_chunks(layer.num_tokens), -layer.num_tokens % self.chunk
        if missing and not layer.window(self.window).tail:  # the shorter chunk may go
            chosen = select(scores[:1, :: self.chunk], protected[:: self.chunk], [kept])
            missing *= int(chosen[0, -1])  # waits for the device
        return [kept * self.chunk - missing] * len(scores)

    def _lengths(self, layer: LayerView) -> Tensor:
        """Tokens of each chunk, `[chunks]`."""
        return torch.diff(layer.positions[:: self.chunk], append=layer.positions[-1:] + 1)

    def _of_tokens(self, of_chunks: Tensor, layer: LayerView) -> Tensor:
        return of_chunks.repeat_interleave(self.chunk)[: layer.num_tokens]

    def _kept_chunks(self, num_tokens: int) -> int:
        """Chunks to keep."""
        assert self.share is not None, "resolved by `fitted`, for it depends on the budget"
        # 20 * (1 - 0.9) is 1.99...; the small term makes it the 2 that was meant.
        return max(1, math.floor(math.ceil(num_tokens / self.chunk) * self.share + 1e-9))

    def _fits(self, document: DocumentView, budget: Budget) -> bool:
        """Whether the budget has room for one chunk, and for those that always stay."""
        chunks, before = (math.ceil(count / self.chunk) for count in (document.num_tokens, document.protected_prefix))
        always = min(chunks, before + chunks - (document.num_tokens - self.window) // self.chunk)
        return self.chunk <= budget.tokens and always <= self._kept_chunks(document.num_tokens)
