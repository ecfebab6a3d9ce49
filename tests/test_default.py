"""What a creation gets that says neither how much to keep nor how: one default, everywhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import kvshelf
from kvshelf.api import CreateCache, Estimate
from kvshelf.api.creation import DEFAULT_CODEC, DEFAULT_POLICY
from kvshelf.api.strict import parse_request
from kvshelf.corpus.input.defaults import with_defaults
from kvshelf.corpus.plan import PlannedWork
from kvshelf.service.losses import LOSSES

WAYS = [
    ({}, ("full", "int8")),
    ({"min_quality": 0.9}, ("full", "int8")),
    ({"codec": "int4"}, ("full", "int4")),
    ({"codec": "none"}, ("full", "none")),
    ({"policy": "full"}, ("full", "none")),
    ({"policy": "full", "codec": "int8"}, ("full", "int8")),
    ({"policy": "snapkv"}, ("snapkv", "none")),
    ({"policy": "snapkv", "codec": "int8"}, ("snapkv", "int8")),
    ({"compression_ratio": 0.5}, ("keydiff", "none")),
    ({"budget_tokens": 64}, ("keydiff", "none")),
    ({"levels": [0.5, 0.75]}, ("keydiff", "none")),
    ({"policy_params": {"sink": 8}}, ("keydiff", "none")),
    ({"compression_ratio": 0.5, "codec": "int8"}, ("keydiff", "int8")),
    ({"policy": "auto"}, ("auto", "none")),
    ({"episodes": {"count": 2}}, ("epicache", "none")),
]


@pytest.mark.parametrize(("fields", "way"), WAYS)
def test_a_creation_removes_entries_only_where_it_says_so(fields, way):
    """Also where it is kept or sent, without the fields that have their default values or were not given."""
    body = parse_request(CreateCache, {"document": "The bell rings at nine.", **fields})
    assert (body.policy, body.codec) == way
    for dumped in (body.model_dump(mode="json", exclude_defaults=True), body.model_dump(exclude_unset=True)):
        again = parse_request(CreateCache, dumped)
        assert (again.policy, again.codec) == way


def test_the_default_loses_least_on_real_documents():
    least = min(LOSSES, key=lambda loss: loss.lost / loss.right)
    assert (least.policy, least.codec) == (DEFAULT_POLICY, DEFAULT_CODEC)


def test_the_page_the_plan_and_the_engine_have_the_same_default(tiny):
    script = Path(kvshelf.__file__).parent / "service" / "page" / "views" / "put-options.js"
    form = dict(re.findall(r'^  (policy|codec): "(\w+)",$', script.read_text(), re.MULTILINE))
    assert form == {"policy": DEFAULT_POLICY, "codec": DEFAULT_CODEC}
    assert (PlannedWork().policy, PlannedWork().codec) == (DEFAULT_POLICY, DEFAULT_CODEC)
    assert tiny.prepare("The bell rings at nine. " * 9).policy.name == DEFAULT_POLICY
    assert tiny.prepare("The bell rings at nine. " * 9, compression_ratio=0.5).policy.name == "keydiff"


def test_an_estimate_without_a_policy_is_of_all_of_them():
    for fields in ({}, {"compression_ratio": 0.5}):
        body = parse_request(Estimate, {"document": "The bell rings at nine.", **fields})
        assert (body.policy, body.codec) == (None, None)


def test_a_row_of_a_batch_settles_the_default_with_the_batch():
    def way(row, defaults):
        body = parse_request(CreateCache, with_defaults({"document": "nine", **row}, defaults))
        return body.policy, body.codec

    assert way({}, {}) == ("full", "int8")
    assert way({"policy": "snapkv"}, {}) == ("snapkv", "none")
    assert way({}, {"compression_ratio": 0.5}) == ("keydiff", "none")
    assert way({}, {"codec": "int4"}) == ("full", "int4")


def test_a_row_of_a_batch_has_its_own_certificate_or_way_and_not_the_batchs_beside_it():
    def row(own, defaults):
        return with_defaults({"document": "nine", **own}, defaults)

    assert parse_request(CreateCache, row({}, {"certificate": "law"})).certificate == "law"
    by_certificate = row({"certificate": "law"}, {"policy": "snapkv", "compression_ratio": 0.5, "name": "all"})
    assert by_certificate == {"document": "nine", "certificate": "law", "name": "all"}
    by_policy = parse_request(CreateCache, row({"policy": "snapkv"}, {"certificate": "law"}))
    assert (by_policy.policy, by_policy.certificate) == ("snapkv", None)
