"""Base classes of policies: the mechanism (`Policy`), the common case (`ScoringPolicy`), and policies that judge by the
end of the prompt (`ProbedPolicy`, `TailPolicy`).

See `kvshelf.methods.method` for what every method has.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self

from torch import Tensor

from kvshelf.artifact.identity import Identity, ModelIdentity
from kvshelf.artifact.packed import offsets_of
from kvshelf.artifact.records import Entries, Kept
from kvshelf.errors import InvalidRequest, PolicyUnsupported
from kvshelf.kernels.select import Counts, QueuedCounts, importance_of, keep_best, of_entries, pack
from kvshelf.kernels.transfer import download
from kvshelf.methods.method import POLICY, Kind, Method, Needs, parameter
from kvshelf.methods.policies.budgets import Budget, LayerBudget
from kvshelf.methods.policies.gate_file import Gates, Geometry, find
from kvshelf.methods.policies.parameters import require_held
from kvshelf.methods.policies.sharing import Sharing
from kvshelf.methods.policies.view import DocumentView, LayerView, ProbePass

MAX_PROBE_BYTES = 16 * 1024
"""Most UTF-8 bytes of a probe text. Limited, because every blob made with the text contains it."""


class Unsized(NamedTuple):
    """A reduced layer, as if it had one head, and how many entries each of its heads has."""

    record: Kept
    shares: QueuedCounts

    def sized(self, counts: Tensor) -> Kept:
        return replace(self.record, offsets=offsets_of(counts.tolist()))


def sized(layers: Mapping[int, Entries | Unsized]) -> dict[int, Entries]:
    """Layers with the numbers of entries of their heads, for which this waits together."""
    waiting = {index: layer.shares.counts for index, layer in layers.items() if isinstance(layer, Unsized)}
    counts = dict(zip(waiting, download(list(waiting.values())), strict=True))
    return {
        index: layer.sized(counts[index]) if isinstance(layer, Unsized) else layer for index, layer in layers.items()
    }


Phase = Literal["during", "cascade", "after"]
"""When a policy reduces: see `Policy.phase`."""

Observes = Needs
"""The name of `Needs` before version 0.2, for plug-ins that have it still."""


def pooling_kernel(default: int) -> Any:
    """The pooling width of policies that pool scores. Bounded, because some hold as many values for each token."""
    return parameter(default, "width of the pooling over neighbouring tokens", minimum=1, maximum=255, odd=True)


class Absorber(Protocol):
    """Compresses a document by a policy while it is read, chunk by chunk: tokens that wait until the policy has enough
    of them (`partitions.PartitionAbsorber`), or all that is left, judged again with each chunk
    (`chunked.ChunkAbsorber`)."""

    @property
    def mode(self) -> str:
        """Its name in a cache's identity. States everything that changes the numbers of the prefill."""

    @property
    def policy(self) -> Policy:
        """The policy that scores."""

    @property
    def chunks(self) -> Sequence[int]:
        """Tokens of each forward pass; they add up to the document."""

    @property
    def again(self) -> bool:
        """Whether each chunk judges what is left of those before: see `chunked.ChunkAbsorber`, and else
        `partitions.PartitionAbsorber`."""


@dataclass(frozen=True)
class Policy(Method):
    """One layer in, one reduced layer out.

    Raise `version` by hand whenever the entries that a policy chooses can change; it is part of a cache's identity.
    `by_position` says that it chooses by positions alone, whatever keys and values there are; `shared_by_heads`,
    that every head of a layer keeps the same tokens, so that budgets per head mean nothing; `budgets_heads`, that it
    gives each head a budget of its own; `merges`, that an entry it keeps may stand for several tokens. `indexes`, that
    it makes an index of what it keeps, `prunes`, that it stores keys without some of their channels, `has_residuals`,
    that it stores the layers' inputs in place of keys and values, and `sets_precision`, that its records say how many
    entries have more bits under codec `mixed:share=policy`: so it has work where the budget is the whole document.
    """

    kind: ClassVar[Kind] = POLICY
    version: ClassVar[int] = 1
    takes_budget: ClassVar[bool] = True
    by_position: ClassVar[bool] = False
    shared_by_heads: ClassVar[bool] = False
    budgets_heads: ClassVar[bool] = False
    merges: ClassVar[bool] = False
    indexes: ClassVar[bool] = False
    prunes: ClassVar[bool] = False
    sets_precision: ClassVar[bool] = False
    has_residuals: ClassVar[bool] = False
    selects: ClassVar[bool] = False
    """Whether the queries of a question alone can judge for it, so that it may be a selector, `policy:NAME`."""
    settled: ClassVar[Mapping[str, str]] = {}
    """The parameters that it does not have as a selector, and why."""
    stored: ClassVar[Mapping[str, str]] = {}
    """What its records have beside whole entries, and which of its parameters says how much: `vectors` like keys for
    each KV head and `block` of tokens; `pruned`, the share of a key's channels that goes, but of the last `whole`
    entries. `residuals`, with "" for the parameter, in place of keys and values."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Plug-ins may say `observes`, the name of `needs` before version 0.2, and ask their base for it."""
        super().__init_subclass__(**options)
        for name, other in (("observes", "needs"), ("needs", "observes")):
            if name in cls.__dict__ and other not in cls.__dict__:
                setattr(cls, other, cls.__dict__[name])

    @property
    def revision(self) -> int:
        """The version in a cache's identity: the class's version, combined with the base policy's, if there is one."""
        return self.version

    @abstractmethod
    def reduce(self, layer: LayerView, budget: LayerBudget) -> Entries:
        """Reduce one layer to its budget. Must not modify the view; same view, same result."""

    def begin(self, layer: LayerView, budget: LayerBudget) -> Entries | Unsized:
        """The same without a wait for the device, where that can be: see `sized`."""
        return self.reduce(layer, budget)

    @property
    def chooser(self) -> Policy:
        """The policy that reduces each layer: this one, or the one that it is built around."""
        return self

    @property
    def scorer(self) -> ScoringPolicy | None:
        """This policy, as one that scores each entry by itself; None if it does not."""
        return None

    @property
    def index_block(self) -> int | None:
        """Tokens of a block of the index that it makes, which no codec may cut; None without such blocks."""
        return None

    @property
    def stored_beside(self) -> dict[str, Any]:
        """What its records have beside whole entries, and how much of it: see `stored`."""
        params = self.parameters()
        return {what: params.get(name, True) for what, name in self.stored.items()}

    def gate_file(self, model: ModelIdentity, folder: str, geometry: Geometry) -> Gates:  # noqa: ARG002
        """The gates of a model for a policy that needs some: by default those of any family that were trained for its
        name. folder, and what it raises: as of `gate_file.find`."""
        return find(model, folder, self.name)

    def noted(self, layer: LayerView) -> Any:  # noqa: ARG002
        """What `finished` has to know of a layer, taken before the layer is reduced and freed."""
        return None

    def finished(
        self,
        records: Mapping[int, Entries],
        notes: Mapping[int, Any],  # noqa: ARG002
        budget: Budget,  # noqa: ARG002
    ) -> Mapping[int, Entries]:
        """The layers as they are stored, once all of them have been reduced. records, notes: by the layer's index."""
        return records

    def has_work(self, budget: Budget, num_tokens: int) -> bool:
        """Whether it makes anything else of a document than `full` does."""
        always = self.indexes or self.prunes or self.sets_precision or self.has_residuals
        return always or budget.tokens < num_tokens

    @property
    def phase(self) -> Phase:
        """When it reduces in a prefill in one pass. Between chunks, all layers have what stays and a chunk.

        "during": each layer once, when its attention is done. In one pass the memory peak is one full layer and the
        entries kept from the others. "cascade": earlier layers shrink again as later ones claim their part of a budget
        that all layers share. The memory peak is one full layer and about 1.125 times the budget of the whole cache.
        "after": all layers once the last one is there. The memory peak is the full cache. In chunks, of the last two
        every layer has a chunk beside its budget before it is cut.
        """
        return "during"

    @property
    def sizes_itself(self) -> bool:
        """Whether `own_budget` says how many entries stay, and a request must not."""
        return not self.takes_budget

    def own_budget(self, document: DocumentView) -> Budget:
        """The budget of a policy that sizes itself."""
        return Budget.full(document.num_tokens)

    @property
    def takes_questions(self) -> bool:
        """Whether expected questions guide it."""
        return False

    @property
    def exact(self) -> bool:
        """Whether the entries kept add up to the budget. If not, the policy's docstring states its granularity."""
        return True

    @property
    def ragged(self) -> bool:
        """Whether heads or layers keep different numbers of entries, as a rule."""
        return self.budgets_heads

    def probe_passes(self, document: DocumentView) -> Sequence[ProbePass]:  # noqa: ARG002
        """The passes to run behind the document for this policy to observe."""
        return ()

    def at_question(self, question_tokens: int) -> Self:  # noqa: ARG002
        """This policy as a selector, for a question of so many tokens: what of it no stored cache can do otherwise."""
        return self

    def probe_text(self, document: DocumentView) -> str:  # noqa: ARG002
        """The text of the probe passes, for the identity; "" if it follows from the document and the parameters."""
        return ""

    def next_position(self, num_tokens: int, budget: Budget) -> int:  # noqa: ARG002
        """Position of the first token of a question."""
        return num_tokens

    def absorber(self, document: DocumentView, budget: Budget) -> Absorber | None:  # noqa: ARG002
        """How to compress during a chunked prefill; None for a prefill in one pass, with a `reduce` after each
        layer."""
        return None

    def resumes(self, made: Identity) -> bool:  # noqa: ARG002
        """Whether its chunked prefill goes on where a stored cache with this identity ends."""
        return False

    @property
    def first_kept(self) -> int:
        """First tokens of such a cache that stay whatever follows."""
        return 0

    def fitted(self, document: DocumentView, budget: Budget, given: frozenset[str]) -> Self:  # noqa: ARG002
        """This policy, its defaults fitted to the document, the budget, the model and its calibration.

        given: the parameters that the caller chose, which stay as they are. Raises `PolicyUnsupported` where one of
        them does not fit.
        """
        if budget.tokens <= document.protected_prefix:
            raise PolicyUnsupported(
                f"the budget of {budget.tokens} entries per KV head is filled by the {document.protected_prefix} tokens"
                " of the chat template, which are always kept; lower compression_ratio or raise budget_tokens",
                param="compression_ratio",
            )
        return self


@dataclass(frozen=True)
class ScoringPolicy(Policy):
    """The common case: score every token of every head, keep the best. With `shared_by_heads` every head of a layer has
    the same scores."""

    @abstractmethod
    def score(self, layer: LayerView) -> Tensor:
        """`[kv_heads, N]` fp32, higher is kept."""

    @property
    def scorer(self) -> ScoringPolicy | None:
        return self

    def protected(self, layer: LayerView) -> Tensor:
        """`[N]` bool: tokens kept whatever their score. A mask, because no score is safely above all others."""
        return layer.protected

    def counts(self, layer: LayerView, scores: Tensor, protected: Tensor, budget: LayerBudget) -> Counts:  # noqa: ARG002
        """Entries each head of this layer keeps. The default is the same for all. scores, budget: of all its heads,
        also where the view has those of one process (`LayerView.ranks`)."""
        return budget.per_head

    def columns(self, layer: LayerView, scores: Tensor) -> Mapping[str, Tensor]:  # noqa: ARG002
        """The numbers of each token by name, `[kv_heads, N]` fp32, that its record keeps of entries: none."""
        return {}

    def precedence(self, layer: LayerView, scores: Tensor) -> Tensor:  # noqa: ARG002
        """What decides who stays among the tokens of a head, `[heads, N]` fp32, by their scores: these. A score that is
        not finite stays so, but where a token is protected."""
        return scores

    @property
    def sharing(self) -> Sharing | None:
        """How the layers share one budget; None if each has its own. If shared, layers are reduced in cascade."""
        return None

    @property
    def ragged(self) -> bool:
        return super().ragged or self.sharing is not None or type(self).counts is not ScoringPolicy.counts

    def weight(self, layer: LayerView) -> float:  # noqa: ARG002
        """The weight of this layer where layers share by weight."""
        return 1.0

    @property
    def phase(self) -> Phase:
        return "during" if self.sharing is None else "cascade"

    def importance(self, layer: LayerView) -> Tensor:
        """The scores, infinite where a token is protected: `[kv_heads, N]` fp32.

        `select` ranks scores that are not finite first. So a bad score that could have decided anything belongs to a
        kept entry, as a NaN. `require_finite_scores` looks for NaN once in the whole cache, after the prefill: a check
        of each layer's scores would wait for the device once per layer.
        """
        return importance_of(self.score(layer), self.protected(layer))

    def reduce(self, layer: LayerView, budget: LayerBudget) -> Entries:
        return sized({0: self._begun(layer, budget)})[0]

    def begin(self, layer: LayerView, budget: LayerBudget) -> Entries | Unsized:
        own = type(self).reduce is ScoringPolicy.reduce
        return self._begun(layer, budget) if own else self.reduce(layer, budget)

    def _begun(self, layer: LayerView, budget: LayerBudget) -> Kept | Unsized:
        scores, protected = self.score(layer), self.protected(layer)
        of_all = layer.all_heads(scores)
        whole = LayerBudget(budget.per_head * (len(of_all) // layer.kv_heads))
        counts = self.counts(layer, of_all, protected, whole)
        if layer.ranks is not None:  # what its own heads add up to is not known without a wait
            counts = layer.own_heads(counts.known() if isinstance(counts, QueuedCounts) else counts)
        decides = self.precedence(layer, scores)
        keys, values, positions, importance = keep_best(layer.keys, layer.values, decides, protected, counts)
        if decides is not scores:  # codecs compare entries of all layers and heads by their scores
            importance = of_entries(importance_of(scores, protected), positions, counts)
        columns = {
            name: of_entries(own, positions, counts).contiguous() for name, own in self.columns(layer, scores).items()
        }
        kept = Kept(
            keys=keys,
            values=values,
            entries_at=positions,
            offsets=(0, counts.total) if isinstance(counts, QueuedCounts) else offsets_of(counts),
            importance=importance,
            columns=columns,
        )
        return Unsized(kept, counts) if isinstance(counts, QueuedCounts) else kept


@dataclass(frozen=True)
class ProbedPolicy(Policy):
    """Judges by what the end of the prompt attends to.

    The papers end the prompt with the question. Here the question is not known yet, so the end is the first of these
    that is given: the questions that the caller expects, the text of `probe`, the chat template's text before the
    answer. With an empty `probe`, or without a template, the document's own last tokens are the end. The cache's
    identity records which end was used.
    """

    selects: ClassVar[bool] = True
    settled: ClassVar[Mapping[str, str]] = {"probe": "it observes the question"}

    probe: str | None = parameter(None, "text put behind the document to observe; null: the chat template's suffix")

    @property
    def needs(self) -> Needs:
        return Needs.QUERIES

    @property
    def takes_questions(self) -> bool:
        return True

    def probe_passes(self, document: DocumentView) -> Sequence[ProbePass]:
        if not self.takes_questions:  # it is read in chunks, whose own last rows observe
            return ()
        end = document.end
        if document.questions:
            return [ProbePass(ids, end) for ids in document.questions]
        ids = document.suffix if self.probe is None else encoded(self.probe, document)
        return [ProbePass(ids, end)] if ids else []

    def probe_text(self, document: DocumentView) -> str:
        if self.probe is not None or document.text is None:
            return self.probe or ""
        return "" if document.questions else document.text.decode(document.suffix)


@dataclass(frozen=True)
class WindowPolicy(ProbedPolicy):
    """Observes the last `window` rows of the prompt, and keeps those rows that are the document's own tokens."""

    window: int = parameter(64, "last tokens that observe; those of the document are kept", minimum=1)

    def fitted(self, document: DocumentView, budget: Budget, given: frozenset[str]) -> Self:
        super().fitted(document, budget, given)
        largest = budget.tokens - document.protected_prefix
        if "window" not in given:
            return replace(self, window=min(self.window, max(1, budget.tokens // 2), largest))
        require_held("window", self.window, largest, budget.tokens)
        return self

    def at_question(self, question_tokens: int) -> Self:
        return replace(self, window=min(self.window, question_tokens))

    def protected(self, layer: LayerView) -> Tensor:
        """`[N]` bool: tokens kept whatever their score."""
        return layer.protected | layer.window(self.window).protect_tail()

    def always(self, layer: LayerView) -> int:
        """How many tokens `protected` marks. To ask the mask would wait for the device."""
        return min(layer.num_tokens, layer.protected_prefix + layer.window(self.window).tail)


@dataclass(frozen=True)
class TailPolicy(WindowPolicy, ScoringPolicy):
    """Scores each entry by itself, by the rows that a `WindowPolicy` observes."""


def keep(layer: LayerView, mask: Tensor, importance: Tensor | None = None, counts: Sequence[int] | None = None) -> Kept:
    """The record of the entries where `mask` `[kv_heads, N]` is set: `counts[h]` of head h, if known without waiting
    for the device. `importance` `[kv_heads, N]` fp32 ranks them for codecs that store some with more bits; by default
    the most recent entries rank highest."""
    keys, values, positions, lengths = pack(layer.keys, layer.values, mask, counts)
    return Kept(
        keys=keys,
        values=values,
        entries_at=positions,
        offsets=offsets_of(lengths),
        importance=positions.float() if importance is None else of_entries(importance, positions, lengths),
    )


def encoded(probe: str, document: DocumentView) -> tuple[int, ...]:
    """Token ids of a probe text. Raises `InvalidRequest` without a tokenizer, and for a text that is too long."""
    if not probe:
        return ()
    param, nbytes = "policy_params.probe", len(probe.encode())
    if nbytes > MAX_PROBE_BYTES:
        raise InvalidRequest(
            f"{param} has {nbytes} bytes, and a probe may have {MAX_PROBE_BYTES}; shorten it", param=param
        )
    if document.text is None:
        raise InvalidRequest(f"{param} is a text, and this engine has no tokenizer to encode it", param=param)
    return tuple(document.text.encode(probe))
