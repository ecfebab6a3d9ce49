"""`kvshelf bench models`: each outcome by its name, the time limit, the table that it makes for
docs/internals/model-types.md."""

from __future__ import annotations

import json
import runpy
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvshelf.api import Usage
from kvshelf.api.answers import Answer
from kvshelf.engine.engine import Engine
from kvshelf.errors import BlobError, InvalidTensor
from kvshelf_bench.cli import app
from kvshelf_bench.models import trial
from kvshelf_bench.models.trial import ERROR, EXACT, NOT_BUILT, REFUSED, WRONG, tried

PUBLISH = runpy.run_path(str(Path(__file__).resolve().parents[3] / "scripts" / "publish_models.py"))


def test_the_command_says_what_became_of_each_type(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = CliRunner().invoke(app, ["models", "--types", "llama,gemma2,mamba", "--output", str(report)])
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[-1].startswith(
        "exact 2, refused 1, wrong 0, error 0, not built 0 of transformers 5."
    )
    found = json.loads(report.read_text())
    assert found["outcomes"][2]["why"][:30] in done.stdout
    assert [(each["model_type"], each["what"]) for each in found["outcomes"]] == [
        ("llama", EXACT), ("gemma2", EXACT), ("mamba", REFUSED)
    ]  # fmt: skip
    assert [each["difference"] is None for each in found["outcomes"]] == [False, False, True]


def test_json_is_all_that_is_printed() -> None:
    done = CliRunner().invoke(app, ["models", "--types", "llama", "--json"])
    assert json.loads(done.stdout)["outcomes"][0]["what"] == EXACT


def test_an_unknown_type_is_refused() -> None:
    done = CliRunner().invoke(app, ["models", "--types", "llama,lama"])
    assert done.exit_code == 2
    assert "'lama' is not one of" in done.output


_USAGE = Usage(cache_read_tokens=100, read_tokens=50, prefill_tokens=9, completion_tokens=4)
_ANSWER = Answer("", [7, 7, 7, 7], "length", _USAGE, (1.0,))


class _OtherDocument(Engine):
    def compress(self, document: Any, **options: Any) -> Any:
        return super().compress(document[::-1], **options)


class _OtherAnswers(Engine):
    def answer_all(self, asked: Any, **_: Any) -> list[Answer]:
        return [_ANSWER] * len(asked)


class _Raising(Engine):
    error: Exception

    def compress(self, *_: Any, **__: Any) -> Any:
        raise self.error


class _Slow(Engine):
    def compress(self, *_: Any, **__: Any) -> Any:
        time.sleep(30)


@pytest.mark.parametrize("engine", [_OtherDocument, _OtherAnswers])
def test_other_logits_and_other_answers_are_wrong(engine: type[Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "Engine", engine)
    found = tried("llama", 60)
    assert found.what == WRONG
    assert found.difference is not None
    assert found.difference > 0.01
    assert CliRunner().invoke(app, ["models", "--types", "llama"]).exit_code == 1


@pytest.mark.parametrize("error", [KeyError("layer 3"), InvalidTensor("keys of 3 heads"), BlobError("cut off")])
def test_all_that_is_no_refusal_is_an_error(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "Engine", type("_", (_Raising,), {"error": error}))
    found = tried("llama", 60)
    assert (found.what, found.why) == (ERROR, f"{type(error).__name__}: {error}")


def test_a_type_that_takes_too_long_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "Engine", _Slow)
    started = time.perf_counter()
    found = tried("llama", 3)
    assert (found.what, found.why) == (ERROR, "TimeoutError: it takes longer than 3 s")
    assert time.perf_counter() - started < 15


def test_a_timer_of_somebody_else_goes_on() -> None:
    before, handler = signal.getitimer(signal.ITIMER_REAL), signal.getsignal(signal.SIGALRM)
    signal.setitimer(signal.ITIMER_REAL, 200)
    try:
        with trial.time_limit(1):
            pass
        assert 190 < signal.getitimer(signal.ITIMER_REAL)[0] <= 200
        assert signal.getsignal(signal.SIGALRM) is handler
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)


def test_a_model_that_says_the_same_behind_every_document_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "TELLING", 1e3)
    found = tried("llama", 60)
    assert (found.what, found.why) == (NOT_BUILT, "its small model says the same behind every document")


def outcome(model_type: str, what: str, why: str = "") -> dict[str, Any]:
    return {"model_type": model_type, "what": what, "why": why, "difference": None}


def test_the_table_of_the_page_has_a_row_for_each_reason() -> None:
    outcomes = [
        outcome("b", EXACT), outcome("x", REFUSED, "has layers"), outcome("y", NOT_BUILT, "too large"),
        outcome("a", EXACT), outcome("z", REFUSED, "asks"), outcome("w", REFUSED, "asks"),
    ]  # fmt: skip
    text = PUBLISH["page"](
        f"before {PUBLISH['BEGIN']} old {PUBLISH['END']} after",
        {"machine": {"transformers": "5.9"}, "outcomes": outcomes},
    )
    assert text.startswith(f"before {PUBLISH['BEGIN']}\n\nWith transformers 5.9: 2 taken, 3 refused, 1 not tried.\n")
    assert text.endswith(f"{PUBLISH['END']} after")
    assert [line for line in text.splitlines() if line.startswith("| ")][1:] == [
        "| taken |  | `a`, `b` |",
        "| refused | asks | `w`, `z` |",
        "| refused | has layers | `x` |",
        "| not tried | too large | `y` |",
    ]


@pytest.mark.parametrize("what", [WRONG, ERROR])
def test_mistakes_are_not_published(what: str) -> None:
    with pytest.raises(ValueError, match="neither exact nor refused: a"):
        PUBLISH["table"]({"machine": {"transformers": "5.9"}, "outcomes": [outcome("a", what)]})
