"""Tokens to text where some are bytes that are no text: nothing is lost, nothing comes twice, nothing is raised."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer

from kvshelf.engine.decode.detokenizer import Detokenizer
from kvshelf.engine.engine import Engine
from tests.byte_fallback import WORDS, byte_fallback_tokenizer, ids_of

NO_CHARACTER = "\ufffd"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_fallback_tokenizer()


def texts(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """What came with each token, and with the end."""
    text = Detokenizer(tokenizer, skip_special_tokens=True)
    return [*map(text.push, ids), text.rest()]


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (["▁bal", "é".encode(), "▁gon"], ["bal", "", "é", " gon", ""]),
        (["▁bal", "é".encode(), b"\xc3", "a", "▁gon"], ["bal", "", "é", "", "�a", " gon", ""]),
        (["▁bal", "é".encode(), b"\xc3", "▁gon"], ["bal", "", "é", "", "� gon", ""]),  # its space is no first one
        (["▁bal", "é".encode(), b"\xc3", "</s>", "a"], ["bal", "", "é", "", "", "�a", ""]),
        (["▁bal", "😀".encode(), "😀".encode()[:2], "a"], ["bal", "", "", "", "😀", "", "", "��a", ""]),
        (["▁bal", b"\xc3"], ["bal", "", "�"]),
        ([b"\xe6\x97"], ["", "", "��"]),
        (["▁", "▁", b"\xc3", "▁bal"], ["", " ", "", "� bal", ""]),
    ],
)  # fmt: skip
def test_bytes_that_are_no_text_are_written_as_such_and_what_follows_is_text(tokenizer, tokens, expected):
    assert texts(tokenizer, ids_of(tokenizer, *tokens)) == expected


def test_what_the_tokenizer_reads_without_fault_is_its_text(tokenizer):
    """Words, characters of one to four bytes, and tokens that are not shown."""
    choices = [*WORDS, *("x é日🎉".encode()[i:j] for i, j in ((0, 1), (2, 4), (4, 7), (7, 11))), "<s>", "</s>"]
    for seed in range(100):
        ids = ids_of(tokenizer, *random.Random(seed).choices(choices, k=60))
        assert "".join(texts(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


def test_no_word_among_any_bytes_is_lost_or_comes_twice(tokenizer):
    """Bytes of runs of any length, 10 words: all of them in their order, and no text of more bytes than were given."""
    for seed in range(100):
        rng = random.Random(seed)
        tokens: list[str | bytes] = ["a"]
        for word in rng.choices([word for word in WORDS if len(word) > 2], k=10):
            tokens += [
                bytes(rng.choices((0xC3, 0xA9, 0xE6, 0x97, 0xA5, 0x80, 0xFF), k=rng.choice((1, 2, 5, 40)))),
                word,
            ]
        found = "".join(texts(tokenizer, ids_of(tokenizer, *tokens)))
        words = "".join(token for token in tokens if isinstance(token, str))
        assert "".join(c for c in found if c.isascii()) == words.replace("▁", " ")
        given = sum(len(token) for token in tokens if isinstance(token, bytes))
        assert sum(not c.isascii() for c in found) <= given


def test_a_character_behind_bytes_that_are_none_is_whole(tiny: Engine):
    """However many bytes are let go before it."""
    assert tiny.text is not None
    decoder = tiny.text.decoder()
    bad, *_ = tiny.text.encode("日")
    for count in range(40):
        found = "".join(texts(decoder, [bad] * count + tiny.text.encode("🎉 end")))
        assert found == NO_CHARACTER * count + "🎉 end"


def test_bytes_without_end_come_while_they_do(tokenizer):
    """A stream that held them all would decode them all again with each."""
    (byte,) = ids_of(tokenizer, b"\xc3")
    text = Detokenizer(tokenizer, skip_special_tokens=True)
    assert 50 < len("".join(text.push(byte) for _ in range(100))) < 100
    assert "".join(texts(tokenizer, [byte] * 20_000)) == NO_CHARACTER * 20_000


def test_tokens_that_are_not_shown_come_between_words(tokenizer):
    """However many: the space of the word behind them stays."""
    for count in (1, 15, 16, 17, 40):
        assert "".join(texts(tokenizer, ids_of(tokenizer, "▁bal", *["</s>"] * count, "▁gon"))) == "bal gon"
