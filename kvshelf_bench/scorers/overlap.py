"""Overlap of an answer with a reference: F1 of words, ROUGE-L as two packages compute it, and edit similarity."""

from __future__ import annotations

import operator
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from difflib import SequenceMatcher
from functools import cache
from itertools import chain
from typing import Any, Final

from kvshelf._extras import needs_extra
from kvshelf.errors import MissingExtra

_ARTICLES: Final = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION: Final = str.maketrans("", "", string.punctuation)
_CHINESE: Final = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣"  # noqa: RUF001
    "､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."  # noqa: RUF001
)
_NO_CHINESE_PUNCTUATION: Final = str.maketrans("", "", string.punctuation + _CHINESE)
_NO_WORD: Final = re.compile(r"[^a-z0-9]+")


def f1(answer: str, reference: str) -> float:
    """F1 of the words of both, without case, punctuation and articles: SQuAD's, as LongBench and SCBench take it."""
    return _f1(_normalized(answer).split(), _normalized(reference).split())


def f1_chinese(answer: str, reference: str) -> float:
    """LongBench's F1 of the words that jieba finds. Raises `MissingExtra` without jieba."""
    one, other = ([_compact(word) for word in segmented(text)] for text in (answer, reference))
    return _f1([word for word in one if word], [word for word in other if word])


def f1_characters(answer: str, reference: str) -> float:
    """SCBench's F1 for Chinese, of single characters."""
    return _f1(list(_compact(answer)), list(_compact(reference)))


def rouge_l(answer: str, reference: str) -> float:
    """The F of ROUGE-L of the package `rouge` 1.0.1, which LongBench takes.

    It differs from others: sentences end at points, each word counts once, and what is common is the union of the
    longest common subsequences of all pairs of sentences. 0 where one of both has no sentence.
    """
    precision, recall = _rouge_l(answer, reference)
    return 2 * precision * recall / (precision + recall + 1e-8)


def rouge_l_recall(answer: str, reference: str) -> float:
    """The recall of `rouge_l`, which LooGLE takes."""
    return _rouge_l(answer, reference)[1]


def rouge_recall(length: int) -> Callable[[str, str], float]:
    """The recall of ROUGE-N of the package `rouge` 1.0.1, which LooGLE takes: the share of the reference's runs of so
    many words that stand in the answer, each once."""

    def score(answer: str, reference: str) -> float:
        answer_runs, reference_runs = (
            runs(list(chain(*_sentences(text))), length).keys() for text in (answer, reference)
        )
        return len(reference_runs & answer_runs) / len(reference_runs) if reference_runs else 0.0

    return score


def runs(words: Sequence[str], length: int) -> Counter[tuple[str, ...]]:
    """How often each run of so many words occurs."""
    return Counter(zip(*(words[at:] for at in range(length)), strict=False))


def rouge_l_chinese(answer: str, reference: str) -> float:
    """`rouge_l` of the words that jieba finds. Raises `MissingExtra` without jieba."""
    return rouge_l(" ".join(segmented(answer)), " ".join(segmented(reference)))


def rouge_l_sum(answer: str, reference: str) -> float:
    """The F of ROUGE-Lsum of Google's package `rouge_score`, which SCBench takes for summaries: sentences end with
    their line, and no word counts more often than it occurs in both."""
    answers, references = (
        [_NO_WORD.sub(" ", line.lower()).split() for line in text.split("\n") if line] for text in (answer, reference)
    )
    in_references, in_answers = (Counter(word for line in side for word in line) for side in (references, answers))
    if not in_references or not in_answers:
        return 0.0
    hits, total, other = 0, in_references.total(), in_answers.total()
    for line in references:
        for at in sorted({at for words in answers for at in _common(line, words, operator.ge)}):
            word = line[at]
            if in_references[word] > 0 and in_answers[word] > 0:
                hits, in_references[word], in_answers[word] = hits + 1, in_references[word] - 1, in_answers[word] - 1
    precision, recall = hits / other, hits / total
    return 2 * precision * recall / (precision + recall) if hits else 0.0


def bert(answer: str, reference: str) -> float:
    """LooGLE's BERT score: the second value of `bert_score`, which is given the reference in the answer's place; so it
    is the mean over the answer's tokens. Raises `MissingExtra` without the package or its model."""
    scorer = _bert_scorer()
    return float(scorer.score([reference], [answer or "None"])[1])


@cache
def _bert_scorer() -> Any:
    try:
        from bert_score import BERTScorer

        return BERTScorer(lang="en")
    except (ModuleNotFoundError, OSError) as error:
        raise MissingExtra(
            "LooGLE's BERT score needs the package bert-score and the model roberta-large of the hub (1.4 GB); run: "
            f"pip install bert-score && hf download roberta-large, or give another scorer, as --scorer rouge_l: {error}"
        ) from error


def edit_similarity(answer: str, reference: str) -> float:
    """LongBench's of a line of code: the answer's first line without a backquote or a comment, by `difflib`, which is
    what `fuzzywuzzy` takes where Levenshtein is not installed. In hundredths."""
    lines = answer.lstrip("\n").split("\n")
    code = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    if code == reference:
        return 1.0
    if not code or not reference:
        return 0.0
    return round(100 * SequenceMatcher(None, code, reference).ratio()) / 100


def segmented(text: str) -> list[str]:
    """The words of a Chinese text. Raises `MissingExtra` without jieba."""
    with needs_extra("bench", "the score of a Chinese task"):
        import jieba

    jieba.setLogLevel("WARNING")  # it tells of its dictionary
    return list(jieba.cut(text))


def _f1(answer: Sequence[str], reference: Sequence[str]) -> float:
    same = (Counter(answer) & Counter(reference)).total()
    if not same:
        return 0.0
    precision, recall = same / len(answer), same / len(reference)
    return 2 * precision * recall / (precision + recall)


def _normalized(text: str) -> str:
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION))


def _compact(text: str) -> str:
    return "".join(text.lower().translate(_NO_CHINESE_PUNCTUATION).split())


def _sentences(text: str) -> list[list[str]]:
    return [" ".join(one.split()).split(" ") for one in text.split(".") if one]


def _rouge_l(answer: str, reference: str) -> tuple[float, float]:
    """Precision and recall."""
    answers, references = _sentences(answer), _sentences(reference)
    if not answers or not references:
        return 0.0, 0.0
    common: set[str] = set()
    for reference_words in references:
        for answer_words in answers:
            common.update(reference_words[at] for at in _common(reference_words, answer_words, operator.gt))
    precision, recall = (len(common) / len({word for one in side for word in one}) for side in (answers, references))
    return precision, recall


def _common(one: Sequence[str], other: Sequence[str], drops_one: Callable[[int, int], bool]) -> Iterable[int]:
    """Places in `one` of a longest common subsequence. drops_one: which of several is read out, from the lengths
    without the last item of `one`, and of `other`; both packages choose, and the choice shows in their scores."""
    lengths = [[0] * (len(other) + 1)]
    for item in one:
        above, row = lengths[-1], [0]
        for at, against in enumerate(other):
            row.append(above[at] + 1 if item == against else max(above[at + 1], row[at]))
        lengths.append(row)
    i, j, places = len(one), len(other), []
    while i and j:
        if one[i - 1] == other[j - 1]:
            i, j = i - 1, j - 1
            places.append(i)
        elif drops_one(lengths[i - 1][j], lengths[i][j - 1]):
            i -= 1
        else:
            j -= 1
    return places
