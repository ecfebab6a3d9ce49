"""Random caches: everything the format can hold."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import strategies as st

from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.codecs import Codec
from kvshelf.artifact.identity import Identity
from kvshelf.artifact.records import Kept, LayerRecord, State, States
from kvshelf.artifact.shape import StateRole
from tests.store.caches import from_heads, make_identity, make_layer, make_merged, make_pruned, split_at_random


@st.composite
def caches(draw: st.DrawFn) -> CompressedCache:
    """Any cache the format can hold: every bit pattern as a number, heads without entries, D != Dv."""
    num_tokens = draw(st.integers(1, 80))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))

    def bits(rows: int, dim: int) -> torch.Tensor:
        raw = torch.randint(0, 256, (rows * dim * dtype.itemsize,), dtype=torch.uint8, generator=generator)
        return raw.view(dtype).view(rows, dim)

    def layer() -> Kept:
        dims = draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
        lengths = draw(st.lists(st.integers(0, num_tokens) | st.just(num_tokens), min_size=1, max_size=4))
        order = [torch.randperm(num_tokens, generator=generator)[:length].sort().values for length in lengths]
        return from_heads(
            keys=[bits(length, dims[0]) for length in lengths],
            values=[bits(length, dims[1]) for length in lengths],
            positions=order,
            rope_mode=draw(st.sampled_from(["baked", "pre"])),
        )

    def states() -> tuple[State, ...]:
        """Some of two roles and two numbers, in order."""
        kinds: list[tuple[StateRole, int]] = [(role, n) for role in ("conv", "recurrent") for n in range(2)]
        chosen = sorted(draw(st.sets(st.sampled_from(kinds), max_size=3)))
        return tuple(State(role, n, bits(draw(st.integers(1, 9)), draw(st.integers(1, 9)))) for role, n in chosen)

    code = st.binary(min_size=8, max_size=8)

    def record() -> LayerRecord:
        """Entries, states, both or neither."""
        has_entries, state = draw(st.booleans()), states() if draw(st.booleans()) else ()
        return layer() if has_entries and not state else States(state, layer() if has_entries else None)

    ends = draw(st.none() | st.sets(st.integers(0, num_tokens - 1), max_size=9))
    return CompressedCache(
        tuple(record() for _ in range(draw(st.integers(1, 3)))),
        num_tokens,
        num_tokens + draw(st.integers(0, 3)),
        draw(identities(num_tokens)),
        sentence_ends=() if ends is None else tuple(sorted({*ends, num_tokens - 1})),
        summary=tuple(draw(st.lists(st.lists(code, min_size=1, max_size=4).map(b"".join), max_size=3))),
    )


@st.composite
def identities(draw: st.DrawFn, num_tokens: int) -> Identity:
    params = draw(
        st.dictionaries(
            st.text(max_size=5), st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False)
        )
    )
    questions = tuple(draw(st.lists(st.text(max_size=9), max_size=3)))
    return make_identity(num_tokens, policy_params=params, expected_questions=questions)


@st.composite
def encoded_caches(draw: st.DrawFn) -> CompressedCache:
    """Any cache: kept and merged records and parts of them, ragged, under every codec, at any next position."""
    num_tokens = draw(st.integers(1, 80))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))

    def layer() -> LayerRecord:
        dims = draw(st.tuples(st.integers(1, 17), st.integers(1, 17)))
        lengths = draw(st.lists(st.integers(0, num_tokens), min_size=1, max_size=4))
        make = draw(st.sampled_from([make_layer, make_merged]))
        record = make(lengths, num_tokens, dims=dims, dtype=dtype, generator=generator)
        record = replace(
            record,
            rope_mode=draw(st.sampled_from(["baked", "pre"])),
            importance=torch.rand(record.entries, generator=generator),
        )
        if isinstance(record, Kept) and draw(st.booleans()):
            record = make_pruned(record, dims[0] + draw(st.integers(0, 9)), generator)
        return split_at_random(record, generator) if draw(st.booleans()) else record

    group = draw(st.sampled_from([8, 16, 32, 1024]))
    names = st.sampled_from(["int8", "int4", "int2"])
    integers = st.builds(Codec, names, group=st.just(group), residual=st.integers(0, 90))
    mixed = st.builds(
        Codec,
        st.just("mixed"),
        group=st.just(group),
        high=st.sampled_from(["none", "int8"]),
        low=st.sampled_from(["int2", "int3", "int4"]),
        share=st.integers(1, 9999).map(lambda n: n / 10_000),
    )
    cache = CompressedCache(
        tuple(layer() for _ in range(draw(st.integers(1, 3)))),
        num_tokens,
        draw(st.integers(1, num_tokens + 3)),
        make_identity(num_tokens),
    )
    cache = replace(cache, sentence_ends=draw(st.sampled_from([(), (num_tokens - 1,), tuple(range(num_tokens))])))
    return cache.encoded(str(draw(st.just(Codec()) | integers | mixed)))
