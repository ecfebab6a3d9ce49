"""Base classes of policies: the mechanism (`Policy`), the common case (`ScoringPolicy`), and policies that judge by the
end of the prompt (`ProbedPolicy`, `TailPolicy`)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self, TypeGuard

from torch import Tensor

from kvshelf.artifact.identity import Identity, ModelIdentity
from kvshelf.artifact.packed import offsets_of
from kvshelf.artifact.records import Entries, Kept
from kvshelf.errors import InvalidRequest, PolicyUnsupported
from kvshelf.kernels.select import Counts, QueuedCounts, importance_of, keep_best, of_entries, pack
from kvshelf.kernels.transfer import download
from kvshelf.methods.method import POLICY, Kind, Method, Needs, parameter
from kvshelf.methods.policies.budgets import Budget, LayerBudget, require_room
from kvshelf.methods.policies.gate_file import Gates, Geometry, find
from kvshelf.methods.policies.sharing import Sharing
from kvshelf.methods.policies.view import DocumentView, LayerView, ProbePass

MAX_PROBE_BYTES = 16 * 1024
"""Most UTF-8 bytes of a probe text. Every blob made with the text contains it."""


class Unsized(NamedTuple):
    """A reduced layer: its record, as of one head, and the numbers of entries of its heads, which the device counts."""

    record: Kept
    shares: QueuedCounts

    def sized(self, counts: Tensor) -> Kept:
        return replace(self.record, offsets=offsets_of(counts.tolist()))


def sized(layers: Mapping[int, Entries | Unsized]) -> dict[int, Entries]:
    """The layers with the numbers of entries of their heads. Waits for the device once for all layers."""
    waiting = {index: layer.shares.counts for index, layer in layers.items() if isinstance(layer, Unsized)}
    counts = dict(zip(waiting, download(list(waiting.values())), strict=True))
    return {
        index: layer.sized(counts[index]) if isinstance(layer, Unsized) else layer for index, layer in layers.items()
    }


Phase = Literal["during", "cascade", "after"]
"""When a policy reduces: see `Policy.phase`."""

Observes = Needs
"""The name of `Needs` in plug-ins that say `observes`."""


def prefill_parameter(tokens: str, *, added: bool = False) -> Any:
    """How policies read the document that can do so in chunks. tokens: the parameter with the tokens of a pass."""
    text = (
        f"whole: one pass, then reduce; chunked: {tokens} tokens a pass, each behind what was kept of those before it"
    )
    return parameter("whole", text, choices=("whole", "chunked"), added=added)


def pooling_kernel(default: int) -> Any:
    """The pooling width of policies that pool scores. Bounded: some have as many values a token in memory."""
    return parameter(default, "width of the pooling over neighbouring tokens", minimum=1, maximum=255, odd=True)


class Absorber(Protocol):
    """Compresses a document by a policy while it is read, chunk by chunk. Either tokens wait until the policy has
    enough of them (`partitions.PartitionAbsorber`), or each chunk judges all entries again (`chunked.ChunkAbsorber`).
    """

    @property
    def mode(self) -> str:
        """Its name in a cache's identity. States everything that changes the numbers of the prefill."""

    @property
    def policy(self) -> Policy: ...

    @property
    def chunks(self) -> Sequence[int]:
        """Tokens of each forward pass; they add up to the document."""

    @property
    def again(self) -> bool:
        """Whether each chunk judges all entries again."""


@dataclass(frozen=True)
class Policy(Method):
    """One layer in, one reduced layer out.

    Raise `version` by hand whenever the entries that a policy chooses can change; it is part of a cache's identity.

    by_position: it chooses by positions alone. shared_by_heads: every head of a layer keeps the same tokens, so budgets
    per head mean nothing. budgets_heads: each head has a budget of its own. merges: an entry may stand for several
    tokens. The others give it work even under a budget of the whole document. indexes: it makes an index of its
    entries. prunes: it stores keys without some of their channels. has_residuals: it stores the layers' inputs in place
    of keys and values. sets_precision: its records say how many entries have more bits under `mixed:share=policy`.
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
    """Whether it can judge by the queries of a question alone, and so be a selector, `policy:NAME`."""
    settled: ClassVar[Mapping[str, str]] = {}
    """The parameters that it does not have as a selector, and why."""
    stored: ClassVar[Mapping[str, str]] = {}
    """The parameters that say what its records have beside whole entries: `vectors` like keys for each KV head and
    `block` of tokens; `pruned`, the share of a key's channels that goes, except of the last `whole` entries;
    `residuals`, which no parameter sizes (""), in place of keys and values."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Plug-ins may say `observes` for `needs`, and ask their base for either."""
        super().__init_subclass__(**options)
        for name, other in (("observes", "needs"), ("needs", "observes")):
            if name in cls.__dict__ and other not in cls.__dict__:
                setattr(cls, other, cls.__dict__[name])

    @property
    def revision(self) -> int:
        """The version in a cache's identity. A policy around another one combines both versions."""
        return self.version

    @abstractmethod
    def reduce(self, layer: LayerView, budget: LayerBudget) -> Entries:
        """Reduce one layer to its budget. Must not modify the view; same view, same result."""

    def begin(self, layer: LayerView, budget: LayerBudget) -> Entries | Unsized:
        """As `reduce`, but without a wait for the device where it can: see `sized`."""
        return self.reduce(layer, budget)

    @property
    def chooser(self) -> Policy:
        """The policy that reduces each layer: this one, or its base."""
        return self

    @property
    def scorer(self) -> ScoringPolicy | None:
        """This policy if it scores each entry by itself; else None."""
        return None

    @property
    def index_block(self) -> int | None:
        """Tokens of a block of its index, which no codec may cut; None without blocks."""
        return None

    @property
    def stored_beside(self) -> dict[str, Any]:
        """The values of the parameters in `stored`, True without one."""
        params = self.parameters()
        return {what: params.get(name, True) for what, name in self.stored.items()}

    def gate_file(self, model: ModelIdentity, folder: str, geometry: Geometry) -> Gates:  # noqa: ARG002
        """The gates of a model, by default of any family. folder, errors: as of `gate_file.find`."""
        return find(model, folder, self.name)

    def noted(self, layer: LayerView) -> Any:  # noqa: ARG002
        """The note of a layer for `finished`, made before the layer is reduced and freed."""
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
        """Whether its records of the document differ from those of `full`."""
        always = self.indexes or self.prunes or self.sets_precision or self.has_residuals
        return always or budget.tokens < num_tokens

    @property
    def phase(self) -> Phase:
        """When it reduces layers.

        "during": each layer once, when its attention is done. The memory peak of a prefill in one pass is one full
        layer and the kept entries of the others. "cascade": all layers share one budget, and earlier layers shrink
        again as later ones claim their part. The memory peak is one full layer and about 1.125 times the budget of the
        whole cache. "after": all layers once the last one is there. The memory peak is the full cache. In a prefill in
        chunks, every layer of a "cascade" or "after" policy has its entries and a chunk before all are cut.
        """
        return "during"

    @property
    def sizes_itself(self) -> bool:
        """Whether `own_budget` decides how many entries stay; a request then must not."""
        return not self.takes_budget

    def own_budget(self, document: DocumentView) -> Budget:
        """The budget of a policy that sizes itself."""
        return Budget.full(document.num_tokens)

    @property
    def takes_questions(self) -> bool:
        """Whether expected questions guide its choice."""
        return False

    @property
    def exact(self) -> bool:
        """Whether the entries kept add up to the budget of a request. If not, the policy's docstring says why."""
        return not (self.takes_budget and self.sizes_itself)

    @property
    def ragged(self) -> bool:
        """Whether heads or layers keep different numbers of entries."""
        return self.budgets_heads

    def probe_passes(self, document: DocumentView) -> Sequence[ProbePass]:  # noqa: ARG002
        """The passes to run behind the document for this policy to observe."""
        return ()

    def at_question(self, question_tokens: int) -> Self:  # noqa: ARG002
        """This policy as a selector for a question of so many tokens, with parameters that a stored cache allows."""
        return self

    def probe_text(self, document: DocumentView) -> str:  # noqa: ARG002
        """The text of the probe passes for the identity; "" if it follows from the document and the parameters."""
        return ""

    def next_position(self, num_tokens: int, budget: Budget) -> int:  # noqa: ARG002
        """Position of the first token of a question."""
        return num_tokens

    def absorber(self, document: DocumentView, budget: Budget) -> Absorber | None:  # noqa: ARG002
        """The absorber of a chunked prefill; None for a prefill in one pass."""
        return None

    def resumes(self, made: Identity) -> bool:  # noqa: ARG002
        """Whether its chunked prefill goes on where a stored cache with this identity ends."""
        return False

    @property
    def first_kept(self) -> int:
        """First tokens of a resumed cache that stay whatever follows."""
        return 0

    def fitted(self, document: DocumentView, budget: Budget, given: frozenset[str]) -> Self:  # noqa: ARG002
        """This policy with its defaults fitted to the document, the budget, the model and its calibration.

        given: the parameters that the caller chose, which stay. Raises `PolicyUnsupported` where one does not fit.
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
    """Scores every token of every head, and keeps the best. With `shared_by_heads` heads have equal scores."""

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
        """Entries that each head of this layer keeps, by default equally many. scores, budget: of all heads of the
        layer, even where the view has the heads of one process (`LayerView.ranks`)."""
        return budget.per_head

    def columns(self, layer: LayerView, scores: Tensor) -> Mapping[str, Tensor]:  # noqa: ARG002
        """Numbers of each token, `[kv_heads, N]` fp32 by name, which the record has of each entry."""
        return {}

    def precedence(self, layer: LayerView, scores: Tensor) -> Tensor:  # noqa: ARG002
        """The numbers by which the tokens of a head stay, `[heads, N]` fp32, higher is kept: by default the scores.
        Where a score is not finite, and its token not protected, this is not finite, either."""
        return scores

    @property
    def sharing(self) -> Sharing | None:
        """How the layers share one budget; None if each has its own."""
        return None

    @property
    def ragged(self) -> bool:
        return super().ragged or self.sharing is not None or type(self).counts is not ScoringPolicy.counts

    def weight(self, layer: LayerView) -> float:  # noqa: ARG002
        """The weight of this layer under a sharing by weights."""
        return 1.0

    @property
    def phase(self) -> Phase:
        return "during" if self.sharing is None else "cascade"

    def importance(self, layer: LayerView) -> Tensor:
        """The scores, infinite where a token is protected: `[kv_heads, N]` fp32.

        `select` ranks scores that are not finite first, so a kept entry shows such a score as NaN.
        `require_finite_scores` looks for NaN once in the whole cache, after the prefill: a check of each layer would
        wait for the device each time.
        """
        return importance_of(self.score(layer), self.protected(layer))

    def reduce(self, layer: LayerView, budget: LayerBudget) -> Entries:
        return sized({0: self._begun(layer, budget)})[0]

    def begin(self, layer: LayerView, budget: LayerBudget) -> Entries | Unsized:
        return self._begun(layer, budget) if only_scores(type(self)) else self.reduce(layer, budget)

    def _begun(self, layer: LayerView, budget: LayerBudget) -> Kept | Unsized:
        scores, protected = self.score(layer), self.protected(layer)
        all_scores = layer.all_heads(scores)
        layer_budget = LayerBudget(budget.per_head * (len(all_scores) // layer.kv_heads))
        counts = self.counts(layer, all_scores, protected, layer_budget)
        if layer.ranks is not None:  # the total of this process's heads is not known without a wait
            counts = layer.own_heads(counts.known() if isinstance(counts, QueuedCounts) else counts)
        precedence = self.precedence(layer, scores)
        keys, values, positions, importance = keep_best(layer.keys, layer.values, precedence, protected, counts)
        if precedence is not scores:  # codecs compare entries of all layers and heads by their scores
            importance = of_entries(importance_of(scores, protected), positions, counts)
        columns = {
            name: of_entries(numbers, positions, counts).contiguous()
            for name, numbers in self.columns(layer, scores).items()
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


def only_scores(policy: type[Policy]) -> TypeGuard[type[ScoringPolicy]]:
    """Whether a policy scores, and leaves the rest to `ScoringPolicy.reduce`."""
    return issubclass(policy, ScoringPolicy) and policy.reduce is ScoringPolicy.reduce


@dataclass(frozen=True)
class ProbedPolicy(Policy):
    """Judges by what the end of the prompt attends to.

    In the papers the question ends the prompt. Here no question is known yet. The end is the first of these that there
    is: the questions that the caller expects, the text of `probe`, the chat template's text before the answer, and the
    document's own last tokens, which an empty `probe` asks for. The cache's identity records the end.
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
        if not self.takes_questions:  # the document is read in chunks, whose last rows observe
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
    """Observes the last `window` rows of the prompt, and keeps the document's tokens among them."""

    window: int = parameter(64, "last tokens that observe; those of the document are kept", minimum=1)

    def fitted(self, document: DocumentView, budget: Budget, given: frozenset[str]) -> Self:
        super().fitted(document, budget, given)
        largest = budget.tokens - document.protected_prefix
        if "window" not in given:
            return replace(self, window=min(self.window, max(1, budget.tokens // 2), largest))
        require_room("window", self.window, largest, budget.tokens)
        return self

    def at_question(self, question_tokens: int) -> Self:
        return replace(self, window=min(self.window, question_tokens))

    def protected(self, layer: LayerView) -> Tensor:
        """`[N]` bool: tokens kept whatever their score."""
        return layer.protected | layer.window(self.window).protect_tail()

    def always(self, layer: LayerView) -> int:
        """How many tokens `protected` marks. The mask's sum would wait for the device."""
        return min(layer.num_tokens, layer.protected_prefix + layer.window(self.window).tail)


@dataclass(frozen=True)
class TailPolicy(WindowPolicy, ScoringPolicy):
    """Scores each entry by itself, from the window's rows."""


def keep(layer: LayerView, mask: Tensor, importance: Tensor | None = None, counts: Sequence[int] | None = None) -> Kept:
    """The record of the entries where `mask` `[kv_heads, N]` is set. counts: their number in each head, if known
    without a wait for the device. importance: `[kv_heads, N]` fp32, ranks entries for codecs that store some with more
    bits; by default the most recent ones rank highest."""
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
