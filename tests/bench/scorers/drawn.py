"""Answers, references and classes, drawn the same on every machine, for comparing scorers with published ones."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

ItemT = TypeVar("ItemT")
Case = tuple[str, list[str], list[str]]
"""An answer, its references and the classes."""

COUNT = 1000
_ENGLISH = (
    "the a an of and river station Harbour KEEPER lantern seven 7 12 3.5 12.0 0 report signed in on code-7 isn't U.S. "
    'amber falcon, 48291 (north) #12 key: value. end; "quoted" it\'s x_1 def return sum(a,b) // ` A B C D A. option is'
)
_MIXED = "北京 首都 中国 是 的 ， 。 一九九九 年 会议 记录 段落 总结 我们 today 12 《书》"  # noqa: RUF001
WORDS, CHINESE = tuple(_ENGLISH.split()), tuple(_MIXED.split())
CLASSES = ("Date", "Number of something", "Number", "Individual", "Other entity", "Other", "City", "Color")
GAPS = (" ", " ", " ", " ", " ", "\n", "  ", ". ", "\t", "")


class Draw:
    """Draws by `random()` alone, whose numbers no version of Python changes."""

    def __init__(self, seed: str) -> None:
        self._rng = random.Random(seed)

    def below(self, count: int) -> int:
        return int(self._rng.random() * count)

    def one(self, items: Sequence[ItemT]) -> ItemT:
        return items[self.below(len(items))]

    def text(self, words: Sequence[str], most: int, gaps: Sequence[str] = GAPS) -> str:
        return "".join(self.one(words) + self.one(gaps) for _ in range(self.below(most) + 1))

    def like(self, text: str, words: Sequence[str]) -> str:
        """Something that shares much with a text, or all, or nothing."""
        kind = self.below(6)
        parts = text.split(" ")
        if kind == 0:
            return text
        if kind == 1:
            return self.text(words, 3) + text + self.text(words, 3)
        if kind == 2:
            return self.text(words, 12)
        if kind == 3:
            return text.upper() if self.below(2) else text.lower() + "\n" + self.text(words, 6)
        kept = [part for part in parts if self.below(3)]
        return self.one(GAPS) + self.one(GAPS).join([*kept, self.one(words), *kept[: self.below(4)]])


def draw(name: str) -> list[Case]:
    """The cases of a scorer."""
    rng = Draw(name)
    maker = _MAKERS.get(name, _words)
    return [maker(rng) for _ in range(COUNT)]


def _words(rng: Draw) -> Case:
    references = [rng.text(WORDS, 9) for _ in range(1 + rng.below(3))]
    return rng.like(rng.one(references), WORDS), references, []


def _one_long(rng: Draw) -> Case:
    reference = rng.text(WORDS, 40)
    return rng.like(reference, WORDS), [reference], []


def _chinese(rng: Draw) -> Case:
    references = [rng.text(CHINESE, 12, ("", "", "", " ", "\n", ".")) for _ in range(1 + rng.below(2))]
    return rng.like(rng.one(references), CHINESE), references, []


def _short(rng: Draw) -> Case:
    references = [rng.text(WORDS, 2, ("", " ")).strip() or "7" for _ in range(1 + rng.below(4))]
    return rng.one(("\n", "", "\x07 ")) + rng.like(" ".join(references), WORDS), references, []


def _classes(rng: Draw) -> Case:
    said = [rng.one(CLASSES) for _ in range(rng.below(4))]
    classes = [one for one in CLASSES if rng.below(4)] or list(CLASSES)
    return " or ".join([*said, rng.one(WORDS)]), [rng.one(classes)], classes


def _number(pattern: str) -> Callable[[Draw], Case]:
    def case(rng: Draw) -> Case:
        numbers = ("1", "2", "12", "21", "7", "30", "007", "3.5")
        return rng.text((*numbers, *numbers, *WORDS), 5), [pattern.format(rng.one(numbers[:6]))], []

    return case


def _decimal(rng: Draw) -> Case:
    numbers = ("1", "2.0", "12", "3.5", "7", "-4", "0.25", "12.75")
    return rng.text((*numbers, *WORDS[:6]), 4), [rng.one(numbers)], []


def _letter(rng: Draw) -> Case:
    letter, said = rng.one("ABCD"), rng.one("ABCDE")
    shape = rng.one(("({})", "{}", "**{}**", "**({})**", "[{}]", "({}", " {}"))
    before = rng.one(("The correct answer is ", "the correct answer is ", "Answer: ", "The correct answer is\n"))
    again = rng.one(("", "", f" The correct answer is ({letter})", f"\nThe correct answer is {letter}"))
    return rng.text(WORDS, 3) + before + shape.format(said) + again, [letter], []


def _option(rng: Draw) -> Case:
    letter, text = rng.one("ABCD"), rng.text(WORDS[3:10], 2, ("", " ")).strip()
    said = rng.one((letter, text, rng.one("ABCD"), rng.text(WORDS, 3)))
    before = rng.one(("", " ", "answer is: ", "The answer is ", "answer:", "the option is ", "it is ", "AB ", "so: "))
    return before + said + rng.one(("", ".", "\n", f" {letter}", ", option is B")), [text, letter], []


def _code(rng: Draw) -> Case:
    lines = ("x = 1", "return sum(a, b)", "# a comment", "```python", "// more", "for i in range(12):", "", "  y += x")
    reference = rng.one(lines) + rng.one(("", " ", ";"))
    said = [rng.one((reference, *lines)) + rng.one(("", " # note", "x")) for _ in range(1 + rng.below(3))]
    return rng.one(("", "\n")) + "\n".join(said), [reference], []


FUNCTIONS = {
    "python": ("def {0}({1}, b):\n    # adds\n    return {1} + b * {2}", "@cached\nclass A:\n    x = {2}"),
    "java": ("public int {0}(int {1}) {{\n  return {1} + {2};\n}}", "class A {{\n  int x = {2};\n}}"),
    "typescript": ("function {0}({1}: number): number {{\n  return {1} * {2}\n}}", "const {0} = ({1}) => {2}"),
    "rust": ("fn {0}({1}: i32) -> i32 {{\n    {1} + {2} // adds\n}}", "struct {0} {{ {1}: i32 }}"),
    "cpp": ("int {0}(int {1}) {{\n  return {1} - {2};\n}}", "char *{0}(char *{1}) {{ return {1} + {2}; }}"),
    "go": ("func {0}({1} int) int {{\n\treturn {1} / {2}\n}}", "func (s *A) {0}({1} int) int {{ return {2} }}"),
}


def _function(rng: Draw) -> Case:
    """A function of a repository, said in a block of code or in words, whole, with another one, or changed."""
    language = rng.one(tuple(FUNCTIONS))

    def made() -> str:
        named = rng.one(("add", "of_one", "río")), rng.one(("a", "count")), rng.one(("1", "22", "3"))
        tail = "".join(f"\n{rng.text(WORDS, 6, (' ',))}" for _ in range(rng.below(3)))
        return rng.one((FUNCTIONS[language][0], *FUNCTIONS[language])).format(*named) + tail

    functions = list(dict.fromkeys(made() for _ in range(1 + rng.below(5))))
    right = rng.one(functions)
    said = rng.one((right, right, right, rng.like(right, WORDS), rng.one(functions), right.partition("\n")[2], "12"))
    said = rng.one(("", "", "# first\n", f"{made()}\n")) + said
    fence = rng.one(("```", f"```{language}", "```  "))
    wrapped = rng.one(
        (said, f"{fence}\n{said}\n```", f"Here:\n{fence}\n{said}\n```\nor\n```\n{made()}\n```", f"{fence}\n{said}")
    )
    return wrapped, [right], [language, *functions]


_ROOTS = (
    "relat hop hopp agr fall controll happ fl spi rat sens oper activ digit feud archaeo sk d vil differ analog form "
    "electr replac adop commun ceas roll t sign conflat troubl siz fizz inn an enjo say"
)
_ENDINGS = (
    "s es ies ied ed ing eed y ee e ational tional enci anci izer bli alli entli eli ousli ization ation ator alism "
    "iveness fulness ousness aliti iviti biliti fulli logi icate ative alize iciti ical ful ness al ance ence er ic "
    "able ible ant ement ment ent ion tion ou ism ate iti ous ive ize ll sses"
)
ROOTS, ENDINGS = tuple(_ROOTS.split()), ("", *_ENDINGS.split())
SYNSETS = {
    "noun": ("harbour harbor haven", "station depot Post", "keeper guardian", "report account written_report", "mouse"),
    "verb": ("sign subscribe", "report describe", "go travel move"),
    "adj": ("amber yellow(p)", "happy glad(ip)", "good well"),
    "adv": ("soon shortly", "well good"),
}
IRREGULAR = {"noun": "mice mouse", "verb": "went go", "adj": "better good well", "adv": "best well"}
KNOWN = tuple(word.partition("(")[0] for of in SYNSETS.values() for synset in of for word in synset.split())
KNOWN += ("mice", "went", "better", "goes", "harbours", "soon,")


def write_wordnet(folder: Path) -> None:
    """A WordNet of these synsets, in the form of Princeton's files."""
    for (name, synsets), letter in zip(SYNSETS.items(), "nvar", strict=True):
        data, index = "  1 licence  \n", dict[str, list[int]]()
        for words in map(str.split, synsets):
            for word in words:
                index.setdefault(word.partition("(")[0].lower(), []).append(len(data))
            names = " ".join(f"{word} 0" for word in words)
            data += f"{len(data):08d} 00 {letter} {len(words):02x} {names} 000 | a gloss  \n"
        lines = (
            f"{word} {letter} {len(at)} 0 {len(at)} 0 {' '.join(f'{one:08d}' for one in at)}"
            for word, at in sorted(index.items())
        )
        (folder / f"data.{name}").write_text(data)
        (folder / f"index.{name}").write_text("".join(f"{line}  \n" for line in ("  1 licence", *lines)))
        (folder / f"{name}.exc").write_text(f"{IRREGULAR[name]}\n")


def _inflected(rng: Draw) -> Case:
    """An answer of the reference's words, of others of their roots, of synonyms and of neither."""

    def word() -> tuple[str, ...]:
        return (rng.one(KNOWN),) if rng.below(2) else (rng.one(ROOTS), rng.one(ENDINGS))

    words = [word() for _ in range(1 + rng.below(8))]
    said = [rng.one((one, one, (one[0], rng.one(ENDINGS)), word())) for one in words if rng.below(6)]
    if not rng.below(4):
        said = said[::-1]
    texts = ["".join(one) + rng.one((" ", " ", "\n")) for one in said]
    return "".join(rng.one((text, text.upper(), text, text)) for text in texts), [" ".join(map("".join, words))], []


def _gaps(rng: Draw) -> Case:
    names = ("Tank", "Andy", "JoAnn Fabrics", "North Station", "Station")
    right = {f"<mask-{at}>": rng.one(names) for at in range(1 + rng.below(4))}
    said = {gap: rng.one((name, rng.one(names))) for gap, name in right.items() if rng.below(5)}
    written = rng.one(
        (json.dumps(said), str(said), f" {said}", f"Answer: {said}", f"{said}\n", str([*said]), str(said))
    )
    if not rng.below(8):
        written = written.replace("'Tank'", "12")
    return written, [json.dumps(right)], []


_MAKERS: dict[str, Callable[[Draw], Case]] = {
    "f1_zh": _chinese,
    "rouge_l_zh": _chinese,
    "f1_characters": _chinese,
    "rouge_l": _one_long,
    "rouge_l_sum": _one_long,
    "string_match_all": _short,
    "string_match_part": _short,
    "string_match_rounded": _short,
    "said_aloud": _short,
    "stands_in": lambda rng: (lambda case: (case[0], case[1][:1], []))(_short(rng)),
    "classification": _classes,
    "count": _number("{}"),
    "first_integer": _number("{}"),
    "retrieval": _number("Paragraph {}"),
    "retrieval_zh": _number("段落{}"),
    "first_number": _decimal,
    "letter": _letter,
    "option": _option,
    "function": _function,
    "edit_similarity": _code,
    "rouge_1_recall": _one_long,
    "rouge_2_recall": _one_long,
    "rouge_l_recall": _one_long,
    "bleu_1": _one_long,
    "bleu_4": _one_long,
    "meteor": _inflected,
    "meteor_stems": _inflected,
    "gaps_exact": _gaps,
    "gaps_partial": _gaps,
}
