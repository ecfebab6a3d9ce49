"""Lines of JSON as rows, valid and invalid ones."""

from __future__ import annotations

import io
import json
import tracemalloc
from typing import Any

import pytest

from kvshelf.api import CreateCache
from kvshelf.corpus.input.defaults import require_defaults
from kvshelf.corpus.input.rows import parse_jsonl, read_row
from kvshelf.corpus.row import Row
from kvshelf.errors import InvalidRequest
from kvshelf.workers.replica.create.spec import require_policy


def rows(*lines: bytes | dict[str, Any], defaults: dict[str, Any] | None = None, **limits: int) -> list[Row]:
    data = b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
    return list(parse_jsonl(io.BytesIO(data), "in.jsonl", defaults or {}, **limits))


def wrong(row: Row) -> tuple[int, str, str]:
    assert row.spec is None
    assert row.error is not None
    return row.line, row.error.code, row.error.message


def test_a_line_is_a_creation_with_a_custom_id() -> None:
    (row,) = rows({"custom_id": "a", "document": "text", "policy": "knorm", "compression_ratio": 0.5})
    assert (row.source, row.line, row.custom_id, row.error) == ("in.jsonl", 1, "a", None)
    expected = CreateCache(document="text", policy="knorm", compression_ratio=0.5, name="a")
    assert row.spec == expected


def test_a_row_says_how_its_source_is_kept() -> None:
    lines = ({"document": "x", "keep_source": how} for how in ("tokens", True, False, "text"))
    *kept, refused = rows({"document": "x"}, *lines, defaults={"keep_source": "tokens", "source_ttl_s": 60})
    sources = [row.spec and (row.spec.keep_source, row.spec.source_ttl_s) for row in kept]
    assert sources[:3] == [("tokens", 60), ("tokens", 60), (True, 60)]
    assert wrong(refused)[1] == "invalid_request"


def test_a_custom_id_is_the_cache_s_name_unless_the_row_gives_one() -> None:
    named, long = rows({"custom_id": "a", "document": "x", "name": "mine"}, {"custom_id": "b" * 300, "document": "x"})
    assert named.spec is not None
    assert long.spec is not None
    assert (named.spec.name, long.spec.name) == ("mine", "b" * 256)


def test_a_line_in_openai_s_shape_is_the_same_row() -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "codec": "int8"}
    ours, theirs = rows(
        {"custom_id": "a", **body}, {"custom_id": "b", "method": "POST", "url": "/v1/caches", "body": body}
    )
    assert ours.spec is not None
    assert ours.spec.model_copy(update={"name": "b"}) == theirs.spec
    assert theirs.custom_id == "b"


def test_a_custom_id_need_not_be_given() -> None:
    (row,) = rows({"document": "text"})
    assert row.custom_id is None
    assert row.spec is not None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"", "empty"),
        (b"  \t", "empty"),
        (b"{", "not JSON"),
        (b'{"document": "\xff"}', "byte 14 of this line is not valid UTF-8"),
        (b'{"document": NaN}', "not JSON"),
        (rb'{"document": "\ud800"}', "not JSON"),
        (b"[" * 100_000, "lists and objects"),
        (b"[" * 2_000, "not JSON"),
        (b"17", "a JSON object"),
        ({"document": "a", "foo": 1}, "foo: unknown field"),
        ({"custom_id": "a"}, "exactly one of document, messages and token_ids"),
        ({"document": ""}, "document|exactly one"),
        ({"document": "a", "token_ids": [1]}, "exactly one of document, messages and token_ids"),
        ({"document": "a", "compression_ratio": 1.5}, "compression_ratio: "),
        ({"custom_id": 7, "document": "a"}, "custom_id: text of 1 to 512"),
        ({"custom_id": "", "document": "a"}, "custom_id: text of 1 to 512"),
        ({"custom_id": "x" * 513, "document": "a"}, "custom_id: text of 1 to 512"),
        ({"method": "POST", "url": "/v1/chat/completions", "body": {"document": "a"}}, "only POST /v1/caches"),
        ({"method": "GET", "url": "/v1/caches", "body": {"document": "a"}}, "only POST /v1/caches"),
        ({"method": "POST", "url": "/v1/caches"}, "body: "),
        (
            {"method": "POST", "url": "/v1/caches", "body": {"document": "a"}, "policy": "knorm"},
            "policy: unknown beside",
        ),
        ({"method": "POST", "url": "/v1/caches", "body": {"document": "a", "foo": 1}}, "foo: unknown field"),
    ],
)
def test_a_bad_line_is_an_error_row_and_the_next_one_is_read(line: bytes | dict[str, Any], message: str) -> None:
    bad, good = rows(line, {"document": "fine"})
    number, code, said = wrong(bad) if bad.error else (0, "", "")
    if message == "document|exactly one":  # whether an empty document is one, the engine decides
        assert (number, code) in ((0, ""), (1, "invalid_request"))
    else:
        assert (number, code) == (1, "invalid_request")
        assert message in said
    assert good.spec is not None
    assert good.line == 2


def test_an_error_row_keeps_the_custom_id_where_there_is_one() -> None:
    (row,) = rows({"custom_id": "mine", "document": "a", "foo": 1})
    assert row.custom_id == "mine"
    assert row.error is not None


def test_custom_ids_that_repeat_are_refused_the_second_time() -> None:
    parsed = rows(
        {"custom_id": "a", "document": "1"},
        {"document": "2"},
        {"custom_id": "a", "document": "3"},
        {"document": "4"},
        {"custom_id": "b", "foo": 1},
        {"custom_id": "b", "document": "5"},
    )
    assert [row.error is None for row in parsed] == [True, True, False, True, False, True]
    assert wrong(parsed[2])[:2] == (3, "invalid_request")
    assert "'a' stands in an earlier row" in wrong(parsed[2])[2]


def test_a_line_beyond_the_limit_is_skipped_without_being_held() -> None:
    long = b'{"document": "' + b"x" * (20 << 20) + b'"}'
    stream = io.BytesIO(long + b'\n{"document": "fine"}\n' + long)
    tracemalloc.start()
    parsed = list(parse_jsonl(stream, "in.jsonl", {}, max_line_bytes=1 << 16))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [(row.line, None if row.error is None else row.error.code) for row in parsed] == [
        (1, "body_too_large"),
        (2, None),
        (3, "body_too_large"),
    ]
    assert f"{len(long) + 1} bytes" in wrong(parsed[0])[2]
    assert peak < 1 << 20


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b""])
def test_a_line_at_the_limit_is_read_whatever_its_end(end: bytes) -> None:
    line = b'{"document": "' + b"x" * 100 + b'"}'
    (row,) = parse_jsonl(io.BytesIO(line + end), "in.jsonl", {}, max_line_bytes=len(line) + len(end.strip(b"\n")))
    assert row.spec is not None
    assert row.nbytes == len(line + end)


def test_a_byte_order_mark_before_the_first_line_is_no_part_of_it() -> None:
    first, second = rows(b"\xef\xbb\xbf" + b'{"document": "a"}', b"\xef\xbb\xbf" + b'{"document": "b"}')
    assert first.spec is not None
    assert second.error is not None


def test_defaults_give_way_to_what_a_row_says() -> None:
    defaults = {
        "policy": "snapkv",
        "policy_params": {"window": 8},
        "compression_ratio": 0.5,
        "ttl_s": 60.0,
        "ttl_renew": True,
        "labels": {"job": "n", "kind": "a"},
        "codec": None,
    }
    plain, other, budget, labelled = rows(
        {"document": "a"},
        {"document": "a", "policy": "knorm"},
        {"document": "a", "budget_tokens": 9, "expires_at": 9e9},
        {"document": "a", "labels": {"kind": "b"}},
        defaults=defaults,
    )
    assert plain.spec is not None
    assert (plain.spec.policy, plain.spec.policy_params, plain.spec.codec) == ("snapkv", {"window": 8}, "none")
    assert other.spec is not None
    assert (other.spec.policy, other.spec.policy_params) == ("knorm", {})
    assert budget.spec is not None
    assert (budget.spec.budget_tokens, budget.spec.compression_ratio) == (9, None)
    assert (budget.spec.expires_at, budget.spec.ttl_s, budget.spec.ttl_renew) == (9e9, None, False)
    assert (other.spec.ttl_s, other.spec.ttl_renew_s) == (60.0, 60.0)
    assert labelled.spec is not None
    assert labelled.spec.labels == {"job": "n", "kind": "b"}


SIZES: list[dict[str, Any]] = [{"compression_ratio": 0.75}, {"budget_tokens": 9}, {"levels": [0.5, 0.75]}]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("policy", ["full", "mikv", "infllm", "auto"])
def test_a_batch_s_size_is_for_rows_whose_policy_takes_one(policy: str, size: dict[str, Any]) -> None:
    own, other = rows(
        {"document": "a", "policy": policy},
        {"document": "b", "policy": "knorm"},
        defaults={**size, "labels": {"a": "b"}},
    )
    assert own.spec == CreateCache(document="a", policy=policy, labels={"a": "b"})
    assert other.spec == CreateCache(document="b", policy="knorm", labels={"a": "b"}, **size)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("policy", ["full", "auto"])
def test_a_batch_s_policy_without_a_size_is_for_rows_that_give_none(policy: str, size: dict[str, Any]) -> None:
    plain, sized = rows({"document": "a"}, {"document": "b", **size}, defaults={"policy": policy, "ttl_s": 60.0})
    assert plain.spec == CreateCache(document="a", policy=policy, ttl_s=60.0)
    assert sized.spec == CreateCache(document="b", ttl_s=60.0, **size)


def test_a_row_that_gives_both_is_not_mended() -> None:
    full, auto = rows(
        {"document": "a", "policy": "full", "compression_ratio": 0.5},
        {"document": "a", "policy": "auto", "compression_ratio": 0.5},
        defaults={"compression_ratio": 0.75},
    )
    assert full.spec is not None
    with pytest.raises(InvalidRequest, match="'full' keeps everything and takes no compression_ratio"):
        require_policy(full.spec)
    assert "chooses these itself" in wrong(auto)[2]


@pytest.mark.parametrize(
    ("row", "defaults", "made"),
    [
        ({"policy": "auto"}, {"policy": "snapkv", "codec": "int8", "expected_questions": ["q"]}, {"policy": "auto"}),
        ({"policy": "knorm"}, {"policy": "snapkv", "expected_questions": ["q"]}, {"policy": "knorm"}),
        (
            {"policy": "ada", "policy_params": {"base": "knorm"}},
            {"policy": "snapkv", "expected_questions": ["q"]},
            {"policy": "ada", "policy_params": {"base": "knorm"}},
        ),
        (
            {"policy": "ada"},
            {"policy": "snapkv", "expected_questions": ["q"]},
            {"policy": "ada", "expected_questions": ["q"]},
        ),
        ({"keep_source": False}, {"keep_source": True, "source_ttl_s": 60.0}, {"keep_source": False}),
        ({"compression_ratio": None, "policy": "full"}, {"compression_ratio": 0.5}, {"policy": "full"}),
        ({"policy": "of-another-package"}, {"budget_tokens": 9}, {"policy": "of-another-package", "budget_tokens": 9}),
    ],
    ids=str,
)
def test_a_default_that_does_not_go_with_a_row_s_choice_gives_way(
    row: dict[str, Any], defaults: dict[str, Any], made: dict[str, Any]
) -> None:
    (parsed,) = rows({"document": "a", **row}, defaults=defaults)
    assert parsed.spec == CreateCache(document="a", **made)


def test_a_default_that_is_not_for_this_kind_of_document_gives_way() -> None:
    turns = [{"role": "user", "content": "hi"}]
    text, ids, talk = rows(
        {"document": "a"}, {"token_ids": [1, 2]}, {"messages": turns}, defaults={"keep_source": True, "layout": "plain"}
    )
    assert text.spec == CreateCache(document="a", keep_source=True, layout="plain")
    assert ids.spec == CreateCache(token_ids=[1, 2], keep_source="tokens", layout="plain")
    assert talk.spec == CreateCache.model_validate({"messages": turns, "keep_source": True})
    (ids,) = rows({"token_ids": [1, 2]}, defaults={"layout": "chat"})
    assert ids.spec == CreateCache(token_ids=[1, 2])


@pytest.mark.parametrize(
    "defaults",
    [{"document": "a"}, {"foo": 1}, {"compression_ratio": 2}, {"compression_ratio": 0.5, "budget_tokens": 5}],
    ids=str,
)
def test_defaults_that_no_row_could_have_are_refused_at_once(defaults: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        require_defaults(defaults)


def test_defaults_of_any_use_pass() -> None:
    spec = require_defaults({"policy": "knorm", "labels": {"a": "b"}, "ttl_s": None})
    assert (spec.policy, spec.labels, spec.ttl_s) == ("knorm", {"a": "b"}, None)


def test_rows_cross_processes_as_they_are() -> None:
    good, bad = rows({"custom_id": "zwölf 漢", "document": "ü" * 1000}, b"{")
    for row in (good, bad):
        assert Row.from_dict(json.loads(json.dumps(row.to_dict()))) == row


@pytest.mark.parametrize(
    ("fields", "length"),
    [
        ({"document": "four"}, 4),
        ({"token_ids": [1, 2, 3]}, 12),
        ({"messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]}, 3),
    ],
)
def test_the_length_of_a_row_is_that_of_its_document(fields: dict[str, Any], length: int) -> None:
    assert read_row(fields, {}, source="s", line=1, nbytes=1).length == length
