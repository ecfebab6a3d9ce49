"""The search behind `kvshelf calibrate`: which query heads retrieve, which layers suffer from compression, and whose
keys do.

After CompressKV (arXiv 2508.02401). The model reads documents with a sentence to find and answers questions about it;
each head is scored by how much it attends to the sentence while the answer is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kvshelf.artifact.identity import canonical_json, digest
from kvshelf.engine.engine import Engine
from kvshelf.engine.inputs.job import Job
from kvshelf.errors import InvalidRequest
from kvshelf.kernels.select import select
from kvshelf.methods.policies.budgets import Budget
from kvshelf.methods.policies.compresskv import CompressKV
from kvshelf.methods.policies.view import LayerView, ProbePass
from kvshelf.model.calibration import Calibration, Origin
from kvshelf.training.journal import SearchJournal
from kvshelf.training.key_search import key_similarities
from kvshelf.training.observing import observe

ANSWER_TOKENS = 32
ERROR_RATIO = 0.875
"""Fraction removed, the same in every layer, under which the layers' errors are measured. Not the paper's: its budgets
are numbers of tokens for documents of other lengths."""


@dataclass(frozen=True)
class Needle:
    """A document, the sentence in it (`document[start:end]`) that a question asks about, and its data set."""

    dataset: str
    document: str
    start: int
    end: int
    question: str


@dataclass(frozen=True)
class _Sample:
    """A needle with its job, the model's answer, and its place in the document. dialogue: question and answer, but for
    the last token, which predicts nothing."""

    dataset: str
    job: Job
    dialogue: tuple[int, ...]
    answer: tuple[int, ...]
    needle: slice

    @property
    def needle_rows(self) -> list[int]:
        """The indices of the answer's tokens that are in the needle."""
        tokens = set(self.job.document.token_ids[self.needle])
        return [i for i, token in enumerate(self.answer) if token in tokens]


def calibrate(
    engine: Engine,
    needles: Sequence[Needle],
    progress: Callable[[], None] = lambda: None,
    journal: Path | None = None,
) -> Calibration:
    """Score every query head and every layer of the model. progress: called three times per needle. journal: the file
    from which an interrupted search goes on; removed in the end.

    Raises `InvalidRequest` where no answer has a token of its needle: such answers teach nothing.
    """
    content = canonical_json([asdict(needle) for needle in needles])
    search = SearchJournal(journal, digest("kvshelf.calibration.search", engine.identity.fingerprint(), content))
    samples, scores = [], torch.zeros(1, 1, dtype=torch.float64)
    for needle in needles:
        line = search.step(answered_share, engine, needle)
        samples.append(head_sample(engine, needle, line["asked"], line["answer"]))
        scores = scores + torch.tensor(line["scores"], dtype=torch.float64)
        progress()
    if not bool(scores.any()):
        search.remove()
        raise InvalidRequest(
            f"{engine.name!r} answered none of {len(needles)} questions with words of the sentence asked for, so "
            "nothing shows which heads retrieve; give more documents, shorter ones, or another model",
            param="documents",
        )
    layers = scores.shape[0]
    even = Calibration(
        weights=engine.identity.weights,
        head_scores=tuple(map(tuple, (scores / scores.max()).tolist())),
        layer_errors=(1 / layers,) * layers,
        origin=_origin(engine, samples),
    )
    calibration = Calibration(
        weights=even.weights,
        head_scores=even.head_scores,
        layer_errors=_layer_errors(engine, samples, even, progress, search),
        key_similarities=_key_similarities(engine, samples, progress, search),
        origin=even.origin,
    )
    search.remove()
    return calibration


def retrieval_scores(engine: Engine, sample: _Sample) -> Tensor:
    """Each query head's attention to the needle, summed over the rows that write its tokens: `[layers, q_heads]`
    fp64."""
    scores: dict[int, Tensor] = {}

    def judge(layer: LayerView) -> None:
        window = layer.window(len(sample.answer))
        mass = [
            window.attention(head)[:, sample.needle_rows, sample.needle].double().sum(dim=(1, 2))
            for head in range(layer.kv_heads)
        ]
        scores[layer.layer_idx] = torch.cat(mass).cpu()

    observe(engine, sample.job, judge, [_dialogue_pass(sample)])
    return torch.stack([scores[layer] for layer in sorted(scores)])


def layer_errors(engine: Engine, sample: _Sample, calibration: Calibration) -> Tensor:
    """||O_c - O||_F / (||O||_F + 1e-5) of each layer, `[layers]` fp64. O is the attention output (before W_o) of
    question and answer; O_c is that over the document as CompressKV would reduce it, but with equal budgets."""
    errors: dict[int, float] = {}
    document = replace(sample.job.document, calibration=calibration)
    ending = [ProbePass(document.suffix, document.num_tokens)] if document.suffix else []

    def measure(layer: LayerView) -> None:
        view = replace(layer, document=document, probes=layer.probes[:-1])
        policy = CompressKV().fitted(document, Budget.full(document.num_tokens), frozenset())
        count = max(1, round(layer.num_tokens * (1 - ERROR_RATIO)))
        kept = select(policy.score(view), policy.protected(view), [count] * layer.kv_heads)
        full = _output(layer, kept.new_ones(kept.shape))
        reduced = _output(layer, kept)
        errors[layer.layer_idx] = float((reduced - full).norm() / (full.norm() + 1e-5))

    observe(engine, sample.job, measure, [*ending, _dialogue_pass(sample)])
    return torch.tensor([errors[layer] for layer in sorted(errors)], dtype=torch.float64)


def _layer_errors(
    engine: Engine, samples: Sequence[_Sample], even: Calibration, progress: Callable[[], None], search: SearchJournal
) -> tuple[float, ...]:
    """Errors summed over the samples of a data set, scaled to a total of 1, and averaged over the data sets."""
    sums: dict[str, Tensor] = {}
    for sample in samples:
        errors = search.step(lambda sample: layer_errors(engine, sample, even).tolist(), sample)
        sums[sample.dataset] = torch.tensor(errors, dtype=torch.float64) + sums.get(sample.dataset, 0.0)
        progress()
    shares = torch.stack([total / total.sum() for total in sums.values()]).mean(dim=0)
    return tuple(shares.tolist())


def _key_similarities(
    engine: Engine, samples: Sequence[_Sample], progress: Callable[[], None], search: SearchJournal
) -> tuple[float, ...]:
    """The mean of the samples' documents."""
    cosines = []
    for sample in samples:
        cosines.append(search.step(key_similarities, engine, sample.job.document.token_ids))
        progress()
    return tuple(torch.tensor(cosines, dtype=torch.float64).mean(dim=0).tolist())


def _output(layer: LayerView, kept: Tensor) -> Tensor:
    """Attention output of the last probe pass over the document's `kept` `[kv_heads, N]` and itself: `[q_heads, T, Dv]`
    fp32."""
    probed = layer.probes[-1]
    keys = torch.cat([layer.keys, probed.keys], dim=1).float()
    values = torch.cat([layer.values, probed.values], dim=1).float()
    group = probed.queries.shape[0] // layer.kv_heads
    rows = probed.queries.shape[1]
    causal = torch.ones(rows, rows, dtype=torch.bool, device=kept.device).tril()
    document = kept.repeat_interleave(group, dim=0).unsqueeze(1).expand(-1, rows, -1)  # [q_heads, T, N]
    visible = torch.cat([document, causal.expand(len(document), -1, -1)], dim=2)
    out = F.scaled_dot_product_attention(
        probed.queries[None].float(), keys[None], values[None], attn_mask=visible[None], scale=layer.scaling,
        enable_gqa=True,
    )  # fmt: skip
    return out[0]


def answered_share(engine: Engine, needle: Needle) -> dict[str, Any]:
    """A question with the model's answer, and the scores of all heads, as a line of the journal."""
    job = engine.prepare(needle.document, policy="full")
    cache = engine.run(job).cache
    query = engine.encode_query(cache, needle.question)
    answer = list(engine.answer(cache, query, max_new_tokens=ANSWER_TOKENS).token_ids)
    dialogue = [*query, *answer[:-1]]
    scores = retrieval_scores(engine, head_sample(engine, needle, dialogue, answer)).tolist()
    return {"asked": dialogue, "answer": answer, "scores": scores}


def head_sample(engine: Engine, needle: Needle, dialogue: Sequence[int], answer: Sequence[int]) -> _Sample:
    text = engine.encoder.require_text("documents")
    job = engine.prepare(needle.document, policy="full")
    # The space before a word is part of its token.
    first, last = (text.count_tokens(needle.document[:at].rstrip()) for at in (needle.start, needle.end))
    prefix = job.document.protected_prefix
    return _Sample(needle.dataset, job, tuple(dialogue), tuple(answer), slice(prefix + first, prefix + last))


def _dialogue_pass(sample: _Sample) -> ProbePass:
    return ProbePass(sample.dialogue, sample.job.num_tokens)


def _origin(engine: Engine, samples: Sequence[_Sample]) -> Origin:
    generated = sum(len(sample.answer) for sample in samples)
    return Origin(
        model=engine.name,
        documents=len(samples),
        tokens=max(sample.job.num_tokens for sample in samples),
        answered=sum(len(sample.needle_rows) for sample in samples) / generated,
        compression_ratio=ERROR_RATIO,
    )
