"""Compressing documents by one model: their jobs, the prefills of these, and the quality of the caches."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Unpack

import torch
from torch import Tensor

from kvshelf.api import Quality
from kvshelf.api.options import Rules, has_images
from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.codecs import Codec
from kvshelf.engine.attachments import Attachments
from kvshelf.engine.attention.attachment import Attachment
from kvshelf.engine.coders import Coders
from kvshelf.engine.episodes import Episode, episodes_in
from kvshelf.engine.exclusions import Combination, require_possible
from kvshelf.engine.forward.passes import Passes
from kvshelf.engine.inputs.encode import Document, Encoder, EncodingFields
from kvshelf.engine.inputs.job import Job, Level, Parent, shared
from kvshelf.engine.inputs.prepare import Preparer
from kvshelf.engine.options import CompressOptions
from kvshelf.engine.prefill.prefill import Compression, Prefill, run_prefill, run_scores
from kvshelf.engine.progress import Checkpoint, Progress, nothing
from kvshelf.engine.quality import BATCH, CUES, CueAgreement, Probe, Reference, ask, ask_without, exact
from kvshelf.engine.summary import Searcher
from kvshelf.errors import DocumentTooLong, InvalidRequest, PolicyUnsupported
from kvshelf.kernels import ans
from kvshelf.model.text import EncodedDocument


class Compressor:
    """Prepares and compresses the documents of one model. The methods that prepare are thread-safe: the model does not
    run."""

    def __init__(
        self,
        passes: Passes,
        encoder: Encoder,
        preparer: Preparer,
        coders: Coders,
        attachments: Attachments,
        searcher: Searcher,
    ) -> None:
        self._passes = passes
        self._facts = passes.facts
        self._encoder = encoder
        self._preparer = preparer
        self._coders = coders
        self._attachments = attachments
        self._searcher = searcher

    # Preparing

    def prepare(
        self, document: Document | EncodedDocument, options: CompressOptions, **encoding: Unpack[EncodingFields]
    ) -> Job:
        """See `Engine.prepare`."""
        policy = options.built()
        encoded = document
        if not isinstance(encoded, EncodedDocument):
            encoded = self._encoder.document(
                encoded,
                encoding.get("layout"),
                variables=encoding.get("chat_template_kwargs"),
                protect=encoding.get("protect", ()),
            )
        view = self._encoder.view(encoded, options.expected_questions)
        budget = options.budget(policy, self._preparer.of_model(view))
        chosen, questions = options.chosen_params, options.expected_questions
        return self._preparer.job(view, policy, budget, encoded=encoded, chosen=chosen, questions=questions)

    def prepare_append(
        self, cache: CompressedCache, more: Document | EncodedDocument, options: CompressOptions, protect: Rules = ()
    ) -> Job:
        """Check and tokenize a document that is to be appended to a cache; no work of the model.

        The appended tokens are read behind the cache as it is stored and reduced by themselves: budget and ratio are of
        them alone. By default the policy and the ratio are those of the cache; parameters that are left out are the
        policy's defaults. protect: rules of the appended document.

        With parameter prefill "chunked" the cache's policy goes on instead (`ChunkedPolicy.resumes`): the entries of
        the cache compete with the tokens, budget and ratio are of all, and parameters that are left out are the
        cache's.

        So this differs from compressing the whole text anew: the tokens do not see entries that the parent's policy
        removed; outside chunks no policy compares them with earlier ones; and a text is tokenized apart from the text
        that it follows.

        Raises `InvalidRequest`, `DocumentTooLong`, `DocumentTooShort`, `ModelMismatch`, and `PolicyUnsupported` for a
        policy, of the cache or of this call, that cannot go on.
        """
        self._attachments.require_own(cache)
        appends_images = bool(more.images) if isinstance(more, EncodedDocument) else has_images(more)
        require_possible(Combination(facts=self._facts, verb="append", cache=cache, appends_images=appends_images))
        identity, longest = cache.identity, self._facts.longest(cache.num_tokens)
        encoded = self._encoder.appended(identity, more, protect)
        options = options.behind(identity)
        policy, appended = options.built(identity.policy), len(encoded.token_ids)
        view = replace(self._encoder.view(encoded, options.expected_questions), first_position=cache.num_tokens)
        if cache.num_tokens + appended > longest:
            raise DocumentTooLong(
                f"the cache is of {cache.num_tokens} tokens, and {appended} more are beyond the {longest} that "
                f"{self._facts.name!r} takes behind it; append less, or begin another cache",
                param="document",
            )
        if not isinstance(more, EncodedDocument):  # a turn that has been answered is kept, though it may be the last
            self._encoder.require_question(cache.num_tokens, encoded.boundary, encoded.options, appended)
        ratio = identity.compression_ratio if options.policy in (None, identity.policy) else None
        before = cache if policy.resumes(identity) else None
        budget = options.budget(policy, self._preparer.of_model(view), ratio, before=before)
        coder, decoder = self._coders.of(identity), self._coders.decoder_of(cache)
        parent = Parent(cache, coder, decoder, self._passes.devices.layers, self._facts.rotate)
        chosen, questions = options.chosen_params, options.expected_questions
        return self._preparer.job(
            view, policy, budget, encoded=encoded, chosen=chosen, questions=questions, parent=parent
        )

    def episodes(self, document: Document, count: int = 4) -> list[Episode]:
        """The episodes of a conversation, from its messages or from a text, whose paragraphs (or sentences, where there
        are few) count as utterances. Raises `InvalidRequest`."""
        return episodes_in(document, count, self._encoder.require_text("episodes").encode)

    def level(self, job: Job, codec: str = "none") -> Level:
        """A job with the codec of its cache; tokens that are appended to a cache have its codec, whatever `codec` is.
        Raises `InvalidRequest` for an unknown codec and for shares of more than the job keeps, and as `Coders.own`."""
        if job.parent is not None:
            coder = job.parent.coder
            return Level(job, job.parent.cache.codec, None if coder is None else coder.transforms)
        chosen = Codec.parse(codec)
        chosen.require_kept(job.budget.tokens, job.num_tokens)
        require_possible(Combination(facts=self._facts, policy=job.policy, document=job.document, codec=chosen))
        if chosen.name == "klt":
            ans.require_encoder()
        return Level(job, codec, self._coders.own.transforms if chosen.name == "klt" else None)

    # Compressing

    def prefill(
        self,
        group: Sequence[Level],
        *,
        cues: int = 0,
        checkpoint: Checkpoint | None = None,
        progress: Progress | None = None,
    ) -> Prefill:
        """Prefill one group of `job.shared`. During the prefill the full cache answers up to `cues` cues of the
        document; where there are none (0, or `probe` returns None) the result has no reference to measure by."""
        return run_prefill(
            self._passes,
            group,
            self.probe(group[0].job, cues),
            checkpoint or nothing,
            self._coders.encoded,
            progress or nothing,
            self._searcher.key_coder_or_none,
        )

    def levels(
        self,
        levels: Sequence[Level],
        *,
        cues: int = CUES,
        checkpoint: Checkpoint | None = None,
        progress: Progress | None = None,
    ) -> list[Compression]:
        """Compress one document at several levels and measure the quality of each. In the order of `levels`.

        Levels whose policies need the same probe passes share a prefill (`job.shared` says which do not). Quality is
        measured on up to `cues` cues of the document; 0 measures nothing. A level that keeps the full cache has quality
        1 by definition, and one cue shows that it can answer. A level gets the same bytes as from `Engine.run` and its
        codec, except for last bits where a device sums longer calls in another order. All levels of a prefill are in
        memory at once. Encoding counts as compression time. `progress` is told of each layer and each measured level.
        """
        compressions: dict[int, Compression] = {}
        for group in shared(levels):
            num_cues = min(cues, 1) if all(level.loses_nothing for level in group) else cues
            prefill = self.prefill(group, cues=num_cues, checkpoint=checkpoint, progress=progress)
            for number, (level, compression) in enumerate(zip(group, prefill.compressions, strict=True)):
                if prefill.reference is not None:
                    (progress or nothing)("quality", number, len(group))
                    quality = self.measure(compression.cache, prefill.reference)
                    if level.loses_nothing:
                        quality = exact(level.job.num_tokens, quality.probe_s)
                    compression = replace(compression, quality=quality)
                    (progress or nothing)("quality", number + 1, len(group))
                    (checkpoint or nothing)()
                compressions[id(level)] = compression
        return [compressions[id(level)] for level in levels]

    def scores(self, job: Job, *, checkpoint: Checkpoint | None = None) -> list[Tensor]:
        """The scores of the job's policy in each layer, `[kv_heads, N]` fp32; entries with higher scores are kept. They
        do not depend on the budget.

        For methods built on scores: another way to share a budget, or gates trained to foretell them. Raises
        `InvalidRequest` for a policy without scores, and for one that reads the document chunk by chunk.
        """
        self._require_scores(job)
        return run_scores(self._passes, job, checkpoint or nothing)

    def _require_scores(self, job: Job) -> None:
        if job.policy.scorer is None or job.absorber is not None:
            raise InvalidRequest(f"policy {job.policy.name!r} gives no scores of the whole document", param="policy")

    # Measuring

    def probe(self, job: Job, cues: int = CUES) -> Probe | None:
        """The probe that measures the quality of a document's caches; None if `cues` is 0 or it is impossible.

        No probe is possible for a document too short to ask about; for a document read chunk by chunk, because there is
        never a full cache to compare with; without room for a cue behind the document; and under a RoPE that changes,
        or may change, with the length, so that later tokens would change earlier keys.
        """
        if not cues or job.absorber is not None or self._facts.one_by_one:
            return None
        probe = Probe.of(job.document, cues)
        if probe is None or job.document.end + probe.length > self._facts.max_tokens:
            return None
        return probe

    def reference(
        self, job: Job, full: CompressedCache, checkpoint: Checkpoint = nothing, *, cues: int = CUES
    ) -> Reference | None:
        """The answers of a full cache of the job's document, made earlier, to the document's cues; None where `probe`
        returns None. A prefill that is yet to run makes its own, which is cheaper. checkpoint: called between parts of
        the cues."""
        probe = self.probe(job, cues)
        if probe is None:
            return None
        started, document, model = time.perf_counter(), self._attachments.of(full), self._facts.model
        numbers = range(len(probe.places))
        parts = [probe.only(numbers[first : first + BATCH]) for first in numbers[::BATCH]]

        def behind() -> Iterator[Tensor]:
            for part in parts:
                with self._answering(document, part) as logits:
                    yield from logits
                checkpoint()

        def without() -> Iterator[Tensor]:
            for part in parts:
                with torch.no_grad():
                    logits = list(ask_without(model, part))
                yield from logits
                checkpoint()

        reference = Reference.of(job.identity.document, probe, behind(), without())
        return replace(reference, probe_s=time.perf_counter() - started)

    def measure(
        self, cache: CompressedCache, reference: Reference, floor: float | None = None, checkpoint: Checkpoint = nothing
    ) -> Quality:
        """How close `cache` is to the full cache of its document; `reference` is from the prefill of that document.

        floor: the least `low` that the caller accepts. Asking ends early where even `high` is below it. It does not end
        where `low` is above it: a bound that is looked at after each batch is none. checkpoint: called after each
        batch. Raises `InvalidRequest` for a cache of another document, `ModelMismatch` for one of another model, and
        `PolicyUnsupported` where the model's logits are not numbers: no policy would help.
        """
        if cache.identity.document != reference.document:
            raise InvalidRequest("the reference is of another document than the cache; use that of its own prefill")
        started = time.perf_counter()
        quality = reference.undecided()
        document, answered = self._attachments.of(cache), list[CueAgreement]()
        for cues in reference.batches(floor) if reference.probe.places else ():
            with self._answering(document, reference.probe.only(cues)) as logits:
                answered += reference.answered(cues, logits)
            quality = reference.quality(answered)
            checkpoint()
            if floor is not None and quality.high is not None and quality.high < floor:
                break
        quality = quality.model_copy(update={"probe_s": reference.probe_s + time.perf_counter() - started})
        if not (reference.finite and math.isfinite(quality.kl)):
            raise PolicyUnsupported(
                f"behind this document the logits of {self._facts.name!r} are not numbers, so its cache could answer "
                "nothing; where a model overflows in float16, load it with dtype bfloat16 or float32; otherwise its "
                "weights are broken",
                param="model",
            )
        return quality

    @contextmanager
    def _answering(self, document: Attachment, probe: Probe) -> Iterator[Iterator[Tensor]]:
        """The logits of the probe's predictions behind a cache, in parts, made inside the block."""
        with torch.no_grad(), self._attachments.passing(document) as past:
            yield ask(self._facts.model, probe, past)
