"""The scorers by name, and the scorer of each task of the published benchmarks."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvshelf.engine.certify.scoring import contains, words
from kvshelf_bench.scorers import choices, functions, loogle, overlap, rules

Score = Callable[[str, Sequence[str], Sequence[str]], float]
"""Of an answer, its references and the classes of its task: between 0 and 1."""


@dataclass(frozen=True)
class Scorer:
    """unfit: why references and classes cannot be scored so; None if they can. right: an answer that is right, of the
    references; None where they do not say one."""

    score: Score
    unfit: Callable[[Sequence[str], Sequence[str]], str | None] = lambda *_: None
    right: Callable[[Sequence[str]], str | None] = lambda references: references[0]


@dataclass(frozen=True)
class Task:
    """How a benchmark scores a task. tokens: of an answer; 0: not said. first_line: only that of an answer counts."""

    scorer: str
    tokens: int = 0
    first_line: bool = False


def _any(score: Callable[[str, Sequence[str]], float]) -> Score:
    return lambda answer, references, _: score(answer, references)


def _best(score: Callable[[str, str], float]) -> Score:
    """Of the reference that is met best."""
    return lambda answer, references, _: max(score(answer, one) for one in references)


def _of_class(answer: str, references: Sequence[str], classes: Sequence[str]) -> float:
    return max(choices.classified(answer, one, classes) for one in references)


def _numbered(word: str) -> Scorer:
    """LongBench's for the number of a paragraph, which the reference names behind a word."""
    pattern = re.compile(rf"{word}(\d+)")

    def score(answer: str, reference: str) -> float:
        match = pattern.search(reference)
        return choices.counted(answer, match.group(1)) if match else 0.0

    return Scorer(
        _best(score), _require_each(lambda one: pattern.search(one) is not None, f"has no {word.strip()} with a number")
    )


def _require_each(fits: Callable[[str], bool], reason: str) -> Callable[[Sequence[str], Sequence[str]], str | None]:
    def unfit(references: Sequence[str], _: Sequence[str]) -> str | None:
        return next((f"the answer {one!r} {reason}" for one in references if not fits(one)), None)

    return unfit


def _no_class(references: Sequence[str], classes: Sequence[str]) -> str | None:
    if not classes:
        return "the row has no all_classes"
    return next((f"the answer {one!r} is none of all_classes" for one in references if one not in classes), None)


def _require_installed(score: Callable[[str, str], float]) -> Callable[[Sequence[str], Sequence[str]], None]:
    """Raises `MissingExtra` without what the score needs: before anything is measured."""

    def unfit(*_: Sequence[str]) -> None:
        score("a", "b")

    return unfit


SCORERS: Final[dict[str, Scorer]] = {
    "contains": Scorer(
        _any(contains), _require_each(lambda one: bool(words(one)), "has no word, so no answer could contain it")
    ),
    "exact": Scorer(_any(choices.exact)),
    "rules": Scorer(_any(rules.kept), rules.unfit, right=lambda _: None),
    "string_match_all": Scorer(_any(choices.all_contained), right="\n".join),
    "string_match_part": Scorer(_any(choices.any_contained)),
    "f1": Scorer(_best(overlap.f1)),
    "f1_zh": Scorer(_best(overlap.f1_chinese), _require_installed(overlap.f1_chinese)),
    "rouge_l": Scorer(_best(overlap.rouge_l)),
    "rouge_l_zh": Scorer(_best(overlap.rouge_l_chinese), _require_installed(overlap.f1_chinese)),
    "classification": Scorer(_of_class, _no_class),
    "count": Scorer(_best(choices.counted)),
    "retrieval": _numbered("Paragraph "),
    "retrieval_zh": _numbered("段落"),
    "edit_similarity": Scorer(_best(overlap.edit_similarity)),
    "letter": Scorer(
        _best(choices.letter), _require_each(lambda one: one in tuple("ABCD"), "is no letter from A to D")
    ),
    "stands_in": Scorer(_any(choices.stands_in)),
    "said_aloud": Scorer(_any(choices.said_aloud)),
    "string_match_rounded": Scorer(_any(choices.all_contained_rounded), right="\n".join),
    "first_integer": Scorer(_best(choices.first_whole_number), _require_each(str.isdecimal, "is no whole number")),
    "first_number": Scorer(
        _best(choices.first_number),
        _require_each(lambda one: re.fullmatch(r"-?\d+(\.\d+)?", one) is not None, "is no number"),
    ),
    "option": Scorer(_any(choices.option)),
    "f1_characters": Scorer(_best(overlap.f1_characters)),
    "rouge_l_sum": Scorer(_best(overlap.rouge_l_sum)),
    "bert": Scorer(_best(overlap.bert), _require_installed(overlap.bert)),
    "bleu_1": Scorer(_best(loogle.bleu(1))),
    "bleu_4": Scorer(_best(loogle.bleu(4))),
    "rouge_1_recall": Scorer(_best(overlap.rouge_recall(1))),
    "rouge_2_recall": Scorer(_best(overlap.rouge_recall(2))),
    "rouge_l_recall": Scorer(_best(overlap.rouge_l_recall)),
    "meteor": Scorer(_best(loogle.meteor), _require_installed(loogle.meteor)),
    "meteor_stems": Scorer(_best(loogle.meteor_stems)),
    "gaps_exact": Scorer(_best(loogle.gaps_exact), loogle.no_gaps),
    "gaps_partial": Scorer(_best(loogle.gaps_partial), loogle.no_gaps),
    "function": Scorer(functions.repeated, functions.unfit),
}

_LONGBENCH: Final = {
    "narrativeqa": Task("f1", 128),
    "qasper": Task("f1", 128),
    "multifieldqa_en": Task("f1", 64),
    "multifieldqa_zh": Task("f1_zh", 64),
    "hotpotqa": Task("f1", 32),
    "2wikimqa": Task("f1", 32),
    "musique": Task("f1", 32),
    "dureader": Task("rouge_l_zh", 128),
    "gov_report": Task("rouge_l", 512),
    "qmsum": Task("rouge_l", 512),
    "multi_news": Task("rouge_l", 512),
    "vcsum": Task("rouge_l_zh", 512),
    "trec": Task("classification", 64, first_line=True),
    "triviaqa": Task("f1", 32, first_line=True),
    "samsum": Task("rouge_l", 128, first_line=True),
    "lsht": Task("classification", 64, first_line=True),
    "passage_retrieval_en": Task("retrieval", 32),
    "passage_count": Task("count", 32),
    "passage_retrieval_zh": Task("retrieval_zh", 32),
    "lcc": Task("edit_similarity", 64),
    "repobench-p": Task("edit_similarity", 64),
}
_RULER: Final = {
    **dict.fromkeys(("niah_single_1", "niah_single_2", "niah_single_3"), Task("string_match_all", 128)),
    **dict.fromkeys(("niah_multikey_1", "niah_multikey_2", "niah_multikey_3"), Task("string_match_all", 128)),
    **dict.fromkeys(("niah_multivalue", "niah_multiquery"), Task("string_match_all", 128)),
    "vt": Task("string_match_all", 30),
    "cwe": Task("string_match_all", 120),
    "fwe": Task("string_match_all", 50),
    **dict.fromkeys(("qa_1", "qa_2"), Task("string_match_part", 32)),
}
_SCBENCH: Final = {
    "scbench_choice_eng": Task("option", 40),
    "scbench_qa_eng": Task("said_aloud", 40),
    "scbench_qa_chn": Task("f1_characters", 40),
    **dict.fromkeys(("scbench_kv", "scbench_kv_hard", "scbench_kv_compressible"), Task("stands_in", 150)),
    **dict.fromkeys(("scbench_hashhop", "scbench_prefix_suffix"), Task("stands_in", 150)),
    "scbench_mf": Task("first_number", 5),
    "scbench_passkey": Task("first_integer", 15),
    "scbench_repoqa": Task("function", 1024),
    "scbench_summary": Task("rouge_l_sum", 200),
    "scbench_vt": Task("string_match_rounded", 30),
    "scbench_many_shot": Task("said_aloud", 10),
}
_LOOGLE: Final = {
    "shortdep_cloze": Task("gaps_exact", 50),
    "shortdep_qa": Task("bert", 300),
    "longdep_qa": Task("bert", 500),
    "longdep_summarization": Task("bert", 500),
}
TASKS: Final[dict[str, Task]] = {**_LONGBENCH, **_RULER, **_SCBENCH, **_LOOGLE}
"""Of LongBench (its -e sets have the same tasks), RULER, SCBench and LooGLE."""


def task_of(name: str) -> Task | None:
    """The task of this name, of LongBench-E too; None where no benchmark has it."""
    return TASKS.get(name.removesuffix("-e").removesuffix("_e"))


def scored(name: str, answer: str, references: Sequence[str], classes: Sequence[str], *, first_line: bool) -> float:
    """The score of an answer. first_line: see `Task`."""
    text = answer.lstrip("\n").split("\n")[0] if first_line else answer
    return SCORERS[name].score(text, references, classes)
