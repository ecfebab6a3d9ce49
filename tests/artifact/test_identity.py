from __future__ import annotations

import itertools
from dataclasses import asdict, fields, replace
from typing import Any

import pytest

from kvshelf.artifact.identity import Identity, LinkedIdentity, ModelIdentity, canonical_json, digest
from kvshelf.errors import ModelMismatch
from tests.store.caches import MODEL, make_identity

KEY = bytes(range(32))


def cache_id(identity: Identity, key: bytes = KEY, tenant: str = "me", codec: str = "none", major: int = 1) -> str:
    return identity.cache_id(key=key, tenant=tenant, codec=codec, format_major=major)


def test_digests_keep_parts_apart() -> None:
    ways = [
        ("d", "ab", "c"),
        ("d", "a", "bc"),
        ("d", "abc"),
        ("da", "b", "c"),
        ("d", "ab", "c", ""),
        ("", "d", "ab", "c"),
    ]
    assert len({digest(domain, *parts) for domain, *parts in ways}) == len(ways)
    assert digest("d", "x") != digest("d", "x", key=KEY) != digest("d", "x", key=bytes(32))
    assert digest("d", "\u00e9") == digest("d", "\u00e9".encode())


def test_ids_are_what_they_were() -> None:
    """Every stored cache would be lost to its owner if these changed."""
    assert cache_id(make_identity(40)) == "kvs_197aa6c3f2a4d6942e2d1ac965ab3a52a3497a5a"
    assert make_identity(40).document_id(key=KEY, tenant="me") == "doc_b4ca6e72e8310e4aac214a71f33bfac55510da2e"


CHANGES: dict[str, Any] = {
    "model": replace(MODEL, weights="other"),
    "document": "other",
    "num_tokens": 41,
    "layout": "chat",
    "boundary": "document",
    "prefill": "chunked",
    "policy": "lagkv",
    "policy_version": 2,
    "policy_params": {"sink": 5},
    "budget_tokens": 7,
    "compression_ratio": 0.25,
    "probe": "text",
    "expected_questions": ("why?",),
    "transforms": "0f" * 32,
    "parent": "0e" * 20,
    "date": "2031-03-07",
    "variables": {"reasoning_effort": "low"},
    "protect": ((0, 4),),
    "images": ((2, 9, "ab" * 32),),
    "image_encoder": "0d" * 20,
}


def test_every_field_of_an_identity_is_part_of_the_id() -> None:
    assert set(CHANGES) == {field.name for field in fields(Identity)}
    identity = make_identity(40)
    variants = [identity, *(replace(identity, **{name: value}) for name, value in CHANGES.items())]
    ids = [cache_id(variant) for variant in variants]
    ids += [cache_id(identity, key=bytes(32)), cache_id(identity, tenant="you"), cache_id(identity, codec="int8")]
    ids += [cache_id(identity, major=2)]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("name", [field.name for field in fields(ModelIdentity)])
def test_every_compared_field_of_a_model_counts(name: str) -> None:
    other = replace(MODEL, **{name: "other"})
    changed = make_identity(40, model=other)
    if name == "name":
        other.require_match(MODEL)
        assert cache_id(changed) == cache_id(make_identity(40))
        return
    assert cache_id(changed) != cache_id(make_identity(40))
    with pytest.raises(ModelMismatch, match=f"{name} differs") as refusal:
        other.require_match(MODEL)
    assert refusal.value.details["field"] == name
    assert refusal.value.details["cache_fingerprint"] == MODEL.fingerprint()
    assert refusal.value.details["model_fingerprint"] == other.fingerprint() != MODEL.fingerprint()


def test_a_linked_model_is_another_whose_caches_are_read() -> None:
    other = replace(MODEL, weights="other", dtype="bfloat16")
    plain, linked = (LinkedIdentity(**asdict(MODEL), linked=made) for made in ({}, {other.fingerprint(): 0.9}))
    assert plain.fingerprint() == linked.fingerprint() == MODEL.fingerprint()
    linked.require_match(other)
    linked.require_match(MODEL)
    assert [linked.links(one) for one in (other, MODEL)] == [True, False]
    assert linked.unlinked == MODEL
    linked.require_own(MODEL)
    with pytest.raises(ModelMismatch, match=r"only answers from it, by their link; (?!.*models link)"):
        linked.require_own(other)
    for reader, made in ((plain, other), (linked, replace(other, rope="other"))):
        with pytest.raises(ModelMismatch, match=r"weights differs.*kvshelf models link"):
            reader.require_match(made)


@pytest.mark.parametrize("bare", [0, 1])
def test_a_side_without_a_tokenizer_cannot_disagree_about_text(bare: int) -> None:
    sides = [MODEL, replace(MODEL, tokenizer="", template="")]
    sides[bare].require_match(sides[1 - bare])


def test_documents_are_shared_by_policies_and_weights_but_not_by_tokenizers() -> None:
    def document_id(**changes: Any) -> str:
        return make_identity(40, **changes).document_id(key=KEY, tenant="me")

    same = {document_id(), document_id(policy="full"), document_id(model=replace(MODEL, weights="other"))}
    others = [
        document_id(document="other"),
        document_id(model=replace(MODEL, tokenizer="other")),
        document_id(model=replace(MODEL, template="other")),
        make_identity(40).document_id(key=KEY, tenant="you"),
    ]
    assert len(same) == 1
    assert len(same | set(others)) == 5


def test_an_identity_survives_its_dictionary() -> None:
    identity = make_identity(40, expected_questions=("a", "b"), probe="p")
    assert Identity.from_dict(identity.to_dict()) == identity


def test_canonical_json_is_one_text() -> None:
    pairs = [("b", 1), ("a", [1.5, None, "\u00e9"]), ("c", {"y": 0, "x": True})]
    assert {canonical_json(dict(order)) for order in itertools.permutations(pairs)} == {
        '{"a":[1.5,null,"\u00e9"],"b":1,"c":{"x":true,"y":0}}'
    }
    with pytest.raises(ValueError, match="JSON"):
        canonical_json(float("nan"))
