"""SCBench's score for repoqa: which function of a repository the answer repeats, by BLEU of their words."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from itertools import pairwise
from typing import Any, Final

from kvshelf._extras import needs_extra
from kvshelf_bench.scorers.overlap import runs

ENOUGH: Final = 0.8
"""Least similarity of an answer that counts, of the eleven that RepoQA tells; SCBench takes this one."""

_FUNCTIONS: Final = {
    "python": "(function_definition name: (_)) @function",
    "java": "(method_declaration name: (_)) @function",
    "typescript": "(function_declaration name: (_)) @function",
    "rust": "(function_item name: (_)) @function",
    "cpp": "(function_definition declarator: (function_declarator declarator: (identifier))) @function",
    "go": "(function_declaration name: (_)) @function",
}
"""What a function is in a syntax tree of each language: RepoQA's own queries."""

_FENCE: Final = "```"
_OPENING: Final = re.compile(rf"{_FENCE}\w*\s*")


def repeated(answer: str, references: Sequence[str], classes: Sequence[str]) -> float:
    """1 if, of the functions of a repository, the one that the answer is most like is the right one, and it is alike
    enough. classes: the language, then the functions. Raises `MissingExtra` without the parser of the language."""
    language, *functions = classes
    function = _function(answer.strip(), language)
    likeness = [similarity(function, one) for one in functions]
    most = max(likeness)
    return float(most >= ENOUGH and functions[likeness.index(most)] in references)


def unfit(_: Sequence[str], classes: Sequence[str]) -> str | None:
    """Why an answer cannot be scored. classes: language, repository and function's name. Raises `MissingExtra`."""
    if len(classes) != 3 or not all(classes):
        return "the row needs lang, repo and each turn's name, as SCBench's repoqa has them"
    if classes[0] not in _FUNCTIONS:
        return f"the row's lang is {classes[0]!r}; it must be one of {', '.join(_FUNCTIONS)}"
    parsing(classes[0])
    return None


def similarity(answer: str, reference: str) -> float:
    """BLEU of up to four words, with the fourth smoothing of Chen and Cherry, as `nltk` has it: counts of 0 become ever
    smaller parts of the logarithm of the answer's length."""
    answer_words, reference_words = answer.split() or [""], reference.split() or [""]  # as `nltk` has empty texts
    zeros, logs = 0, 0.0
    for count in range(1, 5):
        answer_runs, reference_runs = runs(answer_words, count), runs(reference_words, count)
        common, total = (answer_runs & reference_runs).total(), max(1, answer_runs.total())
        if count == 1 and not common:
            return 0.0
        share = common / total
        if not common and len(answer_words) > 1:
            zeros += 1
            share = math.log(len(answer_words)) / (2**zeros * 5) / total
        logs += math.log(share) / 4 if share else 0.0
    return math.exp(min(0.0, 1 - len(reference_words) / len(answer_words)) + logs)


def _function(answer: str, language: str) -> str:
    """The first function in the answer's blocks of code, else the first block, else the answer itself."""
    blocks = _blocks(answer)
    for block in blocks:
        text = block.encode()
        parser, find = parsing(language)
        nodes = [node for captured in find(parser.parse(text).root_node).values() for node in captured]
        if nodes:
            first = min(nodes, key=lambda node: (node.start_byte, -node.end_byte))
            return text[first.start_byte : first.end_byte].decode()
    return blocks[0] if blocks else answer


def _blocks(answer: str) -> list[str]:
    """The texts between fences, from their first line that is not blank. RepoQA's pattern takes time squared."""
    lines, blocks, at = answer.split("\n"), [], 0
    fences = [number for number, line in enumerate(lines) if line.startswith(_FENCE)]
    for opening, closing in pairwise(fences):
        if opening < at or _OPENING.fullmatch(lines[opening]) is None:
            continue
        first = next(number for number in range(opening + 1, closing + 1) if lines[number].strip())
        blocks.append("".join(f"{line}\n" for line in lines[first:closing]))
        at = closing + 1
    return blocks


@cache
def parsing(language: str) -> Any:
    """A parser of a language, and what finds the functions of a tree."""
    with needs_extra("bench", "the score of scbench_repoqa"):
        from tree_sitter import Language, Parser, Query, QueryCursor

        module = import_module(f"tree_sitter_{language}")
    grammar = Language(module.language_typescript() if language == "typescript" else module.language())
    return Parser(grammar), QueryCursor(Query(grammar, _FUNCTIONS[language])).captures
