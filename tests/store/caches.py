"""Caches made of random numbers: what the store keeps need not come from a model."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.identity import Identity, ModelIdentity, RopeMode
from kvshelf.artifact.packed import offsets_of
from kvshelf.artifact.planes import PlaneRows
from kvshelf.artifact.records import (
    Indexed,
    Kept,
    Latents,
    LayerRecord,
    Merged,
    PackedRecord,
    Parts,
    Pruned,
    Residuals,
    State,
    States,
    entries_of,
    states_of,
)
from kvshelf.kernels.quantize.rows import QuantizedRows

MODEL = ModelIdentity(
    name="tiny",
    weights="0f" * 20,
    dtype="float32",
    rope='{"theta":10000.0}',
    attention='{"kv_heads":2}',
    tokenizer="ab" * 20,
    template="cd" * 20,
)


def from_heads(
    keys: Sequence[Tensor], values: Sequence[Tensor], positions: Sequence[Tensor], rope_mode: RopeMode = "baked"
) -> Kept:
    """Pack one tensor per KV head: keys `[kept_h, D]`, values `[kept_h, Dv]`, positions `[kept_h]`."""
    return Kept(
        keys=torch.cat(list(keys)),
        values=torch.cat(list(values)),
        entries_at=torch.cat(list(positions)).to(torch.int32),
        offsets=offsets_of([head.shape[0] for head in positions]),
        rope_mode=rope_mode,
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
        entries_at=torch.cat(positions),
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
        entries_at=torch.tensor([p for head in centers for p in head], dtype=torch.int32),
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


def extended(parent: CompressedCache, seed: int = 1, *, entries: int = 30, tokens: int = 50) -> CompressedCache:
    """The cache of a document that goes on for `tokens` more tokens, of which every head keeps `entries`: the parent's
    records, and one more in each layer."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = parent.num_tokens + tokens
    document = hashlib.sha1(f"{seed} {parent.identity.document}".encode()).hexdigest()
    layers: list[LayerRecord] = []
    for record in parent.layers:
        old = parts_of(record)
        new = make_layer(
            [entries] * old[0].kv_heads,
            tokens,
            dims=(old[0].key_dim, old[0].value_dim),
            dtype=old[0].dtype,
            generator=generator,
        )
        new = replace(new, entries_at=new.entry_positions + parent.num_tokens)
        added = replace(parent, layers=(new,), num_tokens=num_tokens, codec="none").encoded(parent.codec)
        layers.append(Parts((*old, *parts_of(added.layers[0]))))
    identity = replace(parent.identity, document=document, num_tokens=num_tokens)
    return replace(parent, layers=tuple(layers), num_tokens=num_tokens, next_position=num_tokens, identity=identity)


def family(generations: int, seed: int = 0, *, entries: int = 32) -> list[CompressedCache]:
    """A cache of 16 KiB for 32 `entries`, the cache that extends it, the one that extends that, and so on."""
    caches = [make_cache(seed, num_tokens=2 * entries, lengths=((entries,),), dims=(64, 64))]
    while len(caches) < generations:
        caches.append(extended(caches[-1], len(caches), entries=entries, tokens=2 * entries))
    return caches


def parts_of(record: LayerRecord) -> tuple[PackedRecord, ...]:
    entries = entries_of(record)
    return () if entries is None else entries.parts if isinstance(entries, Parts) else (entries,)


def tensors_of(record: PackedRecord) -> dict[str, Tensor]:
    """Everything a record holds, by name."""
    tensors = {"positions": record.entry_positions}
    for name, rows in (("keys", record.keys), ("values", record.values)):
        if isinstance(rows, Tensor | PlaneRows):
            tensors[name] = rows if isinstance(rows, Tensor) else rows.data
        else:
            tensors |= {f"{name} {what}": getattr(rows, what) for what in ("codes", "scales", "zeros")}
    return tensors | {name: getattr(record, name) for name in record.own_tensors} | dict(record.columns)


def require_equal(left: CompressedCache, right: CompressedCache) -> None:
    """Every bit of two caches is equal, NaNs and signed zeros included."""
    for name in ("num_tokens", "next_position", "identity", "codec", "sentence_ends", "summary"):
        assert getattr(left, name) == getattr(right, name)
    assert len(left.layers) == len(right.layers)
    for ours, theirs in zip(left.layers, right.layers, strict=True):
        assert type(ours) is type(theirs)
        for a, b in zip(parts_of(ours), parts_of(theirs), strict=True):
            require_equal_records(a, b)
        assert [state.shape for state in states_of(ours)] == [state.shape for state in states_of(theirs)]
        for one, other in zip(states_of(ours), states_of(theirs), strict=True):
            assert torch.equal(one.tensor.view(torch.uint8), other.tensor.view(torch.uint8))


def require_equal_records(ours: PackedRecord, theirs: PackedRecord) -> None:
    assert type(ours) is type(theirs)
    assert (ours.offsets, ours.rope_mode) == (theirs.offsets, theirs.rope_mode)
    if isinstance(ours, Merged) and isinstance(theirs, Merged):
        assert ours.slot_offsets == theirs.slot_offsets
    for a, b in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
        if isinstance(a, QuantizedRows) and isinstance(b, QuantizedRows):
            layouts = [(r.bits, r.group, r.axis, r.num_channels, r.dtype, r.lengths) for r in (a, b)]
            assert layouts[0] == layouts[1]
    mine, other = tensors_of(ours), tensors_of(theirs)
    assert mine.keys() == other.keys()
    for name, tensor in mine.items():
        assert tensor.dtype == other[name].dtype
        assert tensor.shape == other[name].shape
        if tensor.numel():  # torch cannot view nothing as bytes
            assert torch.equal(tensor.contiguous().view(torch.uint8), other[name].contiguous().view(torch.uint8)), name


@functools.cache
def golden_caches() -> dict[str, CompressedCache]:
    """Caches whose blobs are committed. Made by counting: torch's random numbers may change between versions."""

    def layer(heads: Sequence[Sequence[int]], dims: tuple[int, int], dtype: torch.dtype, rope_mode: RopeMode) -> Kept:
        entries = sum(len(head) for head in heads)
        keys = torch.arange(entries * dims[0], dtype=torch.float32).view(entries, dims[0]) / 8 - 3
        return from_heads(
            keys=list(keys.to(dtype).split([len(head) for head in heads])),
            values=[-torch.ones(len(head), dims[1], dtype=dtype) * 0.5 for head in heads],
            positions=[torch.tensor(head, dtype=torch.int64) for head in heads],
            rope_mode=rope_mode,
        )

    every, some, few = list(range(24)), list(range(0, 24, 2)), [3, 20]
    shapes: dict[str, tuple[Sequence[Sequence[Sequence[int]]], tuple[int, int], torch.dtype, RopeMode]] = {
        "range-float32": ([[every, every]], (4, 4), torch.float32, "baked"),
        "bitmap-bfloat16": ([[some, every], [every, some]], (6, 4), torch.bfloat16, "baked"),
        "delta-float16": ([[few, [0]], [[], [23]], [[], []]], (3, 5), torch.float16, "pre"),
    }
    plain = {
        name: CompressedCache(
            tuple(layer(heads, dims, dtype, rope) for heads in layers),
            24,
            24,
            make_identity(24, probe=f"golden {name}"),
        )
        for name, (layers, dims, dtype, rope) in shapes.items()
    }
    summarised = replace(plain["range-float32"], summary=(bytes(range(16)), bytes(8)))
    return plain | {"summary": summarised} | encoded_golden_caches(plain)


def encoded_golden_caches(plain: Mapping[str, CompressedCache]) -> dict[str, CompressedCache]:
    """Codecs, merged records, latents, several records per layer, relative positions."""
    ragged, whole, sparse = plain["bitmap-bfloat16"], plain["range-float32"], plain["delta-float16"]
    ranked = tuple(
        replace(record, importance=torch.arange(record.entries).remainder(7).float()) for record in ragged.layers
    )
    noted = tuple(
        replace(record, columns={"sum": torch.arange(record.entries) / 8, "rate": -torch.ones(record.entries) / 4})
        for record in ragged.layers
    )
    merged = golden_merged()
    merged_layers = CompressedCache((merged, replace(merged, rope_mode="pre")), 24, 24, make_identity(24, policy="ems"))
    numbers = torch.arange(24, dtype=torch.float32)
    states = (State("conv", 0, numbers.view(6, 4).bfloat16()), State("recurrent", 0, -numbers.view(2, 3, 4)))
    beside = tuple(States(states, record) for record in ragged.layers)
    indexed = CompressedCache((make_indexed(24, 8),), 24, 24, make_identity(24, policy="infllm"))
    latents = CompressedCache((golden_latents(),), 24, 24, make_identity(24, probe="golden latents"))
    pruned = CompressedCache((golden_pruned(),), 24, 24, make_identity(24, policy="think"))
    residuals = CompressedCache((golden_residuals(),), 24, 24, make_identity(24, policy="kvdirect"))
    return {
        "residuals": residuals,
        "residuals-int4": residuals.encoded("int4:group=8,residual=2"),
        "states": replace(ragged, layers=(*beside, States(states[:1]), States(()))),
        "pruned": pruned,
        "pruned-int4": pruned.encoded("int4:group=8,residual=2"),
        "latents": latents,
        "latents-int4": latents.encoded("int4:group=8,residual=2"),
        "indexed": indexed,
        "indexed-int4": indexed.encoded("int4:group=8,residual=3"),
        "int4-residual": ragged.encoded("int4:group=8,residual=5"),
        "int8-float32": whole.encoded("int8:residual=0"),
        "int2-float16": replace(sparse, layers=(sparse.layers[0], ragged_float16())).encoded(
            "int2:group=16,residual=1"
        ),
        "mixed-bfloat16": replace(ragged, layers=ranked).encoded("mixed:low=int4,share=0.25,group=8"),
        "columns": replace(ragged, layers=noted),
        "columns-int4": replace(ragged, layers=noted).encoded("int4:group=8,residual=5"),
        "mixed-int3": replace(ragged, layers=ranked).encoded("mixed:low=int3,share=0.25,group=8"),
        "lossless-bfloat16": ragged.encoded("lossless"),
        "residual-only": sparse.encoded("int4"),
        "merged": merged_layers,
        "merged-int4": merged_layers.encoded("int4:group=8,residual=1"),
        "relative": replace(whole, next_position=3),
        "sentences": replace(whole, sentence_ends=(0, 8, 23)),
    }


def golden_merged() -> Merged:
    """Three heads: two classes with five slots, no class, one class with one slot."""
    return Merged(
        keys=torch.arange(9, dtype=torch.float32).view(3, 3) / 8 - 0.5,
        values=torch.arange(15, dtype=torch.float32).view(3, 5) - 7,
        entries_at=torch.tensor([4, 20, 7], dtype=torch.int32),
        offsets=(0, 2, 2, 3),
        slot_scales=torch.tensor([0.5, 1, 1.25, 1, 0.75, 1]),
        slot_classes=torch.tensor([1, 0, 1, 1, 0, 0], dtype=torch.int32),
        slot_positions=torch.tensor([2, 4, 9, 20, 23, 7], dtype=torch.int32),
        slot_offsets=(0, 5, 5, 6),
    )


def make_indexed(tokens: int, block: int, width: int = 4) -> Indexed:
    """Every token of two heads, of 6 and 4 channels, in blocks."""
    numbers = torch.arange(2 * tokens * 10, dtype=torch.float32).view(2 * tokens, 10)
    blocks = -(-tokens // block)
    return Indexed(
        keys=(numbers[:, :6] * 37 % 11 - 5).to(torch.bfloat16),
        values=(numbers[:, 6:] * 29 % 17 / 4).to(torch.bfloat16),
        entries_at=torch.arange(tokens, dtype=torch.int32).repeat(2),
        offsets=(0, tokens, 2 * tokens),
        block=block,
        summaries=(torch.arange(blocks * width).view(blocks, width) % 7 - 3).to(torch.bfloat16),
    )


def make_pruned(record: Kept, full_dim: int, generator: torch.Generator) -> Pruned:
    """The same entries, their keys' channels some of `full_dim`, others in each head."""
    heads = (torch.randperm(full_dim, generator=generator)[: record.key_dim] for _ in range(record.kv_heads))
    channels = torch.stack([head.sort().values for head in heads]).to(torch.int16)
    own: dict[str, Any] = {field.name: getattr(record, field.name) for field in fields(Kept)}
    return Pruned(**own | {"rope_mode": "baked"}, channels=channels, full_dim=full_dim)


def golden_pruned() -> Parts:
    """Three heads: 12 tokens, none and 5 whose keys have 3 of 7 channels, and the last two tokens with all."""
    numbers = torch.arange(17 * 7, dtype=torch.float32).view(17, 7)
    last = torch.arange(6 * 11, dtype=torch.float32).view(6, 11)
    pruned = Pruned(
        keys=(numbers[:, :3] * 37 % 11 - 5).to(torch.bfloat16),
        values=(numbers[:, 3:] * 29 % 17 / 4).to(torch.bfloat16),
        entries_at=torch.tensor([*range(0, 21, 2), 21, *range(5)], dtype=torch.int32),
        offsets=(0, 12, 12, 17),
        channels=torch.tensor([[0, 1, 6], [2, 3, 4], [0, 5, 6]], dtype=torch.int16),
        full_dim=7,
    )
    whole = Kept(
        keys=(last[:, :7] * 31 % 13 - 6).to(torch.bfloat16),
        values=(last[:, 7:] * 23 % 19 / 4).to(torch.bfloat16),
        entries_at=torch.tensor([22, 23] * 3, dtype=torch.int32),
        offsets=(0, 2, 4, 6),
    )
    return Parts((pruned, whole))


def golden_residuals() -> Residuals:
    """Every second token of three heads, with keys of 4 channels and values of 5, as a residual of 7."""
    numbers = torch.arange(12 * 7, dtype=torch.float32).view(12, 7)
    return Residuals(
        keys=(numbers * 37 % 11 - 5).to(torch.bfloat16),
        values=torch.empty(12, 0, dtype=torch.bfloat16),
        entries_at=torch.arange(0, 24, 2, dtype=torch.int32).repeat(3),
        offsets=(0, 12, 24, 36),
        full_dims=(4, 5),
    )


def golden_latents() -> Latents:
    """Every second token, with a latent of 6 channels and a rotated part of 3."""
    numbers = torch.arange(12 * 9, dtype=torch.float32).view(12, 9)
    return Latents(
        keys=(numbers[:, :6] * 37 % 11 - 5).to(torch.bfloat16),
        values=(numbers[:, 6:] * 29 % 17 / 4).to(torch.bfloat16),
        entries_at=torch.arange(0, 24, 2, dtype=torch.int32),
        offsets=(0, 12),
    )


def ragged_float16() -> Kept:
    """Two heads of 19 and 3 entries, of odd dimensions."""
    numbers = torch.arange(22 * 5, dtype=torch.float32).view(22, 5)
    return Kept(
        keys=(numbers[:, :3] * 37 % 11 - 5).to(torch.float16),
        values=(numbers * 29 % 17 / 4).to(torch.float16),
        entries_at=torch.cat([torch.arange(5, 24), torch.tensor([0, 11, 12])]).to(torch.int32),
        offsets=(0, 19, 22),
        rope_mode="pre",
    )


if __name__ == "__main__":  # python -m tests.store.caches: only when the format changes
    from pathlib import Path

    for name, cache in golden_caches().items():
        (Path(__file__).parents[1] / "artifact" / "golden" / f"{name}.kvb").write_bytes(cache.to_bytes())
