"""Codec klt: how far off it is, which bytes it makes, and what it refuses."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.coded import FIRST_TOKENS, CodedRows
from kvshelf.artifact.coder import codes_bytes, plain_layers
from kvshelf.artifact.records import Kept, Merged, Parts
from kvshelf.artifact.shape import LayerShape
from kvshelf.artifact.transforms import RowTransform, Transforms
from kvshelf.errors import BlobError, InvalidRequest, ModelMismatch, StateConflict
from tests.amounts import amount
from tests.store.caches import make_cache, make_identity, make_merged, require_equal
from tests.store.hostile import Parts as Blob
from tests.store.transforms import make_coder

SHAPES = {
    "all tokens": ((3000, 3000), (3000, 3000)),
    "ragged": ((1, 2900), (0, 3000)),
    "short": ((2, 3), (5, 5)),
    "nothing": ((0, 0), (0, 0)),
}


def scaled(lengths, num_tokens=3000, dtype=torch.float32, scale=4.0, seed=0):
    """A cache whose numbers are some steps large."""
    cache = make_cache(seed, num_tokens=num_tokens, lengths=lengths, dtype=dtype)
    layers = tuple(replace(layer, keys=layer.keys * scale, values=layer.values * scale) for layer in cache.layers)
    return replace(cache, layers=layers)


def head_errors(one: Kept, other: Kept) -> list[float]:
    """The largest distance of a row from what it was, in each head."""
    found = []
    for kind in (0, 1):
        for mine, theirs in zip(one.plain_heads()[kind], other.plain_heads()[kind], strict=True):
            found.append(float((mine.double() - theirs.double()).norm(dim=1).max()) if len(mine) else 0.0)
    return found


@pytest.mark.parametrize("lengths", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("codec", ["klt", "klt:step=0.05", "klt:step=16", "klt:heads=each"])
def test_no_row_is_further_off_than_two_thirds_of_a_step_of_every_coefficient(lengths, codec) -> None:
    """The bases are orthogonal, but for the rounding of their numbers to 16 bits."""
    cache, coder = scaled(lengths), make_coder()
    coded = cache.encoded(codec, coder)
    step = float(codec.partition("step=")[2] or 1.5)
    half = step * 0.65 * (2 * 8) ** 0.5  # as many coefficients as two heads have channels
    for before, after in zip(cache.layers, coded.decoded(coder).layers, strict=True):
        assert max(head_errors(before, after), default=0) < half * 1.01 + 0.1
        assert torch.equal(before.entry_positions, after.entry_positions)
        assert after.keys.dtype == before.keys.dtype


@pytest.mark.parametrize("lengths", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bytes_come_back_and_are_the_same_bytes(lengths, dtype) -> None:
    coder = make_coder()
    coded = scaled(lengths, dtype=dtype).encoded("klt", coder)
    data = coded.to_bytes()
    read = CompressedCache.from_bytes(data)
    assert read.to_bytes() == data
    assert (read.codec, read.identity.transforms) == ("klt", coder.transforms.digest)
    assert (
        read.attached_bytes == coded.attached_bytes == sum(x.entries * (16 * dtype.itemsize + 4) for x in coded.layers)
    )
    require_equal(read.decoded(coder), coded.decoded(coder))


def test_one_head_and_what_its_codes_take_once_decoded() -> None:
    cache, coder = scaled(((300,),) * 2, num_tokens=300), make_coder(heads=1)
    coded = cache.encoded("klt", coder)
    for before, layer, after in zip(cache.layers, coded.layers, coded.decoded(coder).layers, strict=True):
        assert (codes_bytes(before), codes_bytes(layer)) == (0, after.keys.nbytes + after.values.nbytes)
        assert after.keys.dtype == torch.float32  # so a number takes four bytes of either
        assert max(head_errors(before, after)) < 1.5 * 0.65 * 8**0.5 * 1.01 + 0.1


@pytest.mark.parametrize("heads", ["joint", "each"])
def test_values_that_their_keys_foretell_take_few_bytes_and_come_back(heads: str) -> None:
    """Transforms of version 3. Values are their mean and what the slope makes of the key, without rotation."""
    plain = make_coder()
    generator = torch.Generator().manual_seed(9)
    slopes = torch.randn(2, 8, 8, generator=generator)
    means = {kind: plain.transforms.layers[0][kind].mean for kind in ("keys", "values")}
    layers = tuple(
        {**layer, "values": replace(layer["values"], joint_slope=torch.block_diag(*slopes), per_head_slope=slopes)}
        for layer in plain.transforms.layers
    )
    coder = replace(plain, transforms=replace(plain.transforms, layers=layers))
    cache = scaled(((3000, 3000),) * 2)
    keys = cache.layers[0].keys.view(2, 3000, 8)
    values = ((keys - means["keys"][:, None]) @ slopes + means["values"][:, None]).reshape(6000, 8)
    cache = replace(cache, layers=(replace(cache.layers[0], values=values, rope_mode="pre"),) * 2)
    codec = f"klt:step=0.5,heads={heads}"
    blind, foretold = (cache.encoded(codec, own) for own in (plain, coder))
    # What is left is the rounding of keys, times the slopes.
    assert foretold.layers[0].values.nbytes < blind.layers[0].values.nbytes * 0.8
    for before, after in zip(cache.layers, foretold.decoded(coder).layers, strict=True):
        assert max(head_errors(before, after)) < 0.5 * 0.65 * 4 * 1.01 + 0.1


def test_the_first_tokens_are_kept_in_16_bits() -> None:
    cache, coder = scaled(((50, 50),) * 2, num_tokens=50, scale=1000), make_coder()
    for before, after in zip(cache.layers, cache.encoded("klt:step=16", coder).decoded(coder).layers, strict=True):
        for old, new, positions in zip(before.plain_heads()[0], after.plain_heads()[0], before.positions, strict=True):
            first = positions < FIRST_TOKENS
            assert torch.equal(old[first].bfloat16().float(), new[first])
            assert not torch.equal(old[~first].bfloat16().float(), new[~first])


def test_heads_with_the_same_tokens_are_transformed_together() -> None:
    coder = make_coder()
    together, alone = (scaled(lengths).encoded("klt", coder) for lengths in (((3000, 3000),) * 2, ((1, 3000),) * 2))
    assert [layer.keys.joint for layer in together.layers] == [True, True]
    assert [layer.keys.joint for layer in alone.layers] == [False, False]
    assert together.layers[0].keys.run_rows == [[1024, 1024, 948]]
    assert not scaled(((3000, 3000),) * 2).encoded("klt:heads=each", coder).layers[0].keys.joint
    with pytest.raises(InvalidRequest, match="heads of layer 0 keep different tokens, and heads=joint"):
        scaled(((1, 3000),) * 2).encoded("klt:heads=joint", coder)
    with pytest.raises(InvalidRequest, match="heads of layer 0 keep different tokens"):  # as many, but others
        scaled(((700, 700),) * 2).encoded("klt:heads=joint", coder)


def test_keys_that_stand_at_their_places_in_the_cache_are_turned_from_there() -> None:
    """Turned from their places in the document, keys of one direction would point everywhere."""
    coder = make_coder()
    keys = coder.rotate(torch.ones(2, 400, 8) * 3, torch.arange(400)).reshape(800, 8)
    layer = scaled(((400, 400),), num_tokens=4000).layers[0]
    placed = CompressedCache((replace(layer, keys=keys),) * 2, 4000, 400, make_identity(4000))
    assert placed.repositioned
    moved = replace(placed, next_position=4000)
    sizes = [cache.encoded("klt:step=0.5,heads=each", coder).layers[0].keys.nbytes for cache in (placed, moved)]
    assert sizes[0] < sizes[1] / 4
    for cache in (placed, moved):
        after = cache.encoded("klt", coder).decoded(coder).layers[0]
        assert max(head_errors(cache.layers[0], after)) < 1.5 * 0.65 * 4 + 0.1


def test_merged_records_and_parts_keep_all_but_their_rows() -> None:
    generator, coder = torch.Generator().manual_seed(5), make_coder()
    merged = make_merged((40, 30), 300, generator=generator)
    kept = scaled(((60, 60),) * 2, num_tokens=300).layers[0]
    cache = CompressedCache((merged, Parts((kept, merged))), 300, 300, make_identity(300))
    with pytest.raises(InvalidRequest, match="keep different tokens"):
        cache.encoded("klt:heads=joint", coder)
    coded = cache.encoded("klt:step=0.05", coder)
    after = coded.decoded(coder)
    assert isinstance(after.layers[0], Merged)
    assert torch.equal(after.layers[0].slot_scales, merged.slot_scales)
    assert torch.allclose(after.layers[0].keys, merged.keys, atol=0.2)
    assert isinstance(after.layers[1], Parts)


def test_text_that_repeats_itself_takes_a_third_of_the_bytes() -> None:
    cache, coder = scaled(((2900, 2900),) * 2, num_tokens=2900), make_coder()
    keys = cache.layers[0].keys.view(2, 2900, 8)[:, :50].repeat(1, 58, 1).reshape(5800, 8)
    repeated = replace(cache.layers[0], keys=keys, values=keys, rope_mode="pre")
    twice = replace(cache, layers=(repeated,) * 2)
    plain, again = (found.encoded("klt:step=0.5", coder) for found in (cache, twice))
    assert again.nbytes < plain.nbytes / 3
    require_equal(CompressedCache.from_bytes(again.to_bytes()).decoded(coder), again.decoded(coder))


def test_rows_half_an_octave_wider_than_those_of_the_calibration_take_no_more_bytes() -> None:
    """Each channel has a table nearer to its own deviation."""
    plain, cache, sizes = make_coder(), scaled(((3000, 3000),) * 2), []
    for eighths in (12, 16):
        layers = tuple(
            {kind: replace(own, joint_scales=(eighths,) * 16) for kind, own in layer.items()}
            for layer in plain.transforms.layers
        )
        coder = replace(plain, transforms=replace(plain.transforms, layers=layers))
        sizes.append(cache.encoded("klt:step=0.1", coder).nbytes)
    assert sizes[0] < 1.005 * sizes[1]


def test_codes_of_three_bytes_come_back_from_frames() -> None:
    """Numbers of which 16 bits hold half: 20,000 steps of 0.05 in rows that repeat each other."""
    cache, coder = scaled(((1200, 1200),) * 2, num_tokens=1200, scale=900), make_coder()
    rows = cache.layers[0].keys.view(2, 1200, 8)[:, :30].repeat(1, 40, 1).reshape(2400, 8)
    cache = replace(cache, layers=(replace(cache.layers[0], keys=rows, values=rows, rope_mode="pre"),) * 2)
    after = cache.encoded("klt:step=0.05", coder).decoded(coder)
    error = (after.layers[0].keys - rows).norm(dim=1).view(2, 1200)[:, FIRST_TOKENS:].max()
    assert float(rows.abs().max() / 0.05) > 1 << 15
    assert float(error) < float(rows.norm(dim=1).max()) * 2**-11


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["klt:step=0.5", "klt:heads=each"])
def test_layers_that_are_decoded_side_by_side_are_those_of_the_cpu(codec, monkeypatch) -> None:
    """But for the rounding of products. One layer repeats itself, so that its streams are frames."""
    cache, coder = scaled(((40, 40), (40, 40)), num_tokens=40), make_coder()
    keys = cache.layers[0].keys.view(2, 40, 8)[:, :2].repeat(1, 20, 1).reshape(80, 8)
    repeated = replace(cache.layers[0], keys=keys, values=keys, rope_mode="pre")
    coded = replace(cache, layers=(repeated, cache.layers[1])).encoded(codec, coder)
    expected = coded.decoded(coder)
    monkeypatch.setenv("KVSHELF_KERNELS", "triton")
    made = plain_layers(dict(enumerate(coded.layers)), coder, coded.repositioned, torch.device("cpu"))
    for index, layer in enumerate(expected.layers):
        for ours, theirs in zip(made[index].dense()[:2], layer.dense()[:2], strict=True):
            assert torch.allclose(ours, theirs, atol=1e-4)


def test_layers_of_another_codec_are_made_plain_beside_them(monkeypatch) -> None:
    cache, coder = scaled(((40, 40), (40, 40)), num_tokens=40), make_coder()
    layers = {0: cache.encoded("lossless").layers[0], 1: cache.layers[1]}
    monkeypatch.setenv("KVSHELF_KERNELS", "triton")
    made = plain_layers(layers, coder, cache.repositioned, torch.device("cpu"))
    assert all(torch.equal(made[index].keys, cache.layers[index].keys) for index in layers)


def test_a_device_holds_a_transform_unless_it_is_large() -> None:
    """`meta` stands for a card. 2 heads of 1,024 channels have a basis of 16 MiB of all heads, and 8 of each."""
    device = torch.device("meta")
    for transform, stays in ((make_coder().transforms.layers[0]["keys"], True), (wide_transform(), False)):
        decoder = transform.decoder_on(device)
        assert decoder.joint.device == device
        assert (transform.decoder_on(device) is decoder) == stays


def wide_transform() -> RowTransform:
    mean, joint, each = torch.zeros(2, 1024), torch.eye(2048), torch.eye(1024).repeat(2, 1, 1)
    return RowTransform(mean, joint, each, (0,) * 2048, ((0,) * 1024,) * 2, 1.0)


@pytest.mark.parametrize("joint", [True, False])
def test_what_decodes_on_a_device_undoes_weights_there(joint) -> None:
    """Version 2. Slopes are the same tensors."""
    generator = torch.Generator().manual_seed(4)
    plain = make_coder().transforms.layers[0]["values"]
    root = torch.randn(2, 8, 8, generator=generator)
    weighted = replace(plain, weight=root @ root.mT + torch.eye(8))
    decoder = weighted.decoder_on(torch.device("cpu"))
    for head in [None] if joint else [0, 1]:
        assert torch.equal(decoder.synthesis(head), weighted.synthesis(head))
        assert not torch.equal(decoder.synthesis(head), plain.synthesis(head))


CLASSES = "klt:classes=0.25/1/4,shares=20/20/20"


def scored(lengths, num_tokens=3000, seed=7):
    """A cache with importance."""
    cache, generator = scaled(lengths, num_tokens=num_tokens), torch.Generator().manual_seed(seed)
    layers = tuple(replace(x, importance=torch.rand(x.entries, generator=generator)) for x in cache.layers)
    return replace(cache, layers=layers, identity=replace(cache.identity, budget_tokens=num_tokens))


def test_the_most_important_entries_of_the_whole_cache_have_the_finest_steps() -> None:
    cache, coder = scored(((3000, 2500), (1, 2800))), make_coder()
    cache.layers[0].importance.add_(0.25)  # more of this layer are above the threshold
    coded = cache.encoded(CLASSES, coder)
    counts, least = [], []
    for place, step in enumerate((0.25, 1, 4)):
        parts = [layer.parts[place] for layer in coded.layers]
        assert {part.keys.step_parts for part in parts} == {step * 10_000}
        counts.append(sum(part.entries for part in parts))
        found = []
        for part, before in zip(parts, cache.layers, strict=True):
            for at, positions, scores in zip(
                part.positions, before.positions, torch.split(before.importance, before.lengths), strict=True
            ):
                found.append(scores[torch.isin(positions, at)])
        least.append((float(torch.cat(found).min()), float(torch.cat(found).max())))
    assert counts == [2400, 2400, 8301 - 4800]  # 20 % of 4 heads of 3,000 tokens, and the rest
    assert least[0][0] >= least[1][1] >= least[1][0] >= least[2][1]
    after = coded.decoded(coder)
    for before, layer in zip(cache.layers, after.layers, strict=True):
        ours, exact = (torch.cat([rows.flatten() for rows in record.dense()[:2]]) for record in (layer, before))
        assert float((ours - exact).abs().max()) < 4 * 0.65 * 8**0.5 * 1.01 + 0.1


def test_a_cache_in_classes_comes_back_from_its_bytes() -> None:
    cache, coder = scored(((3000, 2500), (1, 2800))), make_coder()
    for codec in (CLASSES, "klt:steps=kl,classes=0.25/4,shares=1/1"):
        coded = cache.encoded(codec, coder)
        data = coded.to_bytes()
        read = CompressedCache.from_bytes(data)
        assert (read.to_bytes(), read.codec) == (data, codec)
        require_equal(read.decoded(coder), coded.decoded(coder))


def test_classes_that_nobody_is_in_have_no_record() -> None:
    cache, coder = scored(((2, 0), (0, 0)), num_tokens=40), make_coder()
    coded = cache.encoded("klt:classes=1/2/4,shares=25/25/50", coder)
    assert [type(layer) for layer in coded.layers] == [Kept, Kept]
    assert coded.layers[0].keys.step_parts == 10_000
    assert CompressedCache.from_bytes(coded.to_bytes()).kept_tokens == coded.kept_tokens


def test_classes_need_importance_and_as_many_entries_as_their_shares() -> None:
    cache, coder = scored(((1500, 1500),) * 2), make_coder()
    with pytest.raises(InvalidRequest, match="codec klt chooses by importance, and layer 1 carries none any more"):
        replace(cache, layers=(cache.layers[0], replace(cache.layers[1], importance=None))).encoded(CLASSES, coder)
    fewer = replace(cache, identity=replace(cache.identity, budget_tokens=1799))
    with pytest.raises(InvalidRequest, match="add up to 60 % of the document's entries, and the policy keeps 1799"):
        fewer.encoded(CLASSES, coder)
    replace(cache, identity=replace(cache.identity, budget_tokens=1800)).encoded(CLASSES, coder)


def test_steps_by_kl_are_those_of_each_tensor_s_multiplier() -> None:
    """The array holds its own step: caches are decoded without the multipliers."""
    cache, coder, even = scaled(((3000, 3000),) * 2), make_coder(multipliers=(0.5, 2.0)), make_coder()
    coded = cache.encoded("klt:step=1.2,steps=kl", coder)
    for layer in coded.layers:
        assert (layer.keys.step_parts, layer.values.step_parts) == (6_000, 24_000)
    require_equal(coded.decoded(coder), coded.decoded(even))
    for codec in ("klt:step=1.2", "klt:step=1.2,steps=even"):
        assert {x.keys.step_parts for x in cache.encoded(codec, coder).layers} == {12_000}


@pytest.mark.parametrize("step", ["0.04", "16.1", "0", "1e1", "-1", "", "1.00001", "nan", "999"])
def test_a_step_out_of_range_is_named(step: str) -> None:
    with pytest.raises(InvalidRequest, match=r"step must be from 0.05 to 16"):
        scaled(SHAPES["short"]).encoded(f"klt:step={step}", make_coder())


def test_what_cannot_be_encoded_or_read_is_refused_by_name() -> None:
    cache, coder = scaled(SHAPES["short"]), make_coder()
    with pytest.raises(InvalidRequest, match="needs the transforms of the model"):
        cache.encoded("klt")
    coded = cache.encoded("klt", coder)
    with pytest.raises(InvalidRequest, match="is encoded under klt and is not encoded again under int4"):
        coded.encoded("int4")
    with pytest.raises(StateConflict, match="decode it with its model"):
        coded.layers[0].prefixes()
    with pytest.raises(StateConflict, match="decode it with its model"):
        coded.layers[0].dense()
    layer = cache.layers[0]
    with pytest.raises(InvalidRequest, match="NaN or infinity"):
        replace(cache, layers=(replace(layer, keys=layer.keys * float("inf")),) * 2).encoded("klt", coder)


def test_transforms_are_checked_when_they_are_read() -> None:
    transforms = make_coder().transforms
    assert Transforms.from_bytes(transforms.data).digest == transforms.digest
    draw = random.Random(3)
    for _ in range(200):
        data = bytearray(transforms.data)
        start = draw.randrange(len(data))
        data[start : start + draw.choice([1, 8, 500])] = draw.randbytes(draw.choice([0, 1, 8, 500]))
        try:
            found = Transforms.from_bytes(bytes(data))
        except InvalidRequest:
            continue
        assert found.digest != transforms.digest or bytes(data) == transforms.data
    for multiplier in (0.3, 3.1, float("nan"), 0.0, -1.0):
        with pytest.raises(InvalidRequest, match="multiplies steps by"):
            make_coder(multipliers=(multiplier, 1.0))
    model = make_identity(1).model
    transforms.require_of(model, [LayerShape(2, 8, 8, "float32")] * 2)
    for other, sizes, words in (
        (replace(model, weights="00"), [(2, 8, 8)] * 2, "of other weights"),
        (model, [(2, 8, 8)], "have 2 layers of 2 KV heads .* has 1 layers of 2 KV heads"),
        (model, [(2, 8, 16)] * 2, "keys of 8 and values of 8 channels, and .* keys of 8 and values of 16 channels;"),
        (model, [(2, 8, 8), (1, 8, 8)], "has 1 layers of 2 KV heads .* channels, 1 layers of 1 KV heads"),
    ):
        with pytest.raises(ModelMismatch, match=f"{transforms.digest[:16]} .*{words}"):
            transforms.require_of(other, [LayerShape(*layer, "float32") for layer in sizes])


@pytest.mark.parametrize("codec", ["klt", "klt:steps=kl,classes=1.5/4,shares=50/50"])
def test_forged_streams_are_refused_or_give_bounded_numbers(codec: str) -> None:
    """Right digests, other bytes: nothing crashes, and no more is decoded than the header counts."""
    coder = make_coder()
    blob = scored(((600, 600), (1, 600)), num_tokens=600).encoded(codec, coder).to_bytes()
    draw, outcomes = random.Random(18), {"refused": 0, "decoded": 0}
    for number in range(amount(120, 300)):
        parts = Blob(blob)
        array = parts.array(0, draw.choice(["keys coded", "values coded"]))
        if number % 3:
            start = draw.randrange(0, len(array))
            stop = min(len(array), start + draw.choice((1, 4, 64)))
            array[start:stop] = draw.randbytes(stop - start)
        else:
            words = np.frombuffer(array, "<u4")
            words[draw.randrange(8)] = draw.choice([0, 1, 2, 4, 600, 2**31, 2**32 - 1])
            del words
        del array
        try:
            read = CompressedCache.from_bytes(parts.join())
            layers = read.decoded(coder).layers
        except BlobError:
            outcomes["refused"] += 1
        else:
            parts = [part for layer in layers for part in (layer.parts if isinstance(layer, Parts) else (layer,))]
            assert all(part.keys.shape == (part.entries, 8) for part in parts)
            outcomes["decoded"] += 1
    assert min(outcomes.values()) > 20, outcomes


def test_rows_are_decoded_by_their_own_lengths() -> None:
    rows = scaled(((600, 600),) * 2, num_tokens=600).encoded("klt", make_coder()).layers[0].keys
    assert isinstance(rows, CodedRows)
    for lengths in ((599, 601), (600, 599), (600,), (1 << 30, 1 << 30), (1 << 62, 1 << 62)):
        with pytest.raises(BlobError):
            replace(rows, lengths=lengths).require_sound("keys")
    for end in (1, 2, 3, 5, 7, 8, 11, 400, rows.nbytes - 4, rows.nbytes - 1):
        with pytest.raises(BlobError):
            replace(rows, data=rows.data[:end]).require_sound("keys")


@pytest.mark.parametrize(("codec", "transforms"), [("klt", ""), ("none", "ab" * 32), ("int4", "ab" * 32)])
def test_transforms_belong_to_codec_klt_alone(codec: str, transforms: str) -> None:
    """Else a cache is taken in, and each question of it is an error about what is inside."""
    cache = scaled(SHAPES["short"])
    parts = Blob((cache.encoded("klt", make_coder()) if codec == "klt" else cache).to_bytes(codec))
    parts.fields["identity"]["transforms"] = transforms
    with pytest.raises(BlobError, match="codec klt has some, and no other") as refused:
        CompressedCache.from_bytes(parts.join())
    assert refused.value.reason == "inconsistent"
