"""Caches made of random numbers: what the store keeps need not come from a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from kvshelf.store.artifact import CompressedCache, Kept, Merged, PackedRecord, Parts, RopeMode
from kvshelf.store.identity import Identity, ModelIdentity
from kvshelf.store.rows import offsets_of

MODEL = ModelIdentity(
    name="tiny",
    weights="0f" * 20,
    dtype="float32",
    rope='{"theta":10000.0}',
    attention='{"kv_heads":2}',
    tokenizer="ab" * 20,
    template="cd" * 20,
)


def make_identity(num_tokens: int, **changes: Any) -> Identity:
    identity = Identity(
        model=MODEL,
        document="12" * 20,
        num_tokens=num_tokens,
        layout="plain",
        boundary="text",
        prefill="whole",
        policy="keydiff",
        policy_version=1,
        policy_params={"sink": 4, "window": 8, "beta": 0.5, "pooling": "mean"},
        budget_tokens=max(1, num_tokens // 2),
        compression_ratio=0.5,
    )
    return replace(identity, **changes)


def make_layer(
    lengths: Sequence[int],
    num_tokens: int,
    *,
    dims: tuple[int, int] = (8, 8),
    dtype: torch.dtype = torch.float32,
    generator: torch.Generator,
) -> Kept:
    """A layer whose heads keep `lengths` entries at random positions."""
    positions = [
        torch.randperm(num_tokens, generator=generator)[:length].sort().values.to(torch.int32) for length in lengths
    ]
    entries = sum(lengths)
    return Kept(
        keys=torch.randn(entries, dims[0], generator=generator).to(dtype),
        values=torch.randn(entries, dims[1], generator=generator).to(dtype),
        entry_positions=torch.cat(positions),
        offsets=offsets_of(lengths),
    )


def make_merged(
    lengths: Sequence[int],
    num_tokens: int,
    *,
    dims: tuple[int, int] = (8, 8),
    dtype: torch.dtype = torch.float32,
    rope_mode: RopeMode = "baked",
    generator: torch.Generator,
) -> Merged:
    """A layer whose heads keep `lengths` classes, each with its center as a slot of scale 1, and up to twice as many
    slots in all."""
    slots: list[list[tuple[int, int, float]]] = []  # of each head: position, class, scale
    for length in lengths:
        chosen = torch.randperm(num_tokens, generator=generator)[: 2 * length].tolist()
        centers, members = sorted(chosen[:length]), chosen[length:]
        head = [(position, index, 1.0) for index, position in enumerate(centers)]
        for position in members:
            index = int(torch.randint(length, (1,), generator=generator))
            head.append((position, index, 0.5 + float(torch.rand(1, generator=generator))))
        slots.append(sorted(head))
    centers = [[position for position, _, scale in head if scale == 1.0] for head in slots]
    flat = [slot for head in slots for slot in head]
    entries = sum(lengths)
    return Merged(
        keys=torch.randn(entries, dims[0], generator=generator).to(dtype),
        values=torch.randn(entries, dims[1], generator=generator).to(dtype),
        entry_positions=torch.tensor([p for head in centers for p in head], dtype=torch.int32),
        offsets=offsets_of(lengths),
        rope_mode=rope_mode,
        slot_scales=torch.tensor([scale for _, _, scale in flat], dtype=torch.float32),
        slot_classes=torch.tensor([index for _, index, _ in flat], dtype=torch.int32),
        slot_positions=torch.tensor([position for position, _, _ in flat], dtype=torch.int32),
        slot_offsets=offsets_of([len(head) for head in slots]),
    )


def split_at_random(record: PackedRecord, generator: torch.Generator) -> Parts:
    """The same entries as two parts."""
    chosen = torch.rand(record.entries, generator=generator) < 0.5
    return Parts((record.select(chosen), record.select(~chosen)))


def make_cache(
    seed: int = 0,
    *,
    num_tokens: int = 40,
    lengths: Sequence[Sequence[int]] = ((20, 20), (31, 9)),
    dims: tuple[int, int] = (8, 8),
    dtype: torch.dtype = torch.float32,
    **identity: Any,
) -> CompressedCache:
    """One layer for each item of `lengths`. The seed is in the identity, so different seeds have different ids."""
    generator = torch.Generator().manual_seed(seed)
    layers = tuple(make_layer(heads, num_tokens, dims=dims, dtype=dtype, generator=generator) for heads in lengths)
    fields = {"document": f"{seed:040x}"} | identity
    return CompressedCache(layers, num_tokens, num_tokens, make_identity(num_tokens, **fields))


def require_equal(left: CompressedCache, right: CompressedCache) -> None:
    """Every bit of two caches is equal, NaNs and signed zeros included."""
    assert (left.num_tokens, left.next_position, left.identity) == (
        right.num_tokens,
        right.next_position,
        right.identity,
    )
    assert len(left.layers) == len(right.layers)
    for ours, theirs in zip(left.layers, right.layers, strict=True):
        assert (ours.offsets, ours.rope_mode) == (theirs.offsets, theirs.rope_mode)
        for a, b in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
            assert a.dtype == b.dtype
            assert a.shape == b.shape
            assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        assert torch.equal(ours.entry_positions, theirs.entry_positions)
        assert theirs.entry_positions.dtype == torch.int32


def golden_caches() -> dict[str, CompressedCache]:
    """Caches whose blobs are committed. Made by counting: torch's random numbers may change between versions."""

    def layer(heads: Sequence[Sequence[int]], dims: tuple[int, int], dtype: torch.dtype, rope_mode: str) -> Kept:
        entries = sum(len(head) for head in heads)
        keys = torch.arange(entries * dims[0], dtype=torch.float32).view(entries, dims[0]) / 8 - 3
        return Kept.from_heads(
            keys=list(keys.to(dtype).split([len(head) for head in heads])),
            values=[-torch.ones(len(head), dims[1], dtype=dtype) * 0.5 for head in heads],
            positions=[torch.tensor(head, dtype=torch.int64) for head in heads],
            rope_mode=rope_mode,
        )

    every, some, few = list(range(24)), list(range(0, 24, 2)), [3, 20]
    shapes: dict[str, tuple[Sequence[Sequence[Sequence[int]]], tuple[int, int], torch.dtype, str]] = {
        "range-float32": ([[every, every]], (4, 4), torch.float32, "baked"),
        "bitmap-bfloat16": ([[some, every], [every, some]], (6, 4), torch.bfloat16, "baked"),
        "delta-float16": ([[few, [0]], [[], [23]], [[], []]], (3, 5), torch.float16, "pre"),
    }
    return {
        name: CompressedCache(
            tuple(layer(heads, dims, dtype, rope) for heads in layers),
            24,
            24,
            make_identity(24, probe=f"golden {name}"),
        )
        for name, (layers, dims, dtype, rope) in shapes.items()
    }


if __name__ == "__main__":  # python -m tests.store.caches: only ever for a new minor version of the format
    from pathlib import Path

    for name, cache in golden_caches().items():
        (Path(__file__).parent / "golden" / f"{name}.kvb").write_bytes(cache.to_bytes())
