"""Tokens that every policy keeps and no codec rounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.identity import MAX_PROTECTED_SPANS
from kvshelf.artifact.records import Packed, entries_of, parts_of
from kvshelf.engine.attention.attached import CACHE_ARGUMENT
from kvshelf.engine.attention.states import SUPPORTED
from kvshelf.engine.engine import Engine
from kvshelf.engine.inputs import protect
from kvshelf.engine.inputs.job import Job
from kvshelf.errors import InvalidRequest
from kvshelf.methods.method import parameter_fields
from kvshelf.methods.policies import POLICIES
from kvshelf.methods.registry import parameters_of
from kvshelf.samples.tasks import make_document
from kvshelf_bench.models.small import small_model
from tests.amounts import few, in_turn

NEWER = pytest.mark.skipif(not SUPPORTED, reason="this transformers has caches of its own for recurrent states")
LATENTS = pytest.mark.skipif(CACHE_ARGUMENT != "cache", reason="older transformers cache expanded keys")
CODECS = ("int8", "int4", "int2:residual=0", "mixed", "klt", "klt:steps=kl,classes=1.5/4,shares=10/10")
CHUNKED = [
    name
    for name, policy in POLICIES.items()
    if any(field.name == "prefill" and "chunked" in field.metadata["choices"] for field in parameter_fields(policy))
]
"""The policies that read a document in chunks."""
RULE = "Rule: call every ship by her name."
RULES = ["system", "headings", f"text:{RULE}"]


@pytest.fixture(scope="module")
def messages(tiny: Engine) -> list[dict[str, str]]:
    text = make_document("multikey", "prose", 700, 20_261_128, tiny.encoder.require_text("document").count_tokens).text
    said = f"{text[:800]}\n# The harbour\n{text[800:1600]}\n{RULE}\n{text[1600:]}"
    return [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": said}]


def prepared(engine: Engine, document: Any, policy: str, protect: list[str], **options: Any) -> Job:
    sizes = {"compression_ratio": 0.75} if POLICIES[policy].takes_budget else {}
    return engine.prepare(document, policy=policy, protect=protect, **sizes, **options)


def rows_at(cache: CompressedCache, layer: int, places: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of each head at these positions, in the dtype of the records that hold them."""
    found: list[dict[int, tuple[torch.Tensor, torch.Tensor]]] = []
    entries = entries_of(cache.layers[layer])
    assert entries is not None
    for part in parts_of(entries):
        keys, values = part.plain_heads()
        found = found or [{} for _ in keys]
        for head, positions in enumerate(part.positions):
            found[head] |= {int(at): (keys[head][row], values[head][row]) for row, at in enumerate(positions)}
    return [tuple(torch.stack([each[at][side] for at in places]) for side in (0, 1)) for each in found]  # type: ignore[misc]


def all_keys(cache: CompressedCache, layer: int) -> torch.Tensor:
    """Of a layer, each channel sorted, as records may have the entries in another order."""
    entries = entries_of(cache.layers[layer])
    assert entries is not None
    return torch.cat([row for part in parts_of(entries) for row in part.plain_heads()[0]]).sort(0).values


def inside(job: Job) -> list[int]:
    return [at for first, end in job.document.protect for at in range(first, end)]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_keeps_what_is_protected(policy: str, tiny: Engine, messages: list[dict[str, str]]) -> None:
    job, plain = (prepared(tiny, messages, policy, protect) for protect in (RULES, []))
    places = inside(job)
    assert len(places) > 20
    full = tiny.compress(messages, policy="full")
    cache, other = tiny.run(job).cache, tiny.run(plain).cache
    made = tiny.decoded(cache)
    for layer in range(len(cache.layers)):
        for held, exact in zip(rows_at(made, layer, places), rows_at(full, layer, places), strict=True):
            for mine, theirs in zip(held, exact, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=2e-5)  # last bits, beside other passes
    # As its granularity allows: the protected tokens are part of the budget, and the bytes are the same.
    assert abs(cache.kept_tokens - other.kept_tokens) <= 20
    more = 1.04 if POLICIES[policy].prunes else 1.01  # protected keys have all channels
    assert len(cache.to_bytes()) <= more * len(other.to_bytes())
    assert cache.identity != other.identity
    assert cache.identity.budget_tokens == other.identity.budget_tokens
    read = CompressedCache.from_bytes(cache.to_bytes())
    assert read.identity == cache.identity
    asked = "Which ship?"
    assert tiny.answer(read, asked, max_new_tokens=3).token_ids == tiny.answer(cache, asked, max_new_tokens=3).token_ids


@in_turn(
    {
        "policy": ["full", "keydiff", "kvdirect", "kvzip", "ada", "ems", "think", "streaming_llm", "mikv"],
        "codec": CODECS,
    }
)
def test_no_codec_rounds_what_is_protected(
    codec: str, policy: str, tiny: Engine, messages: list[dict[str, str]]
) -> None:
    if policy in ("kvdirect", "think") and codec.startswith("klt"):
        pytest.skip("klt takes whole keys")
    job = prepared(tiny, messages, policy, RULES)
    plain = tiny.run(job).cache
    cache = tiny.coders.decoded(CompressedCache.from_bytes(tiny.encoded(plain, codec).to_bytes()))
    plain = tiny.decoded(plain)
    places, rounded = inside(job), False
    for layer in range(len(plain.layers)):
        for held, exact in zip(rows_at(cache, layer, places), rows_at(plain, layer, places), strict=True):
            assert torch.equal(held[0], exact[0])
            assert torch.equal(held[1], exact[1])
        rounded |= not torch.equal(all_keys(cache, layer), all_keys(plain, layer))
    assert rounded, "the others are"


def in_chunks(policy: str) -> dict[str, Any]:
    blocks = {"chunk": 128} if "chunk" in parameters_of(POLICIES[policy]) else {}
    return {"prefill": "chunked", **blocks}


@in_turn({"policy": CHUNKED, "codec": ["none", *CODECS]})
def test_a_prefill_in_chunks_keeps_them_and_no_codec_rounds_them(
    codec: str, policy: str, tiny: Engine, messages: list[dict[str, str]]
) -> None:
    job = prepared(tiny, messages, policy, RULES, policy_params=in_chunks(policy))
    assert job.absorber is not None
    assert len(job.absorber.chunks) > 3
    plain = tiny.run(job).cache
    assert plain.identity.prefill == job.absorber.mode
    assert plain.identity.protect == job.document.protect
    cache = tiny.coders.decoded(CompressedCache.from_bytes(tiny.encoded(plain, codec).to_bytes()))
    places, rounded = inside(job), False
    for before, after in zip(plain.layers, cache.layers, strict=True):
        assert isinstance(before, Packed)
        assert job.policy.phase != "during" or before.entries == job.budget.tokens * before.kv_heads
        for one, other in zip(before.positions, after.positions, strict=True):
            assert one.equal(other)
            assert set(places) <= set(one.tolist())
            assert one.tolist() == sorted({*one.tolist()})
    entries = [sum(record.lengths) for record in plain.layers if isinstance(record, Packed)]
    assert sum(entries) == job.budget.tokens * sum(plain.layers[0].kv_heads for _ in entries)
    for layer in range(len(plain.layers)):
        for held, exact in zip(rows_at(cache, layer, places), rows_at(plain, layer, places), strict=True):
            assert all(map(torch.equal, held, exact))
        rounded |= not torch.equal(all_keys(cache, layer), all_keys(plain, layer))
    assert rounded == (codec != "none"), "the others are"


@pytest.mark.parametrize("policy", CHUNKED)
def test_in_chunks_a_budget_of_everything_is_the_whole_document(
    policy: str, tiny: Engine, messages: list[dict[str, str]]
) -> None:
    """To the last bit, as there is one pass."""
    both = [
        tiny.compress(messages, policy=policy, compression_ratio=0.0, protect=RULES, **params)
        for params in ({}, in_chunks(policy))
    ]
    for one, other in zip(*(cache.layers for cache in both), strict=True):
        assert isinstance(one, Packed)
        assert isinstance(other, Packed)
        assert torch.equal(one.keys, other.keys)  # type: ignore[arg-type]
        assert torch.equal(one.values, other.values)  # type: ignore[arg-type]
        assert torch.equal(one.entry_positions, other.entry_positions)
    assert both[0].identity.protect == both[1].identity.protect


@pytest.mark.parametrize("prefill", ["whole", "chunked"])
def test_a_policy_that_sizes_itself_counts_them(prefill: str, tiny: Engine, messages: list[dict[str, str]]) -> None:
    job = tiny.prepare(
        messages, policy="lagkv", policy_params={"r": 0.25, "lag": 32, "prefill": prefill}, protect=RULES
    )
    cache = tiny.run(job).cache
    assert {layer.entries for layer in cache.reduced} == {job.budget.tokens * cache.reduced[0].kv_heads}
    assert cache.identity.budget_tokens == job.budget.tokens < job.num_tokens


@pytest.mark.parametrize("policy", CHUNKED)
def test_in_chunks_more_than_the_budget_is_refused_before_any_work(policy: str, tiny: Engine) -> None:
    text = "The mill has 12 wheels. " * 90
    with pytest.raises(InvalidRequest, match="and the budget is") as refused:
        prepared(tiny, text, policy, ["first:300"], policy_params=in_chunks(policy))
    assert refused.value.param == "protect"
    with pytest.raises(InvalidRequest, match="leaves none to compress"):
        tiny.prepare(
            text, policy="lagkv", policy_params={"r": 0.5, "prefill": "chunked"}, protect=["tokens:0-99", "lines:."]
        )


def test_an_index_keeps_them_as_they_are_or_says_why_not(tiny: Engine, messages: list[dict[str, str]]) -> None:
    job = prepared(tiny, messages, "infllm", RULES)
    assert tiny.run(tiny.compressor.level(job).job).cache.identity.protect == job.document.protect
    with pytest.raises(InvalidRequest, match="take codec none, or another policy"):
        tiny.compressor.level(job, "int8")


@pytest.mark.parametrize(
    "family",
    ["gemma3_text", pytest.param("deepseek_v3", marks=LATENTS), pytest.param("falcon_h1", marks=NEWER)],
)
def test_latents_windows_and_states(family: str) -> None:
    engine = Engine(small_model(family), name="m")
    ids = list(range(3, 103))
    for policy in ("keydiff", "kvzip", "pyramidkv"):
        try:
            cache = engine.compress(ids, policy=policy, compression_ratio=0.75, protect=["tokens:11-20"])
        except InvalidRequest as error:
            assert "protect" not in str(error)  # noqa: PT017  the model's own refusal
            continue
        for layer in cache.reduced:
            for positions in layer.positions:
                assert set(range(11, 20)) <= set(positions.tolist())
        assert CompressedCache.from_bytes(cache.to_bytes()).to_bytes() == cache.to_bytes()


@pytest.mark.parametrize("codec", few(2, ["none", "int4", "klt"]))
def test_what_is_appended_leaves_them_as_they_are(codec: str, tiny: Engine, messages: list[dict[str, str]]) -> None:
    document = messages[1]["content"]
    job = prepared(tiny, document, "keydiff", [f"text:{RULE}"])
    cache = tiny.encoded(tiny.run(job).cache, codec)
    before = [rows_at(tiny.coders.decoded(cache), layer, inside(job)) for layer in range(len(cache.layers))]
    for number in range(14):
        cache = tiny.extend(cache, f" More of it, part {number}.", policy="full")
    assert cache.identity.protect == job.document.protect
    after = [rows_at(tiny.coders.decoded(cache), layer, inside(job)) for layer in range(len(cache.layers))]
    for old, new in zip(before, after, strict=True):
        for (keys, values), (same_keys, same_values) in zip(old, new, strict=True):
            assert torch.equal(keys, same_keys)
            assert torch.equal(values, same_values)


@pytest.mark.parametrize("codec", few(1, ["none", "int8", "klt"]))
@pytest.mark.parametrize("policy", ["keydiff", "streaming_llm", "kvzip"])
def test_what_is_appended_has_rules_of_its_own(
    codec: str, policy: str, tiny: Engine, messages: list[dict[str, str]]
) -> None:
    """Their tokens are kept as the model makes them behind the cache; those of before stay."""
    document, other = messages[1]["content"], "Rule: never sail on a Friday."
    begun = prepared(tiny, document, "keydiff", [f"text:{RULE}"])
    cache = tiny.encoded(tiny.run(begun).cache, codec)
    more = f"{document[:900]}\n{other}\n{document[900:1800]}"
    sizes = {"compression_ratio": 0.8}
    grown = tiny.extend(cache, more, policy=policy, protect=[f"text:{other}"], **sizes)
    ((first, end),) = grown.identity.protect[1:]
    assert grown.identity.protect[:1] == begun.document.protect
    form = tiny.encoder.require_text("protect")
    assert form.decode(form.encode(more)[first - cache.num_tokens : end - cache.num_tokens]).strip() == other
    whole = tiny.extend(cache, more, policy="full", protect=[f"text:{other}"])
    places = list(range(first, end))
    for layer in range(len(grown.layers)):
        exact = rows_at(tiny.coders.decoded(whole), layer, places)
        for held, true in zip(rows_at(tiny.coders.decoded(grown), layer, places), exact, strict=True):
            for mine, theirs in zip(held, true, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=2e-5)
    assert grown.kept_tokens < whole.kept_tokens
    read = CompressedCache.from_bytes(grown.to_bytes())
    assert read.identity == grown.identity


def test_a_turn_that_is_appended_has_marked_text(tiny: Engine, messages: list[dict[str, str]]) -> None:
    said = [*messages, {"role": "assistant", "content": "Aye."}]
    cache = tiny.compress(said, policy="full")
    blocks = [{"text": f"Quay and tide. {RULE} "}, {"text": "Mind the gate.", "protect": True}, {"text": " So be it."}]
    turn = [{"role": "user", "content": blocks}, {"role": "assistant", "content": "Yes."}]
    job = tiny.prepare_append(cache, turn, policy="streaming_llm", compression_ratio=0.5)  # type: ignore[arg-type]
    ((first, end),) = job.document.protect
    assert tiny.encoder.require_text("protect").decode(job.document.token_ids[first:end]).strip() == "Mind the gate."
    with pytest.raises(InvalidRequest, match="nothing in the document is that"):
        tiny.prepare_append(cache, turn, policy="full", protect=["text:zebra"])  # type: ignore[arg-type]
    plain = [{"role": "user", "content": "Go on."}, {"role": "assistant", "content": "Yes."}]
    with pytest.raises(InvalidRequest, match="no system message"):
        tiny.prepare_append(cache, plain, policy="full", protect=["system"])  # type: ignore[arg-type]


def test_where_the_template_joins_texts_their_places_are_refused(tiny: Engine) -> None:
    """Behind a document a system message becomes a part of the user's text: offsets of the one were taken in the
    other."""
    cache = tiny.compress("The harbour master keeps the tide tables. " * 9, policy="full")
    turn: Any = [
        {"role": "system", "content": "Be kind to everyone here. "},
        {"role": "user", "content": "The secret word is zebra today."},
        {"role": "assistant", "content": "Aye."},
    ]
    for rule in ("text:zebra", "message:1:0-14", "system"):
        with pytest.raises(InvalidRequest, match=r"does not tell where; take first:N"):
            tiny.prepare_append(cache, turn, protect=[rule], policy="full")
    assert tiny.prepare_append(cache, turn, protect=["first:4"], policy="full").document.protect == ((0, 4),)
    job = tiny.prepare_append(cache, turn[1:], protect=["text:zebra"], policy="full")
    assert [found.strip() for found in text_of(job, tiny)] == ["zebra"]


def test_an_encoded_document_keeps_its_spans_behind_a_cache(tiny: Engine) -> None:
    cache = tiny.compress("The harbour master keeps the tide tables. " * 9, policy="full", layout="plain")
    more = tiny.encode_document("Nothing. " * 30 + "zebra " + "Nothing. " * 30, layout="plain", protect=["text:zebra"])
    assert more.protect
    assert tiny.prepare_append(cache, more, policy="full").document.protect == more.protect
    both = tiny.prepare_append(cache, more, protect=["first:3"], policy="full")
    assert both.document.protect == ((0, 3), *more.protect)


def test_tokens_behind_a_cache_are_counted_as_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer that writes a space before a text does so at its very beginning, and not behind other text."""
    engine = Engine.load("kvshelf-tiny", device="cpu")
    form = engine.encoder.require_text("protect")
    places: list[str] = []
    spans = form.tokens.spans

    def noted(text: str, place: Any = "behind text") -> list[tuple[int, int]]:
        places.append(place)
        return spans(text, place)

    monkeypatch.setattr(form.tokens, "spans", noted)
    cache = engine.compress("The harbour master keeps the tide tables. " * 9, policy="full", layout="plain")
    job = engine.prepare_append(cache, "zebra and more of it", protect=["chars:0-5"], policy="full")
    assert places == ["behind text"]
    assert job.document.protect[0][0] == 0


def test_the_turn_behind_a_protected_cache_has_the_identity_by_which_it_is_found(
    tiny: Engine, messages: list[dict[str, str]]
) -> None:
    cache = tiny.compress(messages, policy="full", protect=["system"])
    turn: Any = [{"role": "assistant", "content": "Yes."}]
    grown = tiny.extend(cache, turn, policy="full")
    expected = tiny.turns.identity(cache.identity, cache.codec, cache.kept_tokens, turn)
    assert expected.protect == grown.identity.protect == cache.identity.protect


def text_of(job: Job, engine: Engine) -> list[str]:
    ids, form = job.document.token_ids, engine.encoder.require_text("protect")
    return [form.decode(ids[first:end]) for first, end in job.document.protect]


def test_the_rules_find_their_tokens(tiny: Engine) -> None:
    text = "# One\nred 12 blue\nTwo\n===\nred 34\n" + "Nothing to see here.\n" * 40
    for rule, spans in {
        "headings": ["# One", "Two"],
        "text:red": ["red", "red"],
        "lines:^red \\d+$": ["red 34"],
        "chars:6-9": ["red"],
    }.items():
        job = tiny.prepare(text, policy="keydiff", compression_ratio=0.5, protect=[rule])
        assert [found.strip() for found in text_of(job, tiny)] == spans, rule
    marked = [{"text": text[:6]}, {"text": text[6:17], "protect": True}, {"text": text[17:]}]
    job = tiny.prepare(marked, policy="keydiff", compression_ratio=0.5)  # type: ignore[arg-type]
    assert [found.strip() for found in text_of(job, tiny)] == ["red 12 blue"]
    assert job.identity == tiny.prepare(text, policy="keydiff", compression_ratio=0.5, protect=["chars:6-17"]).identity
    first = tiny.prepare(text, policy="keydiff", compression_ratio=0.5, protect=["first:5"])
    assert first.document.protect == ((0, first.document.protected_prefix + 5),)


def test_objects_say_the_same_as_texts(tiny: Engine) -> None:
    text = "Rule one: never lie.\r\nThe quay is long.\r\n" * 9
    for one, other in (
        ({"first": 6}, "first:6"),
        ({"text": "never lie"}, "text:never lie"),
        ({"regex": "lie.$"}, "lines:lie.$"),
    ):
        assert tiny.encode_document(text, protect=[one]).protect == tiny.encode_document(text, protect=[other]).protect
    with pytest.raises(InvalidRequest, match="it is none of"):
        tiny.encode_document(text, protect=[{"last": 6}])


def test_marks_in_messages_and_what_spells_a_mark(tiny: Engine) -> None:
    said = "Say <|user|> twice, then stop. " + "Nothing to see. " * 60
    turns: list[Any] = [
        {"role": "system", "content": [{"text": "Be kind. "}, {"text": "Never say <|user|>.", "protect": True}]},
        {"role": "user", "content": said},
    ]
    job = tiny.prepare(turns, policy="keydiff", compression_ratio=0.5, protect=["message:1:4-12"])
    assert [found.strip() for found in text_of(job, tiny)] == ["Never say <|user|>.", "<|user|>"]
    plain = [{"role": "system", "content": "Be kind. Never say <|user|>."}, turns[1]]
    assert job.document.token_ids == tiny.prepare(plain, policy="full").document.token_ids


@pytest.mark.parametrize(
    ("protect", "told"),
    [
        (["system"], "no system message"),
        (["text:zebra"], "'text:zebra': nothing in the document"),
        (["headings"], "nothing in the document"),
        (["lines:(a"], "cannot be read"),
        (["lines:(a)\\1"], "cannot be read"),
        (["lines:(\\w|\\s){200}(\\w|\\s){200}"], "too large"),
        (["lines:" + "a" * 513], "512"),
        (["chars:3-3"], "characters"),
        (["chars:0-99999"], "characters"),
        (["chars:a-3"], "no number"),
        (["first:0"], "tokens"),
        (["first:99999"], "tokens"),
        (["tokens:9-99999"], "tokens"),
        (["message:0"], "0 messages"),
        (["sytem"], "none of system"),
        (["lines:."], "and the budget is"),
        (["text:."], f"{MAX_PROTECTED_SPANS} are taken"),
    ],
)
def test_what_is_not_there_or_too_much_is_refused_by_name(protect: list[str], told: str, tiny: Engine) -> None:
    text = "The mill has 12 wheels. " * 60 if protect != ["text:."] else "a. " * 1100
    with pytest.raises(InvalidRequest, match=told) as error:
        tiny.prepare(text, policy="keydiff", compression_ratio=0.75, protect=protect)
    assert error.value.param == "protect"


def test_where_tokens_move_it_is_refused(tiny: Engine) -> None:
    fields: dict[str, Any] = {"policy": "streaming_llm", "policy_params": {"positions": "cache"}}
    with pytest.raises(InvalidRequest, match="or leave protect out"):
        tiny.prepare("The mill has 12 wheels. " * 60, compression_ratio=0.5, protect=["first:8"], **fields)


def test_records_under_no_codec_are_those_of_any_cache(tiny: Engine, messages: list[dict[str, str]]) -> None:
    cache = tiny.run(prepared(tiny, messages, "keydiff", RULES)).cache
    assert all(isinstance(layer, Packed) for layer in cache.layers)


@pytest.mark.parametrize("policy", ["keydiff", "snapkv", "streaming_llm"])
def test_a_system_message_is_obeyed_when_three_quarters_are_gone(policy: str, tiny: Engine) -> None:
    """docs/internals/protect.md has more policies. Without `protect` they find 3, 1 and 0 of 6."""
    count, right = tiny.encoder.require_text("protect").count_tokens, []
    for seed in range(2):
        made = make_document("needle", "prose", 100, 90_000 + seed, count)
        prose = make_document("needle", "prose", 700, 91_000 + seed, count).text
        turns = [{"role": "system", "content": made.text}, {"role": "user", "content": prose}]
        cache = tiny.compress(turns, policy=policy, compression_ratio=0.75, protect=["system"])
        right += [one.answer in tiny.answer(cache, one.text, max_new_tokens=12).text for one in made.questions]
    assert all(right)


def test_the_work_of_rules_is_bounded(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protect, "MAX_PLACES", 99)
    assert tiny.encode_document("a b " * 99, protect=["text:a"]).protect
    with pytest.raises(InvalidRequest, match="more than 99 places"):
        tiny.encode_document("a b " * 100, protect=["text:a"])
    with pytest.raises(InvalidRequest, match="17 rules of lines and headings, and 16 are taken"):
        tiny.encode_document("Keep this.\n" * 9, protect=[f"lines:{number}|Keep" for number in range(17)])
