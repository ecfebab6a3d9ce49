"""What is asked behind a document to see how well a changed cache predicts, and what errors in that cache would cost.

The cost of small errors is their Fisher information: half its product with the errors' covariance is the KL of the
predictions. It is the mean of g g^T, for gradients g of the log-probability of tokens drawn from the predictions; one
backward pass gives it for all layers, keys and values at once, where KL is still quadratic in the errors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.coded import FIRST_TOKENS
from kvshelf.engine.attention.attached import CACHE_ARGUMENT
from kvshelf.methods.policies.view import DocumentView

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvshelf.engine.engine import Engine
from kvshelf.engine.exclusions import rope_to_undo

_CUES: Final = 16
_NEXT: Final = 128
"""Cues of each text, and tokens of its end that are predicted. Plain text alone hardly reads what is far away."""
_QUOTED, _SKIPPED, _ANSWER = 10, 2, 4
"""Tokens of a cue, those of the document behind it that are left out, and those that are predicted then. Without a gap,
copying word by word decides what matters: on SmolLM2, late layers then have bytes that early ones need."""


@dataclass(frozen=True, eq=False)
class Asked:
    """A document's full cache, and one pass behind it: the tokens that follow the document, then cues taken from it.

    predicting: the tokens of the pass whose predictions count, in two parts, which count alike.
    """

    cache: CompressedCache
    token_ids: tuple[int, ...]
    predicting: tuple[range, list[int]]

    @classmethod
    def about(cls, engine: Engine, ids: Sequence[int]) -> Asked | None:
        """One prefill of all but the last `_NEXT` of these tokens. None for a text too short to have a cue."""
        end = len(ids) - min(_NEXT, len(ids) // 4)
        read = list(ids[:end])
        job = engine.prepare(read if engine.text is None else engine.text.decode(read), policy="full")
        starts = _starts(job.document)
        if not starts:
            return None
        asked, answers = list(ids[end:]), list[int]()
        following = range(len(asked) - 1)
        for start in starts:
            answer = start + _QUOTED + _SKIPPED
            quoted = slice(start, start + _QUOTED)
            asked += job.document.cue(quoted, slice(answer, answer + _ANSWER)).token_ids
            answers += range(len(asked) - 1 - _ANSWER, len(asked) - 1)
        return cls(engine.run(job).cache, tuple(asked), (following, answers))

    def predictions(self, engine: Engine, cache: CompressedCache) -> tuple[Tensor, ...]:
        """Log-probabilities `[predicted, vocabulary]` fp32 of each part."""
        places = [place for part in self.predicting for place in part]
        with torch.no_grad(), engine.attached(cache) as past:
            ids = torch.tensor([self.token_ids], device=engine.passes.devices.inputs)
            logits: Tensor = engine.model(ids, logits_to_keep=places, **{CACHE_ARGUMENT: past}).logits[0]
        return logits.float().log_softmax(dim=-1).split([len(part) for part in self.predicting])  # type: ignore[no-any-return, no-untyped-call]

    def divergence(self, exact: Sequence[Tensor], other: Sequence[Tensor]) -> float:
        """KL in nats from some predictions to others: the mean of both parts' means."""
        return sum(_kl(*pair) for pair in zip(exact, other, strict=True)) / len(exact)

    def information(self, engine: Engine) -> list[tuple[Tensor, Tensor]]:
        """The Fisher information of the predictions about keys without rotation and about values, of each layer: a
        block `[H, D, D]` fp64 for each head, summed over the document's tokens but the first, on the CPU."""
        past = engine.export(self.cache, "absolute")
        states = [(layer.keys.detach(), layer.values.detach()) for layer in past.layers]
        for layer, own in zip(past.layers, states, strict=True):
            layer.keys, layer.values = (each.requires_grad_() for each in own)
        places = [place for part in self.predicting for place in part]
        ids = torch.tensor([self.token_ids], device=engine.passes.devices.inputs)
        with torch.enable_grad(), _frozen(engine.model):
            given = {CACHE_ARGUMENT: past, "use_cache": True, "logits_to_keep": places}
            logits: Tensor = engine.model(ids, **given).logits[0]
            self._drawn(logits.float().log_softmax(dim=-1)).backward()  # type: ignore[no-untyped-call]
        rope, positions = rope_to_undo(engine.facts), torch.arange(self.cache.num_tokens)
        found = []
        for keys, values in states:
            assert keys.grad is not None
            assert values.grad is not None
            by_key = rope.transposed(keys.grad[0].float(), positions.to(keys.device))
            found.append((_blocks(by_key), _blocks(values.grad[0].float())))
        return found

    def _drawn(self, log_probs: Tensor) -> Tensor:
        """The weighted log-probability of one token for each prediction, drawn from it: always the same ones."""
        generator = torch.Generator().manual_seed(0)
        tokens = torch.multinomial(log_probs.detach().exp().cpu(), 1, generator=generator).to(log_probs.device)
        weights = [(1 / (len(self.predicting) * len(part))) ** 0.5 for part in self.predicting for _ in part]
        return (log_probs.gather(1, tokens)[:, 0] * torch.tensor(weights, device=log_probs.device)).sum()


def _starts(document: DocumentView) -> range:
    """Where the cues of a document begin."""
    first, last = document.protected_prefix, document.num_tokens - _QUOTED - _SKIPPED - _ANSWER
    return range(first, last + 1, max(1, (last - first) // _CUES + 1))


def _blocks(gradients: Tensor) -> Tensor:
    rows = gradients[:, FIRST_TOKENS:].cpu()
    return (rows.mT @ rows).double()


@contextmanager
def _frozen(model: PreTrainedModel) -> Iterator[None]:
    """Inside the block no gradient of the model's own weights is made."""
    learning = [weight for weight in model.parameters() if weight.requires_grad]
    for weight in learning:
        weight.requires_grad_(False)
    try:
        yield
    finally:
        for weight in learning:
            weight.requires_grad_()


def _kl(exact: Tensor, other: Tensor) -> float:
    return max(0.0, float((exact.exp() * (exact - other)).sum(dim=-1).mean()))
