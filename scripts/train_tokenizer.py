"""Build the tokenizer of kvshelf-tiny: byte-level BPE in which every number of up to three digits is one token.

    python scripts/train_tokenizer.py [FOLDER]

Merges of letters are learned from generated documents with the digits taken out; those of digits are added by rule.
The pre-tokenizer cuts numbers into groups of three from the left, as Llama 3 does. All 256 bytes are in the vocabulary,
so any text survives a round trip. The result does not depend on the machine or the time: running it again changes
nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from kvshelf.samples.tasks import HAYSTACKS, make_facts, write_document

MODEL_FOLDER: Final = Path(__file__).resolve().parents[1] / "kvshelf" / "model" / "bundled" / "kvshelf-tiny"
SPECIAL_TOKENS: Final = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
NUM_MERGES: Final = 2048
NUM_DOCUMENTS: Final = 2000
SPLIT: Final = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


def training_texts() -> Iterator[str]:
    """Documents and questions of every kind, without digits."""
    rng = random.Random("tokenizer")
    for i in range(NUM_DOCUMENTS):
        facts = make_facts(rng, [6] * 12)
        document = write_document(rng, facts, HAYSTACKS[i % 20 != 0], 300, lambda text: len(text.split()))
        yield " ".join(f" {fact.thing}" for fact in make_facts(rng, [6] * 60))  # no name may be rare
        yield re.sub(r"\d+", "", document.text)
        yield re.sub(r"\d+", "", " ".join(question.text for question in document.questions))
        yield "Question: Answer: System: Repeat the document."


def pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    """Words with the space before them, numbers in threes, punctuation, line breaks."""
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def learned_merges() -> list[tuple[str, str]]:
    """The merges of letters, most frequent first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + NUM_MERGES, initial_alphabet=alphabet, show_progress=False, min_frequency=2
    )
    tokenizer.train_from_iterator(training_texts(), trainer)
    return [(first, second) for first, second in json.loads(tokenizer.to_str())["model"]["merges"]]


def digit_merges() -> list[tuple[str, str]]:
    """Every pair and triple of digits; a triple can be reached from either side, whichever pair is joined first."""
    pairs = [(f"{n // 10}", f"{n % 10}") for n in range(100)]
    triples = [f"{n:03d}" for n in range(1000)]
    return pairs + [(t[:2], t[2]) for t in triples] + [(t[0], t[1:]) for t in triples]


def build() -> Tokenizer:
    """Put the vocabulary together: special tokens, bytes, numbers, words."""
    merges = digit_merges() + learned_merges()
    pieces = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def config() -> dict[str, Any]:
    """What `AutoTokenizer` needs beside tokenizer.json; only fields that every transformers 5 knows."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<|pad|>",
        "eos_token": "<|end|>",
        "additional_special_tokens": ["<|system|>", "<|user|>", "<|assistant|>"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 16384,
        "chat_template": CHAT_TEMPLATE,
    }


def main() -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=MODEL_FOLDER)
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config(), indent=2) + "\n", encoding="utf-8")
    print(f"{tokenizer.get_vocab_size()} tokens in {folder}")


if __name__ == "__main__":
    main()
