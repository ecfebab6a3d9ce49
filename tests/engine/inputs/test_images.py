"""Documents with images: a stored one answers as the whole model with its pixels, and pixels are in its identity."""

from __future__ import annotations

import base64
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from kvshelf.artifact.cache import CompressedCache
from kvshelf.engine.attention.attached import CACHE_ARGUMENT
from kvshelf.engine.engine import Engine
from kvshelf.errors import Cancelled, DocumentTooLong, InvalidRequest, PolicyUnsupported, StateConflict
from kvshelf.integrations.vllm.model import ReadingModel
from tests.images import OLDER, block, picture, processor, save_image_model

pytestmark = pytest.mark.skipif(OLDER, reason="this transformers needs torchvision to see")
ROWS = "The harbour of Brask has forty berths. The wheel is under the kettle and the code is 482913. "
BETWEEN = " The tide is on the other page.\n"
PICTURES = [picture(1), picture(2, 33, 70)]
DOCUMENT: list[Any] = [
    {"text": ROWS},
    block(PICTURES[0]),
    {"text": BETWEEN},
    block(PICTURES[1]),
    {"text": ROWS},
]
WRITTEN = f"{ROWS}<image>{BETWEEN}<image>{ROWS}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("sees")
    save_image_model(made)
    return made


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return Engine.load(str(folder), device="cpu", dtype="float32")


def document_id(engine: Engine, document: Any, **more: Any) -> str:
    return engine.prepare(document, policy="full", **more).identity.content()


@pytest.mark.parametrize(("family", "split"), [("smolvlm", True), ("smolvlm", False), ("idefics3", True)])
def test_a_stored_document_says_what_the_whole_model_says_of_its_pixels(
    family: str, split: bool, tmp_path: Path
) -> None:
    whole = save_image_model(tmp_path, family, split=split, seed=3)
    given = processor(tmp_path)(text=WRITTEN, images=[PICTURES], return_tensors="pt", add_special_tokens=False)
    engine = Engine.load(str(tmp_path), device="cpu", dtype="float32")
    job = engine.prepare(DOCUMENT, policy="full", layout="plain")
    assert list(job.document.token_ids) == given["input_ids"][0].tolist(), "transformers' own tokens"
    cache = CompressedCache.from_bytes(engine.run(job).cache.to_bytes())
    question = torch.tensor([engine.encode_query(cache, "Where is the wheel?")])
    del given["attention_mask"]
    given["input_ids"] = torch.cat([given["input_ids"], question], dim=1)
    with torch.no_grad():
        expected = whole(**given).logits[0, -question.shape[1] :]
        blind = whole(input_ids=given["input_ids"]).logits[0, -question.shape[1] :]
        with engine.attached(cache) as past:
            found = engine.model(question, **{CACHE_ARGUMENT: past}).logits[0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert (found - blind).abs().max() > 0.01, "the pixels count"


def test_marks_around_an_image_take_no_white_space_whatever_the_tokenizers_file_says(tmp_path: Path) -> None:
    save_image_model(tmp_path)
    file = tmp_path / "tokenizer.json"
    said = json.loads(file.read_text())
    for token in said["added_tokens"]:
        token["lstrip"] = token["rstrip"] = "image" in token["content"]
    file.write_text(json.dumps(said))
    given = processor(tmp_path)(text="The tide  <image>  is\n", images=[PICTURES[:1]], add_special_tokens=False)
    engine = Engine.load(str(tmp_path), device="cpu", dtype="float32")
    document = [{"text": "The tide  "}, block(PICTURES[0]), {"text": "  is\n"}]
    job = engine.prepare(document, policy="full", layout="plain")
    assert list(job.document.token_ids) == list(given["input_ids"][0])


@pytest.mark.parametrize(
    "how",
    [
        {"policy": "full"},
        {"policy": "keydiff"},
        {"policy": "snapkv", "expected_questions": ["Where is the wheel?"]},
        {"policy": "ada"},
        {"policy": "think", "whole_keys": 8},
        {"policy": "streaming_llm", "positions": "cache"},
    ],
    ids=lambda how: how["policy"],
)
def test_policies_that_look_at_keys_and_attention_reduce_them(engine: Engine, how: dict[str, Any]) -> None:
    ratio = None if how["policy"] == "full" else 0.5
    cache = engine.compress(DOCUMENT, compression_ratio=ratio, **how)
    assert cache.kept_tokens == (cache.num_tokens if ratio is None else cache.num_tokens // 2)
    other = engine.compress([*DOCUMENT[:3], block(picture(9, 33, 70)), DOCUMENT[4]], compression_ratio=ratio, **how)
    assert cache.num_tokens == other.num_tokens
    for stored in (cache, engine.encoded(cache, "int8")):
        again = CompressedCache.from_bytes(stored.to_bytes())
        assert len(engine.answer(again, "Where is the wheel?", max_new_tokens=4).token_ids) == 4
    first, second = (one.layers[1].dense()[1] for one in (cache, other))
    assert first.shape != second.shape or not torch.equal(first, second), "other pixels, other values"


def test_quality_asks_by_cues_of_text_alone(engine: Engine) -> None:
    job = engine.prepare(DOCUMENT * 3, policy="keydiff", compression_ratio=0.5)
    probe = engine.probe(job)
    assert probe is not None
    assert probe.passes
    assert engine.facts.images is not None
    assert all(engine.facts.images.token_id not in cue.token_ids for cue in probe.passes)
    made = engine.run_levels([engine.compressor.level(job, "none")])[0]
    assert made.quality is not None
    assert made.quality.asked == len(probe.passes)
    assert made.cache.summary == (), "a search compares words"


def test_cues_beside_the_pass_see_the_pixels_that_those_behind_a_cache_see(engine: Engine) -> None:
    job = engine.prepare(DOCUMENT * 3, policy="full")
    beside = engine.compressor.prefill([engine.compressor.level(job, "none")], cues=20)
    behind = engine.compressor.reference(job, beside.compressions[0].cache)
    assert beside.reference is not None
    assert behind is not None
    torch.testing.assert_close(beside.reference.log_probs, behind.log_probs, atol=1e-4, rtol=1e-4)


def test_pixels_are_in_the_identity_and_no_file_is(engine: Engine) -> None:
    image = picture(5)
    same = [block(image), block(image, optimize=True), block(image, compress_level=0), block(image.convert("RGBA"))]
    assert len({document_id(engine, [{"text": ROWS}, one]) for one in same}) == 1
    grey = image.convert("P", palette=Image.Palette.ADAPTIVE)
    assert document_id(engine, [block(grey)]) == document_id(engine, [block(grey.convert("RGB"))])
    others = [
        block(image, "JPEG"), block(image.transpose(Image.Transpose.ROTATE_90)), block(image.crop((0, 0, 59, 40))),
    ]  # fmt: skip
    assert len({document_id(engine, [{"text": ROWS}, one]) for one in [same[0], *others]}) == 4
    both = [block(image), block(picture(6))]
    orders = [both, both[::-1], both[:1], [both[0], {"text": ROWS}, both[1]]]
    assert len({document_id(engine, order) for order in orders}) == 4
    made = engine.prepare([{"text": ROWS}, both[0]], policy="full").identity
    assert [(end - first, len(pixels)) for first, end, pixels in made.images] == [(33, 64)]
    assert made.from_dict(made.to_dict()) == made


def test_a_thousand_images_of_one_other_pixel_never_share_an_id(engine: Engine) -> None:
    image, found, documents = picture(7, 16, 16), set(), set()
    for at in range(1000):
        other = image.copy()
        place = at % 16, at // 16 % 16
        pixel = list(other.getpixel(place))
        pixel[at // 256 % 3] ^= 1 + at // 768
        other.putpixel(place, tuple(pixel))
        identity = engine.prepare([block(other, compress_level=0)], policy="full", layout="plain").identity
        found.add(identity.cache_id(key=bytes(32), tenant="t", codec="none", format_major=1))
        documents.add(identity.document_id(key=bytes(32), tenant="t"))
    assert len(found) == len(documents) == 1000


def test_the_encoder_is_in_the_identity_of_images_alone(engine: Engine, tmp_path: Path) -> None:
    whole = save_image_model(tmp_path)
    with torch.no_grad():
        whole.model.connector.modality_projection.proj.weight[0, 0] += 1
    whole.save_pretrained(tmp_path)
    other = Engine.load(str(tmp_path), device="cpu", dtype="float32")
    assert other.identity == engine.identity
    assert document_id(engine, ROWS) == document_id(other, ROWS)
    assert document_id(engine, [{"text": ROWS}]) == document_id(engine, ROWS), "blocks without an image are their text"
    assert document_id(engine, DOCUMENT) != document_id(other, DOCUMENT)


def test_protect_counts_characters_of_the_text_around_images(engine: Engine) -> None:
    marked = [*DOCUMENT[:4], {"text": ROWS, "protect": True}]
    job = engine.prepare(marked, policy="keydiff", compression_ratio=0.3)
    ((first, end),) = job.identity.protect
    assert (first, end) == (job.identity.images[-1][1], job.num_tokens)
    named = engine.prepare(DOCUMENT, policy="keydiff", compression_ratio=0.3, protect=["text:The tide is on"])
    ((first, end),) = named.identity.protect
    assert engine.text is not None
    assert engine.text.decode(list(named.document.token_ids)[first:end]).strip() == "The tide is on"


def test_text_is_appended_behind_images_and_caches_are_asked_together(engine: Engine) -> None:
    cache = engine.compress(DOCUMENT, policy="full")
    longer = engine.extend(cache, " The mill is by the weir.")
    assert longer.identity.images == cache.identity.images
    assert longer.identity.image_encoder == cache.identity.image_encoder
    again = CompressedCache.from_bytes(longer.to_bytes())
    whole = engine.compress([*DOCUMENT, {"text": " The mill is by the weir."}], policy="full")
    said = [engine.answer(one, "Where is the mill?", max_new_tokens=8).token_ids for one in (again, whole)]
    assert said[0] == said[1]
    text = engine.compress(ROWS, policy="full")
    assert engine.answer([cache, text], "Where is the mill?", max_new_tokens=2).token_ids


def test_the_prompt_is_shown_for_the_document_with_the_same_images(engine: Engine) -> None:
    cache = engine.compress(DOCUMENT, policy="full")
    assert engine.prompt(cache, "Where is the wheel?", DOCUMENT)
    with pytest.raises(StateConflict, match="another document"):
        engine.prompt(cache, "Where is the wheel?", [*DOCUMENT[:3], block(picture(9, 33, 70)), DOCUMENT[4]])


def big(width: int, height: int) -> dict[str, str]:
    return block(Image.new("1", (width, height)))


REFUSED: dict[str, tuple[list[Any], str, str]] = {
    "no base64": ([{"type": "image", "data": "!"}], "no base64", "images[0].data"),
    "no image": ([{"text": "a"}, {"type": "image", "data": "QUJD"}], "no PNG or JPEG", "images[0]"),
    "another format": ([block(picture(1), "GIF")], "no PNG or JPEG", "images[0]"),
    "broken": ([block(picture(0)), {"type": "image", "data": block(picture(1))["data"][:4000]}], "broken", "images[1]"),
    "a bomb": ([big(1 << 16, 1 << 10)], "65536 x 1024 pixels", "images[0]"),
    "many pixels": ([big(1 << 12, 1 << 12)] * 5, "have 83886080 pixels together", "images"),
    "many": ([big(2, 2)] * 33, "33 images, and 32", "images"),
    "sixteen bits": ([block(Image.new("I;16", (4, 4)))], "mode I;16", "images[0]"),
    "several frames": (
        [block(picture(1), save_all=True, append_images=[picture(2)])], "several frames", "images[0]",
    ),
    "another field": ([{"type": "image", "url": "file:///etc/passwd"}], 'an image is {"type": "image"', "document"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_image_is_refused_by_name(engine: Engine, what: str) -> None:
    document, said, param = REFUSED[what]
    with pytest.raises(InvalidRequest, match=said.replace("(", ".")) as refusal:
        engine.prepare(document, policy="full")
    assert refusal.value.param == param


def test_pixels_of_other_tokens_than_the_documents_are_refused(engine: Engine) -> None:
    job = engine.prepare(DOCUMENT, policy="full")
    other = base64.b64decode(block(picture(1, 60, 20))["data"])  # split into fewer parts
    wrong = replace(job, images=(job.images[0], job.images[1]._replace(data=other)))
    with pytest.raises(InvalidRequest, match="other tokens than the document") as refusal:
        engine.run(wrong)
    assert refusal.value.param == "images[1]"


def test_a_document_that_is_too_long_by_its_headers_is_refused_before_a_pixel(engine: Engine) -> None:
    begun = base64.b64encode(base64.b64decode(block(picture(1))["data"])[:60]).decode()
    with pytest.raises(DocumentTooLong, match="at least 10"):
        engine.prepare([{"type": "image", "data": begun}] * 32, policy="full")
    with pytest.raises(InvalidRequest, match="broken"):
        engine.prepare([{"type": "image", "data": begun}], policy="full")


def test_models_and_policies_that_take_no_images_say_so(engine: Engine, tiny_folder: Path) -> None:
    blind = Engine.load(str(tiny_folder), device="cpu")
    with pytest.raises(PolicyUnsupported, match="takes no images here") as refusal:
        blind.prepare(DOCUMENT, policy="full")
    assert refusal.value.param == "images"
    with pytest.raises(InvalidRequest, match="a block is"):
        engine.prepare([{"role": "user", "content": DOCUMENT}], policy="full")
    with pytest.raises(PolicyUnsupported, match="append text") as refusal:
        engine.extend(engine.compress(ROWS, policy="full"), DOCUMENT)
    assert refusal.value.param == "document"
    for policy, why in {"kvzip": "again behind it", "sablock": "images have none", "sirllm": "twice"}.items():
        with pytest.raises(PolicyUnsupported, match=why):
            engine.prepare(DOCUMENT, policy=policy, compression_ratio=0.5)
    with pytest.raises(PolicyUnsupported, match="in chunks"):
        engine.prepare(DOCUMENT * 2, policy="lagkv", compression_ratio=0.5, policy_params={"prefill": "chunked"})


def test_vllm_is_not_given_what_it_was_not_tried_with(engine: Engine) -> None:
    reading = ReadingModel(engine.identity, engine.passes.layer_shapes, engine.rope, {})
    made = {
        document: engine.compress(what, policy="full") for document, what in {"text": ROWS, "seen": DOCUMENT}.items()
    }
    reading.require_own(made["text"], {})  # type: ignore[arg-type]
    with pytest.raises(PolicyUnsupported, match="with images"):
        reading.require_own(made["seen"], {})  # type: ignore[arg-type]


def test_an_image_is_read_beside_the_models_thread(engine: Engine) -> None:
    """So answers go on meanwhile, and who leaves ends the work before the image is read."""
    document = [{"text": ROWS}, block(picture(3, 2400, 2400), compress_level=1)]
    level, calls = engine.compressor.level(engine.prepare(document, policy="full"), "none"), list[None]()
    engine.run_levels([level], checkpoint=lambda: calls.append(None))
    assert len(calls) > len(engine.passes.layer_shapes) + 10, "more than one for each layer and one behind the image"

    def leave() -> None:
        raise Cancelled("the caller went away")

    for _ in range(4):
        with pytest.raises(Cancelled):
            engine.run_levels([level], checkpoint=leave)
    reading = [thread for thread in threading.enumerate() if thread.name.startswith("images")]
    assert len(reading) == 1, "nobody waited for the image, and however many leave, one is read at a time"
    assert len(engine.run_levels([level], checkpoint=lambda: None)) == 1, "theirs hold up nobody for ever"
