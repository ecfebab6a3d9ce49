"""The least number of tokens of texts: never more than there are, and known without making them all."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer

from kvshelf.model.bounds import ANY_BYTES, PIECE, TokenBound
from kvshelf.model.source import bundled_folder
from tests.timing import least_s

TINY: Tokenizer = AutoTokenizer.from_pretrained(bundled_folder("kvshelf-tiny")).backend_tokenizer


def encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def bound_of(tokenizer: Tokenizer) -> TokenBound:
    return TokenBound.of(tokenizer, lambda text: encoded(tokenizer, text))


def trained(normalizer: object = None, *, unknown: bool = False) -> Tokenizer:
    """By bytes, or by words with one token for all that it does not know."""
    text = ["the lamp burns whale oil", "  ", "한국어 텍스트", "é ǖ Å"] * 9
    if unknown:
        made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        made.pre_tokenizer = pre_tokenizers.Whitespace()
        made.train_from_iterator(text, trainers.WordPieceTrainer(special_tokens=["[UNK]"], show_progress=False))
        return made
    made = Tokenizer(models.BPE())
    made.normalizer = normalizer
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(text, trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False))
    return made


def stripping() -> Tokenizer:
    made = trained()
    made.add_tokens([AddedToken("<x>", rstrip=True)])
    return made


TOKENIZERS = {
    "tiny": TINY,
    "NFC": trained(normalizers.NFC()),
    "strips accents": trained(normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])),
    "drops letters": trained(normalizers.Replace("a", "")),
    "unknown words": trained(unknown=True),
    "a token that takes spaces": stripping(),
}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                "the lamp ",
                "a" * 400,
                " " * 999,
                "\u1112\u1161\u11ab" * 60,
                "u\u0308\u0304" * 50,
                "e\u0301" * 90,
                "😀字",
                "<x>   ",
            ]
        ),
        min_size=1,
        max_size=9,
    )
)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_no_text_has_fewer_tokens(name: str, texts: list[str]) -> None:
    bound = bound_of(TOKENIZERS[name])
    count = sum(len(encoded(TOKENIZERS[name], text)) for text in texts)
    if bound.token_bytes >= ANY_BYTES:  # no number of bytes proves that there is a token
        count = max(count, len("".join(texts).encode()) // ANY_BYTES)
    assert bound.least_by_bytes(texts) <= count
    assert bound.least(texts, count) <= count, "what fits is not refused"


def test_what_bytes_do_not_tell_is_counted_until_it_is_known() -> None:
    """20 times more than fits is counted once over: 4 bytes a token are far from the longest token's 14."""
    pieces: list[int] = []

    def encode(text: str) -> list[int]:
        pieces.append(len(text))
        return encoded(TINY, text)

    bound = TokenBound.of(TINY, encode)
    text = "The quay keeper writes 17 in the ledger. " * 2000  # of some 22,000 tokens
    most = 16_384
    assert len(text) < most * bound.token_bytes
    assert most < bound.least([text], most) < 1.2 * most
    assert (sum(pieces) <= len(text), max(pieces)) == (True, PIECE)
    pieces.clear()
    assert bound.least([text[:8000], text[:8000]], most) <= most, "what cannot be too long is not counted"
    assert pieces == []
    assert bound.least([text[: len(text) // 2]] * 4, most) > most, "together"


def test_bytes_alone_refuse_what_can_never_fit() -> None:
    bound = TokenBound(lambda _: pytest.fail("no token is made"), bound_of(TINY).token_bytes)
    text = "word and " * 7_000_000
    assert bound.least([text], 16_384) > 16_384
    assert least_s(lambda: bound.least([text], 16_384)) < 2
