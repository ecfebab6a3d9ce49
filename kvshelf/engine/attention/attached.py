"""A compressed cache attached to a model: a shared read-only prefix and a private suffix that grows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Final, NoReturn

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from kvshelf.engine.attention.attachment import Attached
from kvshelf.engine.attention.latents import Absorbed, Handover, LatentStates
from kvshelf.engine.attention.states import Source, StatefulCache, StateLayer, together
from kvshelf.errors import InvalidRequest, StateConflict
from kvshelf.kernels.prefix_attention import (
    BatchLayout,
    LogitRules,
    Prefix,
    SuffixRows,
    attention_by_document,
    prefix_attention,
)

IMPLEMENTATION: Final = "kvshelf"
"""The name of kvshelf's attention function among transformers'."""

CACHE_ARGUMENT: Final = "cache" if [*map(int, version("transformers").split(".")[:2])] >= [5, 24] else "past_key_values"
"""Name of the argument of a model's forward pass that takes a cache. transformers 5.24 warns about the older name."""

_FIRST_CAPACITY = 64
_TOKENS = ("input_ids", "inputs_embeds")
_STATES_BYTES = 1 << 28
"""Of the states of all rows of a pass that quality or a policy asks for."""


class AttachedCache(StatefulCache):
    """A transformers `Cache` whose document part is a `CompressedCache`, read in place and never changed.

    Its length is the logical one (all document tokens, also those not kept, plus the suffix), so that positions
    continue at the document's end. Several may share one `CompressedCache`. It works only inside
    `engine.attached(...)`: under any other attention function the model gets an error, not an answer without the
    document.
    """

    def __init__(
        self,
        document: Attached,
        longest: int | None = None,
        absorbed: Mapping[int, Absorbed] | None = None,
        tokens_at_once: int | None = None,
        reads: Mapping[int, int] | None = None,
    ) -> None:
        """longest: most tokens of document and suffix together; beyond it the model would rotate all keys by other
        frequencies (`rope.reach`). absorbed: the layers that have latents. tokens_at_once: most tokens of each row in
        one pass; None: any number. reads: as `layers.readers`."""
        self._rows = 1
        self._tokens_at_once = tokens_at_once
        self._absorbed = absorbed or {}
        self._handover = Handover(self._absorbed)
        states_bytes = sum(state.tensor.nbytes for i in range(document.num_layers) for state in document.states(i))
        self.rows_at_once = max(1, _STATES_BYTES // states_bytes) if states_bytes else 1 << 30
        """How many rows one pass should have at most: each has its own copy of the document's states."""
        layers = [self._layer(document, index, longest) for index in range(document.num_layers)]
        super().__init__(layers=with_readers(layers, reads or {}))

    def _layer(self, document: Attached, index: int, longest: int | None) -> AttachedLayer | StateLayer:
        states, start = document.states(index), document.next_position
        count = 1 + max((state.number for state in states), default=-1)
        if not document.entries(index):
            return StateLayer(count, lambda: together([states] * self._rows))
        prefix = document.prefixes(index)
        if index in self._absorbed:
            return LatentLayer(
                prefix, start, longest, index=index, absorbed=self._absorbed[index], handover=self._handover
            )
        if not states:
            return AttachedLayer(prefix, start, longest)
        return AttachedStateLayer(prefix, start, longest, count, lambda: together([states] * self._rows))

    @contextmanager
    def begun_by(self, model: nn.Module) -> Iterator[None]:
        """Inside the block `begin` is called before each pass of this base model over the cache. A pass without
        positions continues where the cache ends: not every model counts on from a cache by itself (Bamba)."""
        takes_positions = "position_ids" in inspect.signature(model.forward).parameters

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
            if not any(kwargs.get(name) is self for name in ("cache", "past_key_values")):
                return None
            tokens = next(value for value in (*args[:1], *map(kwargs.get, _TOKENS)) if value is not None)
            rows, count = tokens.shape[:2]
            if self._tokens_at_once is not None and count > self._tokens_at_once:
                raise InvalidRequest(
                    f"{type(model).__name__} forgets its recurrent states where several tokens follow in one pass (a "
                    f"fault of its code in transformers); give it {self._tokens_at_once} at a time, `for piece in "
                    "past.pieces(input_ids)`, and generate() prefill_chunk_size=1",
                    param="input_ids",
                )
            if takes_positions and kwargs.get("position_ids") is None:
                first = self.get_seq_length()
                kwargs["position_ids"] = torch.arange(first, first + count, device=tokens.device).expand(rows, count)
            if model.config._attn_implementation != IMPLEMENTATION:  # type: ignore[union-attr]
                self._handover.require_none()
            return args, kwargs | self.begin(rows)

        hook = model.register_forward_pre_hook(before, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()
            self._handover.end()

    def begin(self, rows: int) -> dict[str, Any]:
        """Prepare a pass over tokens `[rows, T]`. Returns keywords for the model's attention function. Raises
        `InvalidRequest` where the states that the pass continues are of other rows."""
        state_rows = next((len(state.tensor) for states in self.states() for state in states), rows)
        if state_rows != rows:
            raise InvalidRequest(
                f"the pass has {rows} rows, and the recurrent states before it are of {state_rows}; attach the "
                "document again for other rows",
                param="input_ids",
            )
        self._rows = rows
        return self._handover.begin()

    def pieces(self, input_ids: Tensor) -> tuple[Tensor, ...]:
        """`input_ids` `[B, T]`, split into the tokens of one pass each: one piece, but for a model that forgets its
        states."""
        return torch.split(input_ids, self._tokens_at_once or input_ids.shape[1], dim=1)

    def with_document(self, input_ids: Tensor) -> Tensor:
        """`input_ids` `[B, T]` behind stand-ins for the document's tokens, `[B, N + T]`: what `generate()` expects.

        `generate()` takes the whole sequence and skips what the cache already has. The document's own ids may stand
        there as well; they are skipped either way. The stand-ins are the first token of each row: of a padding token,
        `generate()` would make a mask.
        """
        stand_in = input_ids[:, :1].expand(-1, int(self.get_seq_length()))
        return torch.cat([stand_in, input_ids], dim=1)


class UnboundedLayer(CacheLayerMixin):  # type: ignore[misc]
    """A layer of a cache without sliding window and without a longest length. visible: the keys and values that it
    returned in this pass, for the layers that read them."""

    is_sliding = False
    visible: tuple[Any, Any]

    def get_max_length(self) -> int:
        """-1: no longest length."""
        return -1

    get_max_cache_shape = get_max_length  # its name in older versions of transformers 5


class PassingLayer(UnboundedLayer):
    """A layer that keeps nothing, for a pass with position ids. before: its length, which a model that counts positions
    by the cache (`counts_by_cache`) adds to the place of each token in the pass; `[N]`, as the tokens of a pass may
    stand anywhere."""

    before: int | Tensor = 0

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Any, Any]:
        self.visible = key_states, value_states
        return self.visible

    def get_seq_length(self) -> Any:
        return self.before

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """There is no mask: kvshelf's attention knows what each token sees."""
        return (query_length if isinstance(query_length, int) else query_length.shape[0]), 0

    def lazy_initialization(self, *_: Any, **__: Any) -> None:
        """There are no buffers."""


class ReadingLayer(PassingLayer):
    """A layer whose queries read the keys and values of a layer before it (`LayerKind.reads`). The keys and values that
    its own module makes in vain are dropped: they are in no cache."""

    def __init__(self, read: UnboundedLayer) -> None:
        super().__init__()
        self._read = read

    def update(self, *_: Any, **__: Any) -> tuple[Any, Any]:
        """The keys and values of that layer in this pass."""
        return self._read.visible

    def get_seq_length(self) -> Any:
        return self._read.get_seq_length()

    def reorder_cache(self, *_: Any) -> None:
        """There are no rows of its own."""

    reset = batch_select_indices = batch_repeat_interleave = reorder_cache


def with_readers(layers: list[Any], reads: Mapping[int, int]) -> list[Any]:
    """The layers of a cache, in which the layers that read others are `ReadingLayer`s. reads: as `layers.readers`."""
    for layer, read in reads.items():
        layers[layer] = ReadingLayer(layers[read])
    return layers


class HandedOn(PassingLayer):
    """A layer with latents, in a pass without a past."""

    def __init__(self, index: int, handover: Handover) -> None:
        super().__init__()
        self._index = index
        self._handover = handover

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Returns latents and rotated parts as they are. The attention function gets them, too."""
        self._handover.give(self._index, LatentStates(key_states, value_states))
        return key_states, value_states


class AttachedLayer(UnboundedLayer):
    """One layer of an `AttachedCache`. `prefix`: the entries that every query sees; they stand for `start` tokens.

    `keys` and `values` are the suffix buffers `[B, kv_heads, capacity, D]`, of which the first `_length` rows are in
    use. They double when full: appending to an exact-size tensor would copy the suffix at every token.
    """

    def __init__(self, prefix: Sequence[Prefix], start: int, longest: int | None = None) -> None:
        super().__init__()
        self.prefix = prefix
        self.start = start
        self._longest = longest
        self._length = 0

    def lazy_initialization(self, *states: Tensor, **_: Any) -> None:
        self._make_room(*states)

    def _make_room(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = _buffer_like(key_states, _FIRST_CAPACITY)
        self.values = _buffer_like(value_states, _FIRST_CAPACITY)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Append this call's keys and values to the suffix. Returns the `AttachedStates` twice."""
        states = self._appended(key_states, value_states)
        self.visible = states, states
        return self.visible

    def _appended(self, key_states: Tensor, value_states: Tensor) -> AttachedStates:
        if not self.is_initialized:
            self._make_room(key_states, value_states)
        end = self._length + key_states.shape[2]
        if self._longest is not None and self.start + end > self._longest:
            raise InvalidRequest(
                f"the model's LongRoPE rotates sequences of more than {self._longest} tokens by other frequencies than "
                "this cache has; end there, or compress a document that is longer than that by itself",
                param="input_ids",
            )
        self._write(end, key_states, value_states)
        before, self._length = self._length, end
        rows, new = key_states.shape[0], key_states.shape[2]
        layout = BatchLayout(
            shares=(rows * new,),
            suffixes=(SuffixRows((end,) * rows, tuple(range(0, rows * new, new)), new),),
            device=key_states.device,
            starts=(self.start,),
        )
        first, suffixes = self.start + before, [(self.keys, self.values)]
        return AttachedStates([self.prefix], suffixes, layout, key_states, value_states, first_position=first)

    def _write(self, end: int, key_states: Tensor, value_states: Tensor) -> None:
        """Write this call's keys and values as the last tokens of the suffix, which ends at `end`."""
        self.keys = _grown(self.keys, end, self._length)
        self.values = _grown(self.values, end, self._length)
        self.keys[:, :, self._length : end] = key_states
        self.values[:, :, self._length : end] = value_states

    def get_seq_length(self) -> int:
        """Tokens of document and suffix: the position of the next token."""
        return self.start + self._length

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Logical length after `query_length` more tokens, and offset 0. transformers 5.2 passes positions."""
        added = query_length if isinstance(query_length, int) else query_length.shape[0]
        if added == 0:
            _refuse_positions(self.get_seq_length())
        return self.get_seq_length() + added, 0

    def reset(self) -> None:
        """Forget the suffix; the document stays. The next pass may have another number of rows."""
        self._length, self.is_initialized = 0, False

    def reorder_cache(self, indices: Tensor) -> None:
        """Keep these rows of the suffix, in this order. The document is the same for every beam."""
        if self.is_initialized:
            indices = indices.to(self.keys.device)  # generate() makes them for all layers
            self.keys, self.values = self.keys[indices], self.values[indices]

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self.keys = self.keys.repeat_interleave(repeats, dim=0)
            self.values = self.values.repeat_interleave(repeats, dim=0)

    def crop(self, *_: Any) -> NoReturn:
        """Not supported: part of the cropped range may be in the read-only document."""
        raise StateConflict("an attached cache cannot be cropped; attach the document again instead")


class AttachedStateLayer(StateLayer, AttachedLayer):
    def __init__(
        self,
        prefix: Sequence[Prefix],
        start: int,
        longest: int | None,
        number_of_states: int,
        source: Source | None = None,
    ) -> None:
        AttachedLayer.__init__(self, prefix, start, longest)
        StateLayer.__init__(self, number_of_states, source)

    def reset(self) -> None:
        """Forget the suffix, and begin again with the document's states."""
        StateLayer.reset(self)
        AttachedLayer.reset(self)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        StateLayer.reorder_cache(self, beam_idx)
        AttachedLayer.reorder_cache(self, beam_idx)


class LatentLayer(AttachedLayer):
    """An `AttachedLayer` of latents. `keys` are latents with their rotated parts, `[B, 1, capacity, rank + rope]`, and
    `values` their first `rank` channels, not a copy. The module gets this call's tokens alone."""

    def __init__(
        self,
        prefix: Sequence[Prefix],
        start: int,
        longest: int | None,
        *,
        index: int,
        absorbed: Absorbed,
        handover: Handover,
    ) -> None:
        super().__init__(prefix, start, longest)
        self._index = index
        self._absorbed = absorbed
        self._handover = handover

    def _make_room(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = _buffer_like(key_states, _FIRST_CAPACITY)
        self.values = self.keys[..., : value_states.shape[-1]]
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append this call's latents and rotated parts to the suffix. Returns them as they are."""
        self._handover.require_awaited(self._index)
        past = self._appended(torch.cat([key_states, value_states], dim=-1), key_states)
        self._handover.give(self._index, LatentStates(key_states, value_states, (past, self._absorbed)))
        return key_states, value_states

    def _write(self, end: int, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = _grown(self.keys, end, self._length)
        self.keys[:, :, self._length : end] = key_states
        self.values = self.keys[..., : value_states.shape[-1]]


@dataclass(slots=True, eq=False, repr=False)
class AttachedStates:
    """Stands where transformers expects a layer's keys and values, and refuses every use but kvshelf's attention.

    Deliberately not a tensor: another attention function would silently attend to a tensor of the suffix alone, and
    answer without the document.

    prefixes, suffixes, layout: those of `prefix_attention`. new_keys, new_values: of this call's tokens,
    `[B, kv_heads, T, D]`. first_position: where the call has to begin; None if the caller has set the positions.
    weigh: called with the masses of `attention_by_document`; then all tokens see all documents, and each of these has
    its own prefixes. choose: called with the queries `[B * T, q_heads, D]` before the attention; sets what selected
    prefixes read. weights: called with the number of query heads; makes room for the weights of the rows that ask for
    theirs.
    """

    prefixes: Sequence[Sequence[Prefix]]
    suffixes: Sequence[tuple[Tensor, Tensor]]
    layout: BatchLayout
    new_keys: Tensor
    new_values: Tensor
    first_position: int | None
    weigh: Callable[[Tensor], None] | None = None
    choose: Callable[[Tensor], None] | None = None
    weights: Callable[[int], Sequence[Tensor | None]] | None = None

    def attend(self, queries: Tensor, rules: LogitRules) -> Tensor:
        """Attention of this call's queries `[B, q_heads, T, D]` over document and suffix. Returns `[B, T, q_heads,
        Dv]`."""
        batch, heads, new, dim = queries.shape
        flat = queries.transpose(1, 2).reshape(batch * new, heads, dim)
        if self.choose is not None:
            self.choose(flat)
        if self.weigh is None:
            weights = () if self.weights is None else self.weights(heads)
            out = prefix_attention(flat, self.prefixes, self.suffixes, self.layout, rules, weights)
        else:
            out, masses = attention_by_document(flat, self.prefixes, self.suffixes, self.layout, rules)
            self.weigh(masses)
        return out.view(batch, new, heads, -1)

    def check_positions(self, position_ids: Tensor | None) -> None:
        """Refuse a call whose positions do not continue where the cache ends.

        `generate()` given the question alone counts positions from 0: its keys would silently get a wrong rotation.
        """
        first = self.first_position
        if first is not None and position_ids is not None and not bool((position_ids[..., 0] == first).all()):
            _refuse_positions(first)

    def __getattr__(self, name: str) -> NoReturn:
        _refuse(name)

    @classmethod
    def __torch_function__(cls, func: Any, *_: Any) -> NoReturn:
        _refuse(getattr(func, "__name__", str(func)))


def in_line(states: Tensor) -> Tensor:
    """`[rows, heads, T, D]` as `[1, heads, rows * T, D]`."""
    return states.transpose(0, 1).flatten(1, 2).unsqueeze(0)


def _refuse_positions(first: int) -> NoReturn:
    raise InvalidRequest(
        f"the tokens do not continue at position {first}, where the attached cache ends. generate() takes the whole "
        "sequence and skips what is cached: give it past.with_document(input_ids)",
        param="input_ids",
    )


def _refuse(operation: str) -> NoReturn:
    raise StateConflict(
        f"an attached cache was given to a model that does not run kvshelf's attention ({operation!r} was called on "
        "its keys); use it inside `with engine.attached(cache) as past:` with that engine's model"
    )


def _buffer_like(states: Tensor, capacity: int) -> Tensor:
    batch, heads, _, dim = states.shape
    return states.new_empty(batch, heads, capacity, dim)


def _grown(buffer: Tensor, needed: int, used: int) -> Tensor:
    if needed <= buffer.shape[2]:
        return buffer
    grown = _buffer_like(buffer, max(needed, 2 * buffer.shape[2]))
    grown[:, :, :used] = buffer[:, :, :used]
    return grown
