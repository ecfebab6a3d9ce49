"""The bundled model really retrieves, through the product's own path: compress, attach, answer."""

from __future__ import annotations

from tokenizers import Tokenizer
from transformers import AutoTokenizer

from kvshelf.model.source import bundled_folder
from kvshelf_bench.quality.retrieval import measure_cell
from tests.amounts import amount, in_turn


@in_turn({"task": ["needle", "multikey"], "haystack": ["filler", "prose"]})
def test_it_finds_facts_in_a_long_document(tiny, task, haystack):
    """By luck a value of three digits or more is right once in 900: all but one of them never."""
    documents = amount(5, 12)
    cell = measure_cell(tiny, task, haystack, 2048, documents, compress={"policy": "full"})
    assert cell.exact >= documents - 1


def test_keydiff_keeps_what_matters_among_filler(tiny):
    cell = measure_cell(tiny, "needle", "filler", 1024, 12, compress={"policy": "keydiff", "compression_ratio": 0.75})
    assert cell.exact >= 10


def test_its_tokenizer_is_the_file(tiny):
    """transformers rebuilds the tokenizers of some architectures, and then numbers fall into single digits."""
    folder = bundled_folder("kvshelf-tiny")
    auto, file = AutoTokenizer.from_pretrained(folder), Tokenizer.from_file(f"{folder}/tokenizer.json")
    for text in ("The code is 482913.", "naïve 日本語 🙂\n\n  x", "a\tb\r\n1234 56"):
        ids = file.encode(text, add_special_tokens=False).ids
        assert auto(text, add_special_tokens=False).input_ids == ids == tiny.text.document(text, "plain").token_ids
        assert file.decode(ids) == text
    assert file.encode("482913").tokens == ["482", "913"]


def test_it_accepts_any_text(tiny):
    text = "".join(chr(code) for code in range(1, 0x3000, 7)) + "🙂"
    ids = tiny.text.document(text, "plain").token_ids
    assert tiny.text.decoder().decode(ids, skip_special_tokens=False) == text


def test_it_is_small(tiny):
    from pathlib import Path

    folder = Path(bundled_folder("kvshelf-tiny"))
    assert sum(file.stat().st_size for file in folder.iterdir()) < 8 * 2**20
    assert tiny.max_tokens == 16_384
