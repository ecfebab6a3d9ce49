"""One prefill of a document, and the compressed cache of each of its levels."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

import torch
from torch import Tensor

from kvshelf.api import Quality
from kvshelf.artifact.cache import CompressedCache
from kvshelf.engine.attention.function import kvshelf_attention
from kvshelf.engine.attention.inspection import require_every_layer
from kvshelf.engine.forward.calls import Calls, with_layers
from kvshelf.engine.forward.passes import Passes
from kvshelf.engine.inputs.job import Job, Level
from kvshelf.engine.prefill import stateful
from kvshelf.engine.prefill.appending import continued, resumed
from kvshelf.engine.prefill.chunked import ChunkedPrefill
from kvshelf.engine.prefill.reducing import LayerReducer, Scorer, SharedReducer
from kvshelf.engine.prefill.surprise import Surprise, surprises
from kvshelf.engine.progress import Checkpoint, Progress, nothing
from kvshelf.engine.quality import Probe, Reference, ask, ask_without, rows_at_once
from kvshelf.engine.soft import Placed, placed_images
from kvshelf.engine.summary import KeyCoder, SummaryMaker
from kvshelf.methods.method import Needs
from kvshelf.methods.policies.registry import everything
from kvshelf.model.layers import attending, reducible

Encode = Callable[[CompressedCache, str], CompressedCache]
"""`Engine.encoded`."""


@dataclass(frozen=True)
class Compression:
    """A compressed cache and the seconds of its prefill and its compression, without pauses at checkpoints. Levels that
    share a prefill each report its full time. quality: None if it was not measured."""

    cache: CompressedCache
    prefill_s: float
    compress_s: float
    quality: Quality | None = None


@dataclass(frozen=True)
class Prefill:
    """A compression for each level, in order, and the full cache's answers to the probe, if there was one."""

    compressions: list[Compression]
    reference: Reference | None


def run_prefill(
    passes: Passes,
    group: Sequence[Level],
    probe: Probe | None,
    checkpoint: Checkpoint,
    encode: Encode,
    progress: Progress,
    coder: KeyCoder | None,
) -> Prefill:
    """Prefill one group of `job.shared`. The full cache answers `probe`; without a probe there is no reference.

    checkpoint: called between layers, after `progress`; no compression counts their time. coder: makes the summary of
    the document, which all levels share; a document read chunk by chunk has none.
    """
    kinds = passes.kinds
    # Levels that differ in nothing but the codec are reduced together.
    jobs = list({id(level.job): level.job for level in group}.values())
    first, absorber = jobs[0], jobs[0].absorber
    surprising = sum(map(surprises, jobs))
    rounds = (1 if absorber is None else len(absorber.chunks)) + bool(surprising and first.parent is None)
    counted = _counted(checkpoint, progress, len(attending(kinds)) * rounds)
    surprise = Surprise.of(passes, first, checkpoint, counted) if surprising else Surprise()
    placed, images_s = placed_images(passes.facts.images, first.images, first.document.token_ids, checkpoint)
    reducers: Sequence[LayerReducer | ChunkedPrefill]
    summary = SummaryMaker(None if first.images else coder, first.num_tokens, first.document.first_position)
    apart = absorber is None and (first.parent is not None or any(kind.states for kind in kinds))
    started = time.perf_counter()
    with torch.no_grad(), kvshelf_attention(passes.model):
        if absorber is not None:
            chunked = ChunkedPrefill(first, kinds=kinds, rope=passes.facts.rope, checkpoint=counted)
            chunked.run(passes.model, first.document.token_ids)
            reducers, paused_s, reference = [chunked], chunked.paused_s, None
        else:
            reducers = of_jobs = [_reducer(passes, job, surprise) for job in jobs]
            measured = () if apart or probe is None else probe.passes
            shared = SharedReducer(of_jobs, [len(cue.token_ids) for cue in measured], counted, summary)
            shared.projection = passes.projection if shared.needs(Needs.INPUTS) else None
            modules = with_layers(passes.model) if shared.needs(Needs.CALL) else []
            modules += [] if shared.projection is None else shared.projection.layers
            shared.calls = Calls(passes.model, modules) if modules else None
            reference = _apart(passes, first, probe, shared) if apart else _whole(passes, first, probe, shared, placed)
            paused_s = shared.paused_s
        joined = tuple if passes.ranks is None else passes.ranks.joined
        records = [joined(reducer.records()) for reducer in reducers]
        codes = summary.summary
    elapsed = time.perf_counter() - started - paused_s - (reference.probe_s if reference is not None else 0)
    if reference is not None and probe is not None and not apart:
        probe_s = elapsed * probe.num_tokens / (probe.num_tokens + first.run_tokens)
        reference = replace(reference, probe_s=reference.probe_s + probe_s)
        elapsed -= probe_s
    prefill_s = elapsed + images_s - sum(reducer.compress_s for reducer in reducers)
    compressions: dict[int, Compression] = {}
    for job, layers, reducer in zip(jobs, records, reducers, strict=True):
        next_position = job.policy.next_position(job.num_tokens, job.budget)
        ends = job.document.stored_sentence_ends
        cache = CompressedCache(layers, job.num_tokens, next_position, job.identity, sentence_ends=ends, summary=codes)
        read_again_s = surprise.seconds / surprising if surprises(job) else 0.0  # shared by the jobs that need it
        compressions[id(job)] = Compression(cache, prefill_s, reducer.compress_s + read_again_s)
    return Prefill([_finished(level, compressions[id(level.job)], encode) for level in group], reference)


def _finished(level: Level, compression: Compression, encode: Encode) -> Compression:
    """A compression under the codec of its level, with its parent if it has one. Raises as `encode`."""
    started = time.perf_counter()
    if level.job.parent is None:
        cache = encode(compression.cache, level.codec)
    elif level.job.absorber is None:
        cache = continued(level.job.parent, compression.cache, level.identity, level.job.budget.tokens)
    else:
        cache = resumed(level.job.parent, compression.cache, level.identity)
    cache.events  # noqa: B018 - recorded before the card is given other work
    return replace(compression, cache=cache, compress_s=compression.compress_s + time.perf_counter() - started)


def _counted(checkpoint: Checkpoint, progress: Progress, total: int) -> Checkpoint:
    """A checkpoint that first reports how many layers are done, over all chunks."""
    numbers = count(1)
    progress("prefill", 0, total)

    def counted() -> None:
        progress("prefill", next(numbers), total)
        checkpoint()

    return counted


def run_scores(passes: Passes, job: Job, checkpoint: Checkpoint) -> list[Tensor]:
    """The scores of the job's policy, a `ScoringPolicy`, for each layer that policies reduce: `[kv_heads, N]` fp32."""
    kinds, lengths = passes.kinds, tuple(len(probe.token_ids) for probe in job.passes)
    document = job.document
    if Needs.SURPRISALS in job.policy.needs:
        document = Surprise.of(passes, job, checkpoint).added_to(document)
    scorer = Scorer(job.policy, document, job.budget, kinds, lengths, passes.facts.rope, passes.ranks)
    if any(kind.states for kind in kinds):
        for attended in stateful.Read.of(passes, job, checkpoint, queries=True).probed(job.passes):
            scorer.after_attention(attended)
    else:
        shared = SharedReducer([scorer], (), checkpoint, SummaryMaker(None, job.num_tokens))
        placed, _ = placed_images(passes.facts.images, job.images, job.document.token_ids, checkpoint)
        passes.causal(job.inputs(passes.devices.inputs), shared, soft=job.soft, placed=placed)
    layers = reducible(kinds)
    require_every_layer(scorer.scores, layers)
    return [scorer.scores[layer] for layer in layers]


def _whole(
    passes: Passes, job: Job, probe: Probe | None, reducer: SharedReducer, placed: Placed | None
) -> Reference | None:
    """One pass over the document and all probe passes. Returns the full cache's answers to `probe`."""
    device, measured = passes.devices.inputs, () if probe is None else probe.passes
    inputs, with_logits = job.inputs(device, measured), probe is not None
    logits = passes.causal(inputs, reducer, logits=with_logits, soft=job.soft, calls=reducer.calls, placed=placed)
    if logits is None or probe is None:
        return None
    rows = rows_at_once(passes.model)

    def parts(tokens: Tensor) -> Iterator[Tensor]:
        return (logits(part)[0] for part in torch.split(tokens, rows))

    predicting = probe.predicting(inputs["input_ids"].shape[1] - probe.num_tokens, device)
    return Reference.of(job.identity.document, probe, parts(predicting), parts(probe.reading(device)))


def _apart(passes: Passes, job: Job, probe: Probe | None, reducer: SharedReducer) -> Reference | None:
    """As `_whole`, for a model with recurrent states and for appended tokens: see `prefill.stateful`."""
    reference = None
    if probe is None and not job.passes:
        states = stateful.read(passes, job, reducer)
    else:
        document = stateful.Read.of(passes, job, reducer.checkpoint, queries=reducer.sees_queries)
        reducer.checkpoint = nothing  # it was called while the document was read
        for attended in document.probed(job.passes):
            reducer.after_attention(attended)
        reducer.paused_s, states = document.paused_s, document.states
        if probe is not None:
            started = time.perf_counter()
            with document.attached() as past:
                full, before = ask(passes.model, probe, past), ask_without(passes.model, probe)
                reference = Reference.of(job.identity.document, probe, full, before)
            reference = replace(reference, probe_s=time.perf_counter() - started)
    for of_job in reducer.reducers:
        of_job.states = states
    return reference


def _reducer(passes: Passes, job: Job, surprise: Surprise) -> LayerReducer:
    return LayerReducer(
        job.policy if job.policy.has_work(job.budget, job.num_tokens) else everything(),
        surprise.added_to(job.document),
        job.budget,
        passes.kinds,
        tuple(len(probe.token_ids) for probe in job.passes),
        passes.facts.rope,
        passes.ranks,
        () if job.parent is None else job.parent.plain.layers,
    )
