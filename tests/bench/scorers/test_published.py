"""The scorers beside the published functions, whose results on 1,000 drawn answers each are recorded."""

from __future__ import annotations

import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvshelf.errors import MissingExtra
from kvshelf_bench.scorers import functions
from kvshelf_bench.scorers.scorers import SCORERS, TASKS, scored, task_of
from tests.amounts import few
from tests.bench.scorers.drawn import draw, write_wordnet

RECORDED = json.loads((Path(__file__).parents[2] / "oracles" / "published_scores.json").read_text())
ROUNDED = 1e-4
"""The recorded ones are of four digits, those of RULER are rounded to hundredths of a percent before."""


@pytest.fixture
def small_wordnet(tmp_path, monkeypatch):
    """A WordNet of some synsets, which the recorded scores of METEOR are of."""
    write_wordnet(tmp_path)
    monkeypatch.setenv("WNSEARCHDIR", str(tmp_path))


@pytest.mark.usefixtures("small_wordnet")
@pytest.mark.parametrize("name", few(10, RECORDED))
def test_a_scorer_gives_what_the_published_function_gives(name):
    package = {"f1_zh": "jieba", "rouge_l_zh": "jieba", "function": "tree_sitter"}.get(name, "json")
    if find_spec(package) is None:
        pytest.skip(f"{package} is not here: pip install 'kvshelf[bench]'")
    scores = [SCORERS[name].score(*case) for case in draw(name)]
    differing = [
        (case, ours, theirs)
        for case, ours, theirs in zip(draw(name), scores, RECORDED[name], strict=True)
        if abs(ours - theirs) > ROUNDED
    ]
    # Newer grammars mend one drawn text that is no code, and so have another function of it.
    assert len(differing) <= (name == "function"), differing[:3]
    assert 0.02 < sum(scores) / len(scores) < 0.98, "cases that say nothing"


def test_every_task_has_a_scorer_and_ours_alone_are_not_recorded():
    assert {task.scorer for task in TASKS.values()} <= SCORERS.keys()
    assert SCORERS.keys() - RECORDED.keys() == {"contains", "exact", "rules", "bert"}
    assert task_of("trec_e") == task_of("trec-e") == TASKS["trec"]
    assert task_of("quality") is None


def test_of_some_tasks_only_the_first_line_counts():
    said = "\nDate\nCity\n"
    assert scored("classification", said, ["Date"], ["Date", "City"], first_line=True) == 1
    assert scored("classification", said, ["Date"], ["Date", "City"], first_line=False) == 0.5


@pytest.mark.parametrize(
    ("name", "references", "classes", "reason"),
    [
        ("contains", ["*"], [], "'\\*' has no word"),
        ("classification", ["Date"], [], "no all_classes"),
        ("classification", ["Date"], ["City"], "none of all_classes"),
        ("retrieval", ["12"], [], "no Paragraph with a number"),
        ("letter", ["E"], [], "no letter"),
        ("letter", [""], [], "no letter"),
        ("first_number", ["seven"], [], "no number"),
        ("first_integer", ["1.5"], [], "no whole number"),
        ("function", ["f"], ["python", "repo"], "needs lang, repo and each turn's name"),
        ("function", ["f"], ["cobol", "repo", "f"], "lang is 'cobol'; it must be one of python"),
        ("gaps_exact", ["{'<mask-0>': 7}"], [], "no object of gaps and texts"),
        ("gaps_partial", ["Tank"], [], "no object of gaps and texts"),
        ("rules", ["polite"], [], "no rule 'polite'"),
        ("rules", ["words_at_most:few"], [], "whole number"),
        ("rules", ["mentions:"], [], "needs a text"),
    ],
)
def test_a_scorer_says_which_references_do_not_fit(name, references, classes, reason):
    found = SCORERS[name].unfit(references, classes)
    assert found is not None
    assert re.search(reason, found)


@pytest.mark.parametrize(
    ("name", "package", "says"),
    [
        ("f1_zh", "jieba", r"Chinese task needs 'jieba'.*\[bench\]"),
        ("function", "tree_sitter", r"scbench_repoqa needs 'tree_sitter'.*\[bench\]"),
        ("bert", "bert_score", "pip install bert-score && hf download roberta-large"),
    ],
)
def test_a_scorer_without_its_package_says_what_to_install_before_anything_is_measured(
    monkeypatch, name, package, says
):
    monkeypatch.setitem(sys.modules, package, None)
    functions.parsing.cache_clear()
    with pytest.raises(MissingExtra, match=says):
        SCORERS[name].unfit(["a"], ["python", "repo", "a"])


@pytest.mark.parametrize(
    ("folder", "says"),
    [
        ("", "WNSEARCHDIR is not set"),
        ("nowhere", "No such file"),
        ("other", "index.noun is no index"),
        ("mixed", "index.verb.*elsewhere in data.verb"),
    ],
)
def test_meteor_without_wordnet_says_where_it_is_had_before_anything_is_measured(tmp_path, monkeypatch, folder, says):
    for name, file, text in (
        ("other", "index.noun", "word"),
        ("mixed", "data.verb", "00000000 29 v 00 000 | a gloss  \n"),
    ):
        (tmp_path / name).mkdir()
        write_wordnet(tmp_path / name)
        (tmp_path / name / file).write_text(text)
    monkeypatch.setenv("WNSEARCHDIR", folder and str(tmp_path / folder))
    with pytest.raises(MissingExtra, match=rf"set WNSEARCHDIR.*wordnet-base.*--scorer meteor_stems.*{says}"):
        SCORERS["meteor"].unfit(["a"], [])


def test_meteor_counts_a_word_once_and_the_best_reference():
    score = SCORERS["meteor_stems"].score
    assert score("sign sign", ["no", "sign"], []) == score("sign", ["sign"], []) > score("signing signed", ["sign"], [])
