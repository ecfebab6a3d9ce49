"""A certificate is of one model, one policy space and documents like its own, and of nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvshelf.engine.certify.certificate import Certificate
from kvshelf.engine.certify.grading import DEFAULT_WAYS, Asked, grade, grouped, kept_under, require_enough
from kvshelf.engine.engine import Engine
from kvshelf.errors import InvalidRequest, ModelMismatch, NotFound
from kvshelf.samples.tasks import make_document

ALPHA = 0.25


@pytest.fixture(scope="module")
def certificate(tiny: Engine) -> Certificate:
    rows = []
    for seed in range(4):
        made = make_document("needle", "prose", 150, 700 + seed, tiny.require_text("document").count_tokens)
        rows += [(made.text, "", question.text, (question.answer,)) for question in made.questions]
    graded = [grade(tiny, document, DEFAULT_WAYS[:3], max_new_tokens=8) for document in grouped(rows)]
    about = {"model": tiny.name, "fingerprint": tiny.identity.fingerprint(), "data": "0" * 40}
    ways = list(DEFAULT_WAYS[:3])
    return Certificate.of({"": graded}, ALPHA, name="own", reference="answers", ways=ways, **about)


def test_it_is_kept_and_read_and_a_change_is_seen(certificate: Certificate, tmp_path: Path) -> None:
    path = certificate.write(tmp_path)
    assert Certificate.read(tmp_path, "own") == certificate
    assert certificate.bounds[""].documents == 4
    assert 0 < certificate.bounds[""].share < 1
    path.write_text(path.read_text().replace('"alpha": 0.25', '"alpha": 0.01'))
    with pytest.raises(InvalidRequest, match="was changed"):
        Certificate.read(tmp_path, "own")
    with pytest.raises(NotFound, match="no certificate 'other'"):
        Certificate.read(tmp_path, "other")
    with pytest.raises(InvalidRequest, match="is no name"):
        Certificate.read(tmp_path, "../own")


def test_a_document_is_kept_under_it(certificate: Certificate, tiny: Engine) -> None:
    made = make_document("needle", "prose", 148, 900, tiny.require_text("document").count_tokens)
    shortest, longest = certificate.bounds[""].tokens
    wide = certificate.model_copy(
        update={"bounds": {"": certificate.bounds[""].model_copy(update={"tokens": (1, 999)})}}
    )
    kept = kept_under(tiny, made.text, wide)
    assert kept.quality is None or kept.quality.kl < wide.bounds[""].below
    assert kept.cache.identity.policy in {way.policy for way in wide.ways}
    with pytest.raises(InvalidRequest, match=f"made from documents of {shortest} to {longest}"):
        kept_under(tiny, made.text * 9, certificate)
    with pytest.raises(InvalidRequest, match="no documents of the label 'law'"):
        kept_under(tiny, made.text, certificate, label="law")


def test_another_model_is_refused(certificate: Certificate) -> None:
    with pytest.raises(ModelMismatch, match="certify the questions with this one"):
        certificate.bound("", 150, "f" * 40)


def test_questions_are_grouped_by_document_and_refused_where_they_contradict() -> None:
    rows = [("a", "", "q1", ("x",)), ("b", "", "q2", ("y",)), ("a", "", "q3", ("z",))]
    assert grouped(rows) == [Asked("a", "", ("q1", "q3"), (("x",), ("z",))), Asked("b", "", ("q2",), (("y",),))]
    for bad, told in (
        ([], "no questions"),
        ([("a", "", "q", None), ("b", "", "q", ("x",))], "all of them, or none"),
        ([("a", "one", "q", None), ("a", "two", "q", None)], "has the labels"),
    ):
        with pytest.raises(InvalidRequest, match=told):
            grouped(bad)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="99 documents of label 'law'"):
        require_enough([Asked("a", "law", ("q",), None)], 0.01)
