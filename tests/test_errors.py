"""What messages add to a wrong name and a wrong share."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from kvshelf.api.creation import CreateCache
from kvshelf.api.strict import refusal
from kvshelf.errors import InvalidRequest, KvshelfError, as_share, nearest
from kvshelf.methods.policies import build
from kvshelf.methods.policies.budgets import Budget
from kvshelf.service.settings import load_settings
from kvshelf.store.url import open_store
from tests.timing import least_s


def test_the_nearest_name_is_offered_whatever_the_case() -> None:
    assert nearest("KeyDif", ["keydiff", "kvzip"]) == " (did you mean 'keydiff'?)"
    assert nearest("kvshelf_prt", ["KVSHELF_PORT", "KVSHELF_HOST"]) == " (did you mean 'KVSHELF_PORT'?)"
    assert nearest("magic", ["keydiff", "kvzip"]) == ""
    assert nearest("", ["keydiff"]) == ""


def test_a_name_of_a_whole_body_takes_no_time() -> None:
    name = "key" * 20_000_000
    assert least_s(lambda: nearest(name, ["keydiff"] * 25)) < 0.2


@pytest.mark.parametrize(("given", "hint"), [(75, "; 75 % is 0.75"), (2.5, "; 2.5 % is 0.025"), (100, "; 100 % is 1")])
def test_a_percentage_is_offered_as_a_share(given: float, hint: str) -> None:
    assert as_share(given) == hint


@pytest.mark.parametrize("given", [1, 0, -3, 101, "75", None])
def test_what_is_no_percentage_gets_no_hint(given: object) -> None:
    assert as_share(given) == ""


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"compression_ratio": 75}, "compression_ratio: Input should be less than 1; found 75; 75 % is 0.75"),
        ({"min_quality": 98}, "found 98; 98 % is 0.98"),
        ({"levels": [50]}, "levels[0]: Input should be less than 1; found 50; 50 % is 0.5"),
        ({"codec": "int44"}, "codec: unknown codec (did you mean 'int4'?); one of none, int8, int4,"),
        ({"codec": "int4\n"}, "unknown codec (did you mean 'int4'?)"),
        ({"codec": "klt:step=3,"}, "codec: what follows klt is not of the form name=value,name=value; found"),
        ({"ttl_s": 0}, "ttl_s: Input should be greater than 0; found 0"),
    ],
)
def test_a_refused_body_says_what_was_meant(body: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError) as error:
        CreateCache(document="x", **body)
    told = str(refusal(error.value))
    assert message in told
    assert "^" not in told, "no pattern"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: build("keydif", {}), r"unknown policy 'keydif' \(did you mean 'keydiff'\?\); this version has"),
        (lambda: build("lagkv", {"lga": 3}), r"no parameter 'lga' \(did you mean 'lag'\?\); it has sink, lag"),
        (lambda: Budget.resolve(9, compression_ratio=75, budget_tokens=None), "including 1; 75 % is 0.75"),
        (lambda: open_store("/srv/shelf"), "it is a path; did you mean disk:///srv/shelf"),
        (lambda: open_store("dsk:///srv/shelf"), r"unknown scheme 'dsk' \(did you mean 'disk'\?\)"),
    ],
)
def test_a_refused_call_says_what_was_meant(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(KvshelfError, match=message):
        call()


def test_a_refused_setting_says_what_was_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSHELF_PROT", "1")
    with pytest.raises(InvalidRequest, match=r"KVSHELF_PROT \(did you mean 'KVSHELF_PORT'\?\); the settings are"):
        load_settings()
