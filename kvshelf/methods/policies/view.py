"""What a policy may look at: the document before its prefill (`DocumentView`) and a prefilled layer (`LayerView`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import torch
from torch import Tensor, nn

from kvshelf.artifact.packed import in_spans
from kvshelf.kernels.column_sums import column_sums
from kvshelf.kernels.transfer import upload_numbers
from kvshelf.kernels.window_scores import pooled, window_attention, window_scores
from kvshelf.methods.policies.segments import MAX_SENTENCE, starts_of
from kvshelf.model.devices import weight_of
from kvshelf.model.prepacking import plain_weight
from kvshelf.model.text import QUESTION_SEPARATOR, SENTENCE_ENDS

if TYPE_CHECKING:  # a view is also made without a model
    from transformers import PreTrainedModel

    from kvshelf.methods.policies.gate_file import Gates
    from kvshelf.model.calibration import Calibration
    from kvshelf.model.rope import Rope
    from kvshelf.model.text import TextFormat


OfHead = TypeVar("OfHead")

CUE_ASKED: Final = 6
CUE_ANSWER: Final = 4
"""Tokens of a policy's cue and of its answer (`DocumentView.cue`). Further tokens would depend less on the document."""

CUE_EVERY: Final = 8
"""Tokens from one cue of a policy to the next, by default."""

_ROWS_AT_ONCE = 128
"""Rows of a question whose weights on all entries are in memory together."""

MAX_SENTENCES = 8192
"""Most sentences whose ends a cache stores: 165,000 tokens of prose. Up to a million tokens they take 16 KiB."""


class Ranks(Protocol):
    """The processes that share a model's heads evenly (tensor parallel): rank 0 has the first heads."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def gathered(self, of_heads: Tensor) -> Tensor:
        """`[heads, ...]` of all processes by rank: `[ranks * heads, ...]`. Each process has to call it."""


@dataclass(frozen=True)
class ProbePass:
    """Tokens run behind the document, to observe what they attend to. Their states are not stored.

    Each token sees the whole document and the earlier tokens of its pass, and no other pass. Positions count up from
    `first_position`. soft: gates of learned tokens, which stand in the place of `token_ids`.
    """

    token_ids: tuple[int, ...]
    first_position: int
    soft: Gates | None = None


@dataclass(frozen=True, eq=False)
class DocumentView:
    """A tokenized document before its prefill.

    The first `protected_prefix` tokens come from the chat template and are never evicted. suffix: the tokens that the
    template writes between the document and the model's answer. questions: the tokens of each expected question. text:
    None for an engine without tokenizer. max_tokens: the longest sequence of the model. calibration, gates: the
    model's, for a policy that needs them. first_position: of its first token, above 0 where the tokens are appended to
    a stored cache, which they have read and which no policy judges. num_layers: those that policies reduce; group:
    query heads of a KV head; both None without a model. protect: spans of tokens, as of an `Identity`. whole_ids,
    places: the document that these tokens are a part of, and their indices in it (`judged`); None: they are all of it.
    surprisals: -log p of each token by the model, in nats, `[N]` fp32, for a policy that needs them. known_ends: which
    tokens end a sentence, for a stored cache without its text. images: spans of tokens in whose place images stand.
    """

    token_ids: Sequence[int]
    protected_prefix: int = 0
    suffix: tuple[int, ...] = ()
    questions: tuple[tuple[int, ...], ...] = ()
    text: TextFormat | None = None
    max_tokens: int | None = None
    calibration: Calibration | None = None
    gates: Gates | None = None
    first_position: int = 0
    num_layers: int | None = None
    group: int | None = None
    protect: tuple[tuple[int, int], ...] = ()
    places: tuple[int, ...] | None = None
    whole_ids: Sequence[int] | None = None
    surprisals: Tensor | None = field(default=None, repr=False)
    known_ends: Sequence[bool] | None = None
    images: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def end(self) -> int:
        """Position of what follows its last token."""
        return self.first_position + len(self.token_ids if self.whole_ids is None else self.whole_ids)

    def part(self, start: int, end: int) -> DocumentView:
        """Its tokens from `start` to `end`, at their positions. The protected prefix stays that of the document."""
        places = self.places
        return replace(
            self,
            token_ids=self.token_ids[start:end],
            first_position=self.first_position + (start if places is None else 0),
            places=None if places is None else places[start:end],
        )

    def behind(self, count: int) -> int:
        """Position of what follows its first `count` tokens, and those of `protect` behind them."""
        if self.places is None:
            return self.first_position + count
        return self.end if count == self.num_tokens else self.first_position + self.places[count]

    @cached_property
    def judged(self) -> DocumentView:
        """The document without the tokens of `protect`: these stay, and no policy judges them."""
        if not self.protect:
            return self
        places = tuple((~self.protected).nonzero()[:, 0].tolist())
        return replace(
            self,
            token_ids=[self.token_ids[place] for place in places],
            protected_prefix=sum(place < self.protected_prefix for place in places),
            protect=(),
            places=places,
            whole_ids=self.token_ids,
            surprisals=None if self.surprisals is None else self.surprisals[list(places)],
            images=(),
        )

    @cached_property
    def protected(self) -> Tensor:
        """Which tokens are in `protect`, `[N]` bool."""
        return in_spans(torch.arange(self.num_tokens), self.protect)

    @property
    def num_protected(self) -> int:
        """The number of tokens in `protect`."""
        return sum(end - first for first, end in self.protect)

    def cue(self, quoted: slice, answer: slice) -> ProbePass:
        """A question that the document answers: its tokens `quoted`, the chat template's text before an answer, and its
        tokens `answer`. The model finds what follows the cue, as it finds what a real question asks for."""
        ids = (*self._separator, *self.token_ids[quoted], *self.suffix, *self.token_ids[answer])
        return ProbePass(ids, self.end)

    @cached_property
    def _separator(self) -> Sequence[int]:
        """The tokens between a document and a question."""
        return self.text.encode(QUESTION_SEPARATOR) if self.text is not None else ()

    @cached_property
    def number_starts(self) -> list[bool]:
        """Which tokens begin a number. None does in a document without text."""
        return self.text.number_starts(self.token_ids) if self.text is not None else [False] * self.num_tokens

    @cached_property
    def name_starts(self) -> list[bool]:
        """Which tokens begin a word with a capital letter within a sentence. None does in a document without text."""
        return self.text.name_starts(self.token_ids) if self.text is not None else [False] * self.num_tokens

    @cached_property
    def segment_ends(self) -> list[bool]:
        """Which tokens end a part of a sentence, by its punctuation."""
        assert self.text is not None, "the policy must say that it observes text"
        return self.text.segment_ends(self.token_ids)

    @cached_property
    def sentence_ends(self) -> list[bool]:
        """Which tokens end a sentence."""
        if self.known_ends is not None:
            return list(self.known_ends)
        assert self.text is not None, "the policy must say that it observes text"
        return self.text.segment_ends(self.token_ids, SENTENCE_ENDS)

    @cached_property
    def stored_sentence_ends(self) -> tuple[int, ...]:
        """As `CompressedCache.sentence_ends`. Sentences are cut after `MAX_SENTENCE` tokens. Beyond `MAX_SENTENCES`,
        neighbours are stored as one."""
        if self.text is None:
            return ()
        starts = starts_of(torch.tensor(self.sentence_ends), MAX_SENTENCE)
        while len(starts) > MAX_SENTENCES:
            starts = starts[::2]
        return (*(starts[1:] - 1).tolist(), self.num_tokens - 1)


@dataclass(frozen=True, eq=False)
class Probed:
    """States of a probe pass at one layer: `[q_heads, T, D]` queries, `[kv_heads, T, D]` keys, `[kv_heads, T, Dv]`
    values."""

    queries: Tensor
    keys: Tensor
    values: Tensor


@dataclass(frozen=True, eq=False)
class Call:
    """The call of a layer's attention module, as a hook sees it. arguments: by name; document tokens come first."""

    model: PreTrainedModel
    arguments: Mapping[str, Any]

    def of_tokens(self, rows: Tensor) -> Call:
        """The call as if the document had only these of its tokens."""
        of_tokens = {
            "hidden_states": self.arguments["hidden_states"][:, rows],
            "position_embeddings": tuple(table[:, rows] for table in self.arguments["position_embeddings"]),
        }
        return replace(self, arguments={**self.arguments, **of_tokens})


@dataclass(frozen=True, eq=False)
class LayerView:
    """One layer of a prefilled document, as a policy sees it. Read-only; it is freed when the layer is reduced.

    keys: `[kv_heads, N, D]`, values: `[kv_heads, N, Dv]` and queries: `[q_heads, N, D]`, after RoPE and any norm. lse:
    the log-sum-exps of the queries' rows, as in `Attended`, `[q_heads, N]` fp32. Unless the policy needs queries, these
    and lse are None and probes is empty. ranks: the processes that share the layer's heads; the view has those of one.
    module: the model's attention module; call: its call, if the policy needs it. place: the layer's number among the
    `num_layers` layers that policies reduce, those without a sliding window; `layer_idx` counts all layers of the
    model. before: the tokens of which the layer before keeps an entry, `[N]` bool, if the policy needs it; None for the
    first layer, and where layers share a budget. inputs: the residual stream before any norm of the layer,
    `[N, width]`, if the policy needs it.
    """

    layer_idx: int
    keys: Tensor
    values: Tensor
    queries: Tensor | None
    scaling: float
    document: DocumentView
    num_layers: int = 1
    place: int = 0
    probes: tuple[Probed, ...] = ()
    rope: Rope | None = None
    lse: Tensor | None = None
    module: nn.Module | None = field(default=None, repr=False)
    ranks: Ranks | None = None
    call: Call | None = field(default=None, repr=False)
    before: Tensor | None = field(default=None, repr=False)
    inputs: Tensor | None = None

    @property
    def kv_heads(self) -> int:
        return self.keys.shape[0]

    def all_heads(self, of_heads: Tensor) -> Tensor:
        """`[n, ...]` of this view's heads as `[ranks * n, ...]` of all heads of the layer. A policy that decides by
        several heads together needs this, or it would decide otherwise in each process."""
        return of_heads if self.ranks is None else self.ranks.gathered(of_heads)

    def own_heads(self, of_all: Sequence[OfHead]) -> Sequence[OfHead]:
        """The items of this view's KV heads, of the items of all KV heads of the layer."""
        return of_all[self.first_kv_head : self.first_kv_head + self.kv_heads]

    @property
    def first_kv_head(self) -> int:
        """The number of this view's first KV head in the layer."""
        return 0 if self.ranks is None else self.ranks.rank * self.kv_heads

    @property
    def num_tokens(self) -> int:
        return self.keys.shape[1]

    @property
    def protected_prefix(self) -> int:
        return self.document.protected_prefix

    @cached_property
    def protected(self) -> Tensor:
        """The tokens of the chat template before the document, `[N]` bool."""
        mask = torch.zeros(self.num_tokens, dtype=torch.bool, device=self.keys.device)
        if self.protected_prefix:
            mask[: self.protected_prefix] = True
        return mask

    @cached_property
    def positions(self) -> Tensor:
        """Places of the document's tokens `[N]`, from 0."""
        return torch.arange(self.num_tokens, device=self.keys.device)

    @cached_property
    def rotated_to(self) -> Tensor:
        """The positions `[N]` that RoPE rotated queries and keys to."""
        places = self.document.places
        in_document = self.positions if places is None else upload_numbers(places, self.keys.device)
        return in_document + self.document.first_position

    @property
    def judged(self) -> LayerView:
        """The layer without the tokens of `DocumentView.protect`, for the policy to judge."""
        places = self.document.judged.places
        assert places is not None, "it is judged without those of `protect`"
        rows = upload_numbers(places, self.keys.device)
        return replace(
            self,
            keys=self.keys[:, rows],
            values=self.values[:, rows],
            queries=None if self.queries is None else self.queries[:, rows],
            lse=None if self.lse is None else self.lse[:, rows],
            document=self.document.judged,
            call=None if self.call is None else self.call.of_tokens(rows),
        )

    @cached_property
    def all_queries(self) -> Tensor:
        """Queries of every document token, `[q_heads, N, D]`."""
        assert self.queries is not None, "the policy must say that it observes them"
        return self.queries

    def grouped(self, per_query_head: Tensor) -> Tensor:
        """`[q_heads, ...]` as `[kv_heads, group, ...]`: query head h reads KV head h // group."""
        return per_query_head.reshape(self.kv_heads, len(per_query_head) // self.kv_heads, *per_query_head.shape[1:])

    def window(self, rows: int) -> ObservationWindow:
        """The observation window of `rows` rows."""
        return ObservationWindow(self, rows)

    def column_sums(self, local_rows: int = 0, every: int = 1) -> tuple[Tensor, Tensor]:
        """The attention that each document token receives, summed over all rows and over the last `local_rows`: two
        `[q_heads, N]` fp32. With `every` n above 1, the first sum is an estimate from every n-th row. At a question,
        which sees a stored cache without queries, both are over all rows of the question."""
        if self.probes and not self.all_queries.shape[1]:
            return (self._question_sums(),) * 2
        return column_sums(self.all_queries, self.keys, self.scaling, local_rows, every=every, lse=self.lse)

    def _question_sums(self) -> Tensor:
        sums = torch.zeros(len(self.all_queries), self.num_tokens, device=self.keys.device)
        for probed in self.probes:
            for head, (queries, total) in enumerate(zip(self.grouped(probed.queries), self.grouped(sums), strict=True)):
                for start in range(0, queries.shape[1], _ROWS_AT_ONCE):
                    end = start + _ROWS_AT_ONCE
                    weights = window_attention(
                        queries[:, start:end], self.keys[head], self.scaling, probed.keys[head, :end]
                    )
                    total += weights.sum(dim=1)
        return sums

    def keys_unrotated(self) -> Tensor:
        """Keys before RoPE, `[kv_heads, N, D]` fp32."""
        assert self.rope is not None, "the policy must say that it observes RoPE"
        return self.rope.unrotate(self.keys, self.rotated_to)

    def output_projection(self) -> Tensor:
        """The rows of W_o that multiply each query head's output, `[q_heads, Dv, hidden]`."""
        module, weight = self.module, output_weight(self.module)
        assert module is not None
        assert weight is not None, "the policy must say that it observes weights"
        weight = weight_of(module, "o_proj.weight", weight).to(self.keys.device)
        return weight.T.reshape(self.all_queries.shape[0], -1, weight.shape[0])


def output_weight(attention: nn.Module | None) -> Tensor | None:
    """The weight of an attention module's output projection, `[hidden, q_heads * Dv]`, on "meta" where it is
    offloaded; None if it has another name or is packed by quantization."""
    weight = plain_weight(getattr(attention, "o_proj", None))
    if not isinstance(weight, Tensor) or not weight.is_floating_point() or weight.dtype.itemsize == 1:
        return None  # fp8 needs scales
    return weight


class ObservationWindow:
    """The observation window: the rows that a paper calls the end of the prompt.

    With probe passes these are the last rows of each pass; if the shortest pass has fewer than `rows`, the document's
    own last `tail` tokens are added. Without a pass all rows are the document's. A policy that scores by a window keeps
    the tail, which earlier rows cannot judge.
    """

    def __init__(self, layer: LayerView, rows: int) -> None:
        self._layer = layer
        self._rows = rows
        shortest = min((probed.queries.shape[1] for probed in layer.probes), default=0)
        self.tail = min(max(0, rows - shortest), layer.num_tokens)

    @property
    def columns(self) -> int:
        """The number of document tokens that the window judges: all but the tail."""
        return self._layer.num_tokens - self.tail

    @property
    def _tail_queries(self) -> Tensor:
        """`[q_heads, tail, D]`. A layer that is read in chunks has the queries of its last tokens alone."""
        queries = self._layer.all_queries
        return queries[:, queries.shape[1] - self.tail :]

    def attention(self, kv_head: int) -> Tensor:
        """Softmax weights `[group, R, columns]` fp32 of one GQA group: all heads' are R times a layer's scores."""
        layer = self._layer
        keys = layer.keys[kv_head]
        parts = []
        if self.tail:
            queries = layer.grouped(self._tail_queries)[kv_head]
            parts.append(window_attention(queries, keys, layer.scaling)[..., : self.columns])
        for probed in layer.probes:
            queries = layer.grouped(probed.queries)[kv_head, :, -self._rows :]
            weights = window_attention(queries, keys, layer.scaling, probed.keys[kv_head])
            parts.append(weights[..., : self.columns])
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def queries(self, kv_head: int) -> Tensor:
        """Queries `[group, R, D]` of the rows of one GQA group."""
        layer = self._layer
        tail = layer.grouped(self._tail_queries)[kv_head]
        ends = [layer.grouped(probed.queries)[kv_head, :, -self._rows :] for probed in layer.probes]
        return torch.cat([tail, *ends], dim=1)

    def mean(self, kernel: int = 1, pooling: str = "avg") -> Tensor:
        """Mean weight over the rows and the group, pooled over `kernel` neighbours: `[kv_heads, columns]` fp32."""
        layer = self._layer
        keys, tail = layer.keys[:, : self.columns], layer.keys[:, self.columns :]
        # Beside the queries the keys of the observing rows themselves, which are not judged: the tail, then a pass.
        rows = [(self._tail_queries, tail)] if self.tail else []
        rows += [
            (probed.queries[:, -self._rows :], torch.cat([tail, probed.keys], dim=1) if self.tail else probed.keys)
            for probed in layer.probes
        ]
        if len(rows) == 1:
            ((queries, own_keys),) = rows
            return window_scores(queries, keys, layer.scaling, own_keys=own_keys, kernel=kernel, pooling=pooling)
        sums = [
            queries.shape[1] * window_scores(queries, keys, layer.scaling, own_keys=own_keys)
            for queries, own_keys in rows
        ]
        num_rows = sum(queries.shape[1] for queries, _ in rows)
        return pooled(torch.stack(sums).sum(dim=0) / num_rows, kernel, pooling)

    def pad(self, scores: Tensor) -> Tensor:
        """`scores` `[..., columns]` with zeros for the tail, which is protected: nobody reads its scores."""
        return torch.nn.functional.pad(scores, (0, self.tail))

    def protect_tail(self) -> Tensor:
        """`[N]` bool: the tail."""
        return self._layer.positions >= self.columns
