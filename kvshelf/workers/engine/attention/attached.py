"""A compressed cache attached to a model: a shared read-only prefix and a private suffix that grows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Final, NoReturn

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from kvshelf.errors import InvalidRequest, StateConflict
from kvshelf.kernels.prefix_attention import BatchLayout, LogitRules, Prefix, SuffixRows, prefix_attention
from kvshelf.workers.engine.attention.attachment import Attachment

CACHE_ARGUMENT: Final = "cache" if [*map(int, version("transformers").split(".")[:2])] >= [5, 24] else "past_key_values"
"""Name of the argument of a model's forward pass that takes a cache. transformers 5.24 warns about the older name."""

_FIRST_CAPACITY = 64


class AttachedCache(Cache):  # type: ignore[misc]
    """A transformers `Cache` whose document part is a `CompressedCache`, read in place and never changed.

    Its length is the logical one (all document tokens, also those not kept, plus the suffix), so that positions
    continue at the document's end. Several may share one `CompressedCache`. It works only inside
    `engine.attached(...)`: under any other attention function the model gets an error, not an answer without the
    document.
    """

    def __init__(self, document: Attachment, longest: int | None = None) -> None:
        """longest: most tokens of document and suffix together; beyond it the model would rotate all keys by other
        frequencies (`rope.reach`)."""
        start = document.next_position
        prefixes = [document.prefixes(index) for index in range(document.num_layers)]
        super().__init__(layers=[AttachedLayer(prefix, start, longest) for prefix in prefixes])

    @contextmanager
    def begun_by(self, model: nn.Module) -> Iterator[None]:
        """Inside the block `begin` is called before each pass of this base model over the cache."""

        def before(_: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
            if self is not (given.get("cache") or given.get("past_key_values")):
                return None
            tokens = next(
                each for each in (*args, given.get("input_ids"), given.get("inputs_embeds")) if each is not None
            )
            return args, given | self.begin(tokens.shape[0])

        hook = model.register_forward_pre_hook(before, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()

    def begin(self, rows: int) -> dict[str, Any]:
        """Prepare a pass over tokens `[rows, T]`. Returns keywords for the model's attention function."""
        return {}

    def with_document(self, input_ids: Tensor) -> Tensor:
        """`input_ids` `[B, T]` behind stand-ins for the document's tokens, `[B, N + T]`: what `generate()` expects.

        `generate()` takes the whole sequence and skips what the cache already has. The document's own ids may stand
        there as well; they are skipped either way.
        """
        stand_in = input_ids.new_zeros(input_ids.shape[0], int(self.get_seq_length()))
        return torch.cat([stand_in, input_ids], dim=1)


class UnboundedLayer(CacheLayerMixin):  # type: ignore[misc]
    """A layer of a cache without sliding window and without a longest length."""

    is_sliding = False

    def get_max_length(self) -> int:
        """-1: no longest length."""
        return -1

    get_max_cache_shape = get_max_length  # its name in older versions of transformers 5


class PassingLayer(UnboundedLayer):
    """A layer that keeps nothing, in a pass whose positions are told. before: what it gives for its length, which a
    model that counts positions by it (`counts_by_cache`) adds to the place of each token in the pass; `[N]`, as the
    tokens of a pass may stand anywhere."""

    before: int | Tensor = 0

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Any, Any]:
        """The states of this call's tokens, as they are."""
        return key_states, value_states

    def get_seq_length(self) -> Any:
        """0 where the model looks at positions alone."""
        return self.before

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """There is no mask."""
        return (query_length if isinstance(query_length, int) else query_length.shape[0]), 0

    def lazy_initialization(self, *_: Any) -> None:
        """Nothing to make."""


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

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the suffix buffers for this batch size."""
        self.keys = _buffer_like(key_states, _FIRST_CAPACITY)
        self.values = _buffer_like(value_states, _FIRST_CAPACITY)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Append this call's keys and values to the suffix. Returns the `AttachedStates` twice."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self._length + key_states.shape[2]
        if self._longest is not None and self.start + end > self._longest:
            raise InvalidRequest(
                f"the model's LongRoPE rotates sequences of more than {self._longest} tokens by other frequencies than "
                "this cache has; end there, or compress a document that is longer than that by itself",
                param="input_ids",
            )
        self.keys = _grown(self.keys, end, self._length)
        self.values = _grown(self.values, end, self._length)
        self.keys[:, :, self._length : end] = key_states
        self.values[:, :, self._length : end] = value_states
        before, self._length = self._length, end
        rows, new = key_states.shape[0], key_states.shape[2]
        layout = BatchLayout(
            shares=(rows * new,),
            suffixes=(SuffixRows((end,) * rows, tuple(range(0, rows * new, new)), new),),
            device=key_states.device,
            starts=(self.start,),
        )
        first, suffixes = self.start + before, [(self.keys, self.values)]
        states = AttachedStates([self.prefix], suffixes, layout, key_states, value_states, first_position=first)
        return states, states

    def get_seq_length(self) -> int:
        """Document and suffix: where the next token stands."""
        return self.start + self._length

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Logical length after `query_length` more tokens, and offset 0. transformers 5.2 passes positions."""
        added = query_length if isinstance(query_length, int) else query_length.shape[0]
        if added == 0:
            _refuse_positions(self.get_seq_length())
        return self.get_seq_length() + added, 0

    def reset(self) -> None:
        """Forget the suffix; the document stays."""
        self._length = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the rows of the suffix, for beam search. The document is the same for every beam."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows of the suffix."""
        if self.is_initialized:
            self.keys, self.values = self.keys[indices], self.values[indices]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the suffix."""
        if self.is_initialized:
            self.keys = self.keys.repeat_interleave(repeats, dim=0)
            self.values = self.values.repeat_interleave(repeats, dim=0)

    def crop(self, *_: Any) -> NoReturn:
        """Not supported: part of the cropped range may be in the read-only document."""
        raise StateConflict("an attached cache cannot be cropped; attach the document again instead")


@dataclass(slots=True, eq=False, repr=False)
class AttachedStates:
    """Stands where transformers expects a layer's keys and values, and refuses every use but kvshelf's attention.

    Deliberately not a tensor: another attention function would silently attend to a tensor of the suffix alone, and
    answer without the document.

    prefixes, suffixes and layout are those of `prefix_attention`. `new_keys` `[B, kv_heads, T, D]` and `new_values` are
    those of this call's tokens. `first_position`: where the call has to begin; None if the caller has set the
    positions.
    """

    prefixes: Sequence[Sequence[Prefix]]
    suffixes: Sequence[tuple[Tensor, Tensor]]
    layout: BatchLayout
    new_keys: Tensor
    new_values: Tensor
    first_position: int | None

    def attend(self, queries: Tensor, rules: LogitRules) -> Tensor:
        """Attention of this call's queries `[B, q_heads, T, D]` over document and suffix. Returns `[B, T, q_heads,
        Dv]`."""
        batch, heads, new, dim = queries.shape
        flat = queries.transpose(1, 2).reshape(batch * new, heads, dim)
        out = prefix_attention(flat, self.prefixes, self.suffixes, self.layout, rules)
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
