"""A certificate is of one model, one policy space and documents like its own, and of nothing else."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvshelf.api import Certificate, Way
from kvshelf.engine.certify.certificate import CertificateTerms, certified, certify, require_enough, require_mixed
from kvshelf.engine.certify.grading import GradedDocument, GradedLevel, QuestionedDocument, default_ways, grade
from kvshelf.engine.engine import Engine
from kvshelf.errors import InvalidRequest, ModelMismatch
from kvshelf.samples.tasks import TaskDocument, make_document
from kvshelf.workers.replica.create.auto import under

WAYS = [
    Way(policy="full", compression_ratio=None, codec="int8"),
    Way(policy="keydiff", compression_ratio=0.5, codec="klt"),
    Way(policy="keydiff", compression_ratio=0.9375, codec="klt"),
]
ABOUT = CertificateTerms("own", 0.25, "answers", "0" * 64)


def made(tiny: Engine, seed: int, words: int = 150) -> TaskDocument:
    return make_document("needle", "prose", words, 700 + seed, tiny.encoder.require_text("document").count_tokens)


@pytest.fixture(scope="module")
def graded(tiny: Engine) -> list[GradedDocument]:
    documents = [made(tiny, seed) for seed in range(4)]
    asked = [
        QuestionedDocument(each.text, "", (each.questions[0].text,), ((each.questions[0].answer,),))
        for each in documents
    ]
    return [grade(tiny, each, WAYS, max_new_tokens=8) for each in asked]


@pytest.fixture(scope="module")
def certificate(tiny: Engine, graded: list[GradedDocument]) -> Certificate:
    return certify(tiny, ABOUT, graded, WAYS)[0]


def wide(certificate: Certificate, **changes: Any) -> Certificate:
    """Of documents of any length."""
    group = certificate.groups[""].model_copy(update={"tokens": (1, 9999), **changes})
    return certificate.model_copy(update={"groups": {"": group}})


@pytest.mark.slow
def test_each_way_is_graded(graded: list[GradedDocument]) -> None:
    for document in graded:
        sizes = [level.nbytes for level in document.levels if level is not None]
        assert document.full_bytes > sizes[0] > sizes[1] > sizes[2]
        assert document.questions == 1
        assert all(level is not None and level.quality is not None and level.quality.full for level in document.levels)


def test_a_change_is_seen(certificate: Certificate) -> None:
    text = certificate.model_dump_json()
    assert Certificate.model_validate_json(text) == certificate
    with pytest.raises(ValueError, match="changed since"):
        Certificate.model_validate_json(text.replace('"alpha":0.25', '"alpha":0.01'))


def test_the_smallest_level_is_chosen_that_it_allows(certificate: Certificate, tiny: Engine) -> None:
    text = made(tiny, 200, 140).text
    for limit in (0.0, 1e-3, 6.0, None):
        choice = under(tiny, text, wide(certificate, limit=limit), {}).run(tiny)
        removing = [one for one in choice.tried if one.policy == "keydiff" and one.bytes and one.quality]
        good = [one.bytes for one in removing if limit is None or (one.quality and one.quality.kl < limit)]
        size = choice.compression.cache.pack().nbytes
        assert size == min(filter(None, good), default=size)
        if not good:
            assert (choice.level.job.identity.policy, choice.level.codec) == ("full", "int8")
    choice = under(tiny, text, wide(certificate, limit=-3.0), {}).run(tiny)
    assert (choice.level.job.identity.policy, choice.level.codec) == ("full", "none")


def test_what_it_does_not_speak_of_is_refused(certificate: Certificate, tiny: Engine) -> None:
    shortest, longest = certificate.groups[""].tokens
    for other, told in (
        ({"fingerprint": "f" * 40, "weights": "f" * 40}, "weights differs"),
        ({"fingerprint": "f" * 40, "tokenizer": "f" * 40}, "tokenizer differs"),
        ({"fingerprint": "f" * 40}, "dtype, positions or template differs"),
    ):
        with pytest.raises(ModelMismatch, match=told):
            certified(tiny, certificate.model_copy(update=other), {}, longest)
    strange = [Way(policy="nobodys", compression_ratio=0.5, codec="klt")]
    for changed, told in (
        ({"transforms": "other"}, "another policy space: the transforms"),
        ({"quality_version": 1}, "another policy space: the measure"),
        ({"ways": strange}, "another policy space: .*nobodys"),
    ):
        with pytest.raises(InvalidRequest, match=told):
            certified(tiny, certificate.model_copy(update=changed), {}, longest)
    with pytest.raises(InvalidRequest, match=f"made from documents of {shortest} to {longest}"):
        certified(tiny, certificate, {}, longest + 1)
    grouped = certificate.model_copy(update={"by": "team", "groups": {"law": certificate.groups[""]}})
    with pytest.raises(InvalidRequest, match="no documents with team 'tax'; it has 'law'"):
        certified(tiny, grouped, {"team": "tax"}, longest)
    assert certified(tiny, grouped, {"team": "law"}, longest).by.digest == certificate.digest


def test_each_group_has_its_own_bound(tiny: Engine) -> None:
    """Documents of one team lose what those of the other do not."""
    documents = []
    for at in range(40):
        team = "law" if at % 2 else "tax"
        sizes = ((50, 0.0), (9, at % 2.0))
        levels = [GradedLevel(whole=False, nbytes=size, loss=lost, quality=None) for size, lost in sizes]
        fields = {"tokens": 100 + at, "questions": 1, "full_bytes": 100, "full_loss": 0.0}
        documents.append(GradedDocument(group=team, levels=levels, **fields))
    about = CertificateTerms("own", 0.1, "full", "0" * 64, "team")
    quality = {"agreement": 1.0, "low": None, "high": None, "worst": None, "cues": 9, "probe_s": 0.0, "version": 3}
    measured = [
        document.model_copy(
            update={
                "levels": [
                    GradedLevel.model_validate(level.model_dump() | {"quality": {**quality, "kl": 1.0 + place}})
                    for place, level in enumerate(document.levels)
                    if level is not None
                ]
            }
        )
        for document in documents
    ]
    found, warnings = certify(tiny, about, measured, WAYS[:2])
    assert {name: group.limit for name, group in found.groups.items()} == {"law": 2.0, "tax": None}
    assert warnings == []
    ordered = sorted(measured, key=lambda document: document.group)
    mixed = [document.model_copy(update={"group": ""}) for document in ordered]
    assert any(
        "loss shifts" in told
        for told in certify(tiny, CertificateTerms("a", 0.6, "full", "0" * 64), mixed, WAYS[:2])[1]
    )


def test_too_few_and_sorted_rows_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="questions about 99 documents with team 'law' at least, and there are 1"):
        require_enough(["law"], CertificateTerms("own", 0.01, "full", "0" * 64, "team"))
    with pytest.raises(InvalidRequest, match="no questions"):
        require_enough([], ABOUT)
    lengths = [float(random.Random(at).randint(100, 900)) for at in range(60)]
    require_mixed(lengths, "length")
    with pytest.raises(InvalidRequest, match="length of the documents shifts along the file"):
        require_mixed(sorted(lengths), "length")


def test_the_ways_share_prefills_and_fit_models_without_transforms() -> None:
    assert {way.codec.partition(":")[0] for way in default_ways(False)} == {"int8", "int4"}
    assert len({way.policy for way in default_ways(True)}) == 3
