"""The three jobs on a real model: put, ask again and again, batch. Under `full` its answers are plain transformers'."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvshelf import Client, Engine
from tests.real.conftest import HANDBOOK, Plain, prompt_ids

if TYPE_CHECKING:
    from tests.conftest import LiveService

QUESTIONS = ("Who founded the Larkfield Tool Library?", "How much is the yearly fee?", "What may not be lent?")


@pytest.mark.parametrize("question", QUESTIONS)
def test_answers_are_those_of_plain_transformers(shelf: Client, stored: str, plain: Plain, question: str) -> None:
    expected = plain.answer(prompt_ids(shelf, stored, prompt=question), 24)
    for _ in range(2):  # read from the shelf, then from the replica's memory
        assert shelf.caches.query(stored, question, max_tokens=24).text == expected
    assert "".join(shelf.caches.stream(stored, question, max_tokens=24)) == expected


def test_a_fact_of_the_document_is_in_the_answer(shelf: Client, stored: str) -> None:
    known = json.loads(HANDBOOK.with_name("questions.json").read_text())[:4]
    answers = [shelf.caches.query(stored, each["question"], max_tokens=40).text for each in known]
    right = [each["answer"] in answer for each, answer in zip(known, answers, strict=True)]
    assert sum(right) >= 2, answers


def test_the_prompt_is_the_template_s(shelf: Client, stored: str, plain: Plain, handbook: str) -> None:
    """But for the seams: document and question are tokenized apart."""
    said = [{"role": "user", "content": f"{handbook}\n\n{QUESTIONS[0]}"}]
    whole = plain.tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    assert plain.tokenizer.decode(prompt_ids(shelf, stored, prompt=QUESTIONS[0])) == whole


def test_six_turns_are_kept_and_answered_as_without_a_shelf(shelf: Client, stored: str, plain: Plain) -> None:
    said: list[dict[str, str]] = []
    read = []
    for question in (*QUESTIONS, "Please say that again.", "In one word?", "Thank you. Who is the treasurer?"):
        said.append({"role": "user", "content": question})
        expected = plain.answer(prompt_ids(shelf, stored, messages=said), 16)
        answer = shelf.caches.query(stored, messages=said, max_tokens=16, store=True)
        assert answer.text == expected
        assert answer.stored_cache_id is not None
        said.append({"role": "assistant", "content": answer.text})
        read.append(answer.usage.cache_read_tokens)
        assert answer.usage.prefill_tokens < 60, "earlier turns come from the shelf"
    assert read == sorted(set(read))


def test_several_documents_answer_together(shelf: Client, stored: str, engine: Engine, handbook: str) -> None:
    notice = "The workshop on Mill Lane opens at nine. Its keys are with Bruno Falk."
    other = shelf.caches.create(document=notice, policy="full").id
    question = "Who has the keys of the workshop?"
    answer = shelf.caches.query([stored, other], question, max_tokens=16)
    caches = [engine.compress(text, policy="full") for text in (handbook, notice)]
    assert answer.text == engine.answer(caches, question, max_new_tokens=16).text
    assert sum(source.share for source in answer.sources) == pytest.approx(1, abs=1e-3)


def test_a_batch_makes_the_caches_that_put_makes(real_service: LiveService, shelf: Client, tmp_path: Path) -> None:
    whole = HANDBOOK.read_text()
    texts = {f"{number}.txt": whole[1200 * number : 1200 * (number + 1)] for number in range(4)}
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name, text in texts.items():
        (folder / name).write_text(text)
    output = tmp_path / "out.jsonl"
    options = ["--policy", "keydiff", "--compression-ratio", "0.25", "--url", real_service.url, "--output", output]
    command: list[Any] = [sys.executable, "-m", "kvshelf", "batch", folder, *options]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = {row["custom_id"]: row for row in map(json.loads, output.read_text().splitlines())}
    assert set(rows) == set(texts)
    for name in texts:
        made = shelf.caches.create(file=folder / name, policy="keydiff", compression_ratio=0.25)
        assert (made.id, made.existing) == (rows[name]["cache_id"], True)
