"""What the rows of four published shapes say: a context, and questions with their right answers.

A row's fields tell its shape:

- kvpress: `context, question, answer_prefix, answer` (or `answers`), `max_new_tokens, task, all_classes`
- LongBench: `input, context, answers, all_classes, length, dataset`
- SCBench: `context, multi_turns: [{input, answer, options, task, name}], lang, repo`; the task is the file's name
- lists: `context, question: [...], answers: [...]`, with `scorer` for all of them or one each
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from kvshelf.errors import MissingExtra
from kvshelf_bench.quality.dataset.files import FileRow, bad
from kvshelf_bench.scorers.scorers import SCORERS, Task, task_of

PLACE: Final = "{context}"
REPEATED: Final = "function"
"""The scorer that compares an answer with all functions of its repository. A row has the language, the repository and
the function's name as the classes; `beside_others` puts all functions in their place."""


@dataclass(frozen=True)
class Question:
    """A question. answers: what is right, as the scorer takes it. prefix: what the assistant's turn begins with.
    max_new_tokens: of the answer, as the row or its benchmark says; 0: neither does."""

    text: str
    answers: tuple[str, ...]
    scorer: str = "contains"
    prefix: str = ""
    classes: tuple[str, ...] = ()
    max_new_tokens: int = 0
    task: str = ""
    first_line: bool = False


@dataclass(frozen=True)
class RowRules:
    """What a user says of all rows. scorer: in place of the tasks' own. prompts: by task, a text with {context} and the
    fields of a row, as LongBench's `dataset2prompt.json`: what stands up to the context is the document, what follows
    is the question."""

    scorer: str = ""
    prompts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RowShape:
    """needs: the fields of a row; without: fields of other shapes. read: the context and the questions of a row."""

    name: str
    needs: tuple[str, ...]
    read: Callable[[FileRow, RowRules], tuple[str, tuple[Question, ...]]]


def shape_of(row: FileRow) -> RowShape:
    """The shape that the fields tell. Raises `InvalidRequest`."""
    for shape in SHAPES:
        if all(row.fields.get(name) is not None for name in shape.needs):
            if shape.name == "lists" and isinstance(row.fields["question"], str):
                break
            return shape
    has = ", ".join(map(repr, row.fields)) or "none"
    shapes = "; ".join(f"{', '.join(shape.needs)} ({shape.name})" for shape in SHAPES)
    raise bad(f"{row.where} has the fields {has}; a row needs {shapes}")


def _kvpress(row: FileRow, reading: RowRules) -> tuple[str, tuple[Question, ...]]:
    name = str(row.fields.get("task") or row.file)
    letters = "letter" if {"choice_A", "difficulty"} <= row.fields.keys() else "contains"
    task = task_of(name) or Task(letters)
    right = row.fields["answers"] if row.fields.get("answers") is not None else row.fields.get("answer")
    text = _text(row, "question", row.fields["question"])
    tokens = _whole(row, row.fields.get("max_new_tokens"))
    prefix = row.fields.get("answer_prefix") or ""
    if not isinstance(prefix, str):
        raise bad(f"{row.where}: answer_prefix must be a text")
    question = _question(row, reading, text, right, name, task, prefix=prefix, tokens=tokens)
    return _text(row, "context", row.fields["context"]), (question,)


def _longbench(row: FileRow, reading: RowRules) -> tuple[str, tuple[Question, ...]]:
    name = str(row.fields.get("dataset") or row.fields.get("task") or row.file)
    context, text = _prompted(row, reading, name, row.fields)
    task = task_of(name) or Task("f1")
    return context, (_question(row, reading, text, row.fields["answers"], name, task),)


def _scbench(row: FileRow, reading: RowRules) -> tuple[str, tuple[Question, ...]]:
    turns = row.fields["multi_turns"]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, dict) for turn in turns):
        raise bad(f"{row.where}: multi_turns must be a list of turns with input and answer")
    questions, contexts = [], []
    for turn in turns:
        if missing := [name for name in ("input", "answer") if turn.get(name) is None]:
            raise bad(f"{row.where}: a turn has no {' and no '.join(missing)}")
        name = str(turn.get("task") or row.file)
        options = turn.get("options") or []
        known = dict(zip(("OPTION_A", "OPTION_B", "OPTION_C", "OPTION_D"), options, strict=False))
        fields = {**row.fields, **turn, **known, "question": turn["input"], "context": row.fields["context"]}
        context, text = _prompted(row, reading, name, fields)
        right = turn["answer"]
        if options and right in options:
            right = [right, "ABCD"[options.index(right)]]
        contexts.append(context)
        task = task_of(name) or Task("contains")
        if (reading.scorer or task.scorer) == REPEATED:
            fields["all_classes"] = [fields.get(one) or "" for one in ("lang", "repo", "name")]
        questions.append(_question(replace(row, fields=fields), reading, text, right, name, task))
    if len(set(contexts)) > 1:
        raise bad(f"{row.where}: the prompts of its turns put different texts before the context; give them one")
    return contexts[0], tuple(questions)


def _lists(row: FileRow, reading: RowRules) -> tuple[str, tuple[Question, ...]]:
    context, texts, right = (row.fields[name] for name in ("context", "question", "answers"))
    if not (isinstance(texts, list) and texts and all(map(_is_text, texts))):
        raise bad(f"{row.where}: question must be a list of texts that are not empty")
    if not (isinstance(right, list) and len(right) == len(texts)):
        entries = len(right) if isinstance(right, list) else type(right).__name__
        raise bad(
            f"{row.where}: answers must be a list with one entry for each of {len(texts)} questions, not {entries}"
        )
    scorer_field = row.fields.get("scorer") or "contains"
    scorers = scorer_field if isinstance(scorer_field, list) else [scorer_field] * len(texts)
    if len(scorers) != len(texts):
        raise bad(f"{row.where}: scorer must be one name, or one for each of {len(texts)} questions")
    tasks = row.fields.get("task") or ""
    named = tasks if isinstance(tasks, list) and len(tasks) == len(texts) else [str(tasks)] * len(texts)
    tokens = _whole(row, row.fields.get("max_new_tokens"))
    questions = tuple(
        _question(row, reading, text, answers, str(name), Task(str(scorer)), tokens=tokens)
        for text, answers, scorer, name in zip(texts, right, scorers, named, strict=True)
    )
    return _text(row, "context", context), questions


def beside_others(questions: Sequence[Question]) -> dict[Question, Question]:
    """The questions about functions, with the language and all functions of their repository as classes."""
    about_functions = [one for one in questions if one.scorer == REPEATED]
    named = {(*one.classes[1:], one.answers[0]): None for one in about_functions}
    known = {}
    for one in about_functions:
        language, repository, name = one.classes
        functions = [(function, text) for of, function, text in named if of == repository]
        right = dict.fromkeys((one.answers[0], *(text for function, text in functions if function == name)))
        known[one] = replace(one, answers=tuple(right), classes=(language, *(text for _, text in functions)))
    return known


SHAPES: Final = (
    RowShape("SCBench", ("context", "multi_turns"), _scbench),
    RowShape("LongBench", ("input", "context", "answers"), _longbench),
    RowShape("kvpress", ("context", "question", "answer_prefix"), _kvpress),
    RowShape("lists", ("context", "question", "answers"), _lists),
)


def _question(
    row: FileRow,
    reading: RowRules,
    text: str,
    right: Any,
    name: str,
    task: Task,
    *,
    prefix: str = "",
    tokens: int = 0,
) -> Question:
    answers = _answers(row, text, right)
    scorer = reading.scorer or task.scorer
    if scorer not in SCORERS:
        raise bad(f"{row.where}: there is no scorer {scorer!r}; one of {', '.join(SCORERS)}")
    classes = row.fields.get("all_classes")
    known = tuple(map(str, classes)) if isinstance(classes, list) else ()
    try:
        reason = SCORERS[scorer].unfit(answers, known)
    except MissingExtra as error:
        raise MissingExtra(f"{row.where}{f', task {name}' if name else ''}: {error.message}") from error
    if reason:
        raise bad(f"{row.where}: the scorer {scorer} does not fit {text[:80]!r}: {reason}; give another as --scorer")
    return Question(text, answers, scorer, prefix, known, tokens or task.tokens, name, task.first_line)


def _answers(row: FileRow, question: str, right: Any) -> tuple[str, ...]:
    """Numbers are written out: SCBench has some."""
    listed = right if isinstance(right, list) else [right]
    answers = tuple(str(one) if isinstance(one, int | float) and not isinstance(one, bool) else one for one in listed)
    if not answers or not all(map(_is_text, answers)):
        raise bad(f"{row.where}: the answers of {question[:80]!r} must be texts that are not empty, at least one")
    return answers


def _prompted(row: FileRow, reading: RowRules, name: str, fields: Mapping[str, Any]) -> tuple[str, str]:
    """The document and the question: as the prompt of the task writes them, otherwise context and input alone."""
    context = _text(row, "context", fields["context"])
    prompt = reading.prompts.get(name) or reading.prompts.get(name.removesuffix("_e").removesuffix("-e"))
    if prompt is None:
        if not _is_text(fields["input"]):
            raise bad(f"{row.where}: input is empty, as where a task's prompt asks: give --prompts, a file of prompts")
        return context, fields["input"]
    before, place, after = prompt.partition(PLACE)
    try:
        if not place:
            raise KeyError("context")
        written = before.format_map(fields) + context, after.format_map(fields)
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise bad(f"{row.where}: the prompt of {name} does not fit: {error}") from error
    if not written[1].strip():
        raise bad(f"{row.where}: the prompt of {name} asks nothing behind {PLACE}")
    return written


def _text(row: FileRow, name: str, value: Any) -> str:
    if not _is_text(value):
        raise bad(f"{row.where}: {name} must be a text that is not empty")
    return str(value)


def _whole(row: FileRow, value: Any) -> int:
    if value is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise bad(f"{row.where}: max_new_tokens must be a whole number from 1")
    return value


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())
