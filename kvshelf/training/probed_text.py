"""A pass behind a text, to see how well a changed cache predicts, and what errors in the cache would cost.

The cost of small errors follows from the Fisher information: half its product with the errors' covariance is the KL of
the predictions. It is the mean of g g^T, for gradients g of the log-probability of tokens drawn from the predictions;
one backward pass gives it for all layers, keys and values at once, where KL is still quadratic in the errors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.coded import FIRST_TOKENS
from kvshelf.engine.attention.attached import CACHE_ARGUMENT
from kvshelf.engine.exclusions import rope_to_undo

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvshelf.engine.engine import Engine

_CUES: Final = 16
_NEXT: Final = 128
"""Cues of each text, and tokens of its end that are predicted. Plain text alone hardly attends far back."""
_QUOTED, _SKIPPED, _ANSWER = 10, 2, 4
"""Tokens of a cue, those of the document behind it that are left out, and those that are predicted then. Without a gap,
copying word by word decides what matters: on SmolLM2, late layers then have bytes that early ones need."""


@dataclass(frozen=True, eq=False)
class ProbedText:
    """A document's full cache, and the tokens of one pass behind it: those that follow the document, then cues.

    predicting: the tokens of the pass whose predictions count, in two parts of equal weight.
    """

    cache: CompressedCache
    token_ids: tuple[int, ...]
    predicting: tuple[range, list[int]]

    @classmethod
    def of(cls, engine: Engine, ids: Sequence[int]) -> ProbedText | None:
        """One prefill of all but the last `_NEXT` of these tokens. None for a text too short for a cue."""
        end = len(ids) - min(_NEXT, len(ids) // 4)
        read = list(ids[:end])
        job = engine.prepare(read if engine.text is None else engine.text.decode(read), policy="full")
        first, last = job.document.protected_prefix, job.document.num_tokens - _QUOTED - _SKIPPED - _ANSWER
        starts = range(first, last + 1, max(1, (last - first) // _CUES + 1))
        if not starts:
            return None
        token_ids, answers = list(ids[end:]), list[int]()
        following = range(len(token_ids) - 1)
        for start in starts:
            answer = start + _QUOTED + _SKIPPED
            quoted = slice(start, start + _QUOTED)
            token_ids += job.document.cue(quoted, slice(answer, answer + _ANSWER)).token_ids
            answers += range(len(token_ids) - 1 - _ANSWER, len(token_ids) - 1)
        return cls(engine.run(job).cache, tuple(token_ids), (following, answers))

    def predictions(self, engine: Engine, cache: CompressedCache) -> tuple[Tensor, ...]:
        """Log-probabilities `[predicted, vocabulary]` fp32 of each part."""
        with torch.no_grad(), engine.attached(cache) as past:
            log_probs = self._log_probs(engine, past)
        return log_probs.split([len(part) for part in self.predicting])  # type: ignore[no-any-return, no-untyped-call]

    def divergence(self, exact: Sequence[Tensor], other: Sequence[Tensor]) -> float:
        """KL in nats from some predictions to others: the mean of both parts' means."""
        parts = [float((p.exp() * (p - q)).sum(dim=-1).mean()) for p, q in zip(exact, other, strict=True)]
        return sum(max(0.0, kl) for kl in parts) / len(parts)

    def information(self, engine: Engine) -> list[tuple[Tensor, Tensor]]:
        """The Fisher information of the predictions about keys without rotation and about values, of each layer: a
        block `[H, D, D]` fp64 for each head, summed over the document's tokens but the first, on the CPU."""
        past = engine.export(self.cache, "absolute")
        for layer in past.layers:
            layer.keys, layer.values = layer.keys.detach().requires_grad_(), layer.values.detach().requires_grad_()
        states = [(layer.keys, layer.values) for layer in past.layers]
        with torch.enable_grad(), _frozen(engine.model):
            self._drawn(self._log_probs(engine, past, use_cache=True)).backward()  # type: ignore[no-untyped-call]
        rope, positions = rope_to_undo(engine.facts), torch.arange(self.cache.num_tokens)
        information = []
        for keys, values in states:
            assert keys.grad is not None
            assert values.grad is not None
            by_key = rope.transposed(keys.grad[0].float(), positions.to(keys.device))
            information.append((_blocks(by_key), _blocks(values.grad[0].float())))
        return information

    def _log_probs(self, engine: Engine, past: Any, **options: Any) -> Tensor:
        """Log-probabilities `[predicted, vocabulary]` fp32 of the pass behind a cache."""
        places = [place for part in self.predicting for place in part]
        ids = torch.tensor([self.token_ids], device=engine.passes.devices.inputs)
        logits: Tensor = engine.model(ids, logits_to_keep=places, **{CACHE_ARGUMENT: past}, **options).logits[0]
        return logits.float().log_softmax(dim=-1)

    def _drawn(self, log_probs: Tensor) -> Tensor:
        """The weighted log-probabilities of one token for each prediction, drawn from it with a fixed seed, summed."""
        generator = torch.Generator().manual_seed(0)
        tokens = torch.multinomial(log_probs.detach().exp().cpu(), 1, generator=generator).to(log_probs.device)
        weights = [(1 / (len(self.predicting) * len(part))) ** 0.5 for part in self.predicting for _ in part]
        return (log_probs.gather(1, tokens)[:, 0] * torch.tensor(weights, device=log_probs.device)).sum()


def _blocks(gradients: Tensor) -> Tensor:
    rows = gradients[:, FIRST_TOKENS:].cpu()
    return (rows.mT @ rows).double()


@contextmanager
def _frozen(model: PreTrainedModel) -> Iterator[None]:
    """Inside the block the model's own weights get no gradients."""
    learning = [weight for weight in model.parameters() if weight.requires_grad]
    for weight in learning:
        weight.requires_grad_(False)
    try:
        yield
    finally:
        for weight in learning:
            weight.requires_grad_()
