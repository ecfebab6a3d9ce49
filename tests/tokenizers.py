"""Tokenizers of the kinds that people run, small: byte-level BPE with marks that are not flagged special, and those of
SentencePiece, which write a space before words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvshelf.model.source import bundled_folder

MARKS: Final = (
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "<\uff5cUser\uff5c>",
)
SPECIAL: Final = ("<|im_start|>", "<|im_end|>")
_LETTERS: Final = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:;!?<>|/_-{}[]()'\"\n"


def byte_level() -> PreTrainedTokenizerFast:
    """The bundled one with these marks."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(bundled_folder("kvshelf-tiny"))
    tokenizer.add_tokens([AddedToken(mark, special=mark in SPECIAL, normalized=False) for mark in MARKS])
    return tokenizer


def _sentence_piece(change: Callable[[Tokenizer], None]) -> PreTrainedTokenizerFast:
    words = ["▁the", "▁book", "▁is", "▁on", "he", "oo", "▁t", "▁b", "bo", "th"]
    vocabulary = ["<unk>", "<s>", "</s>", *MARKS, "▁", *_LETTERS, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    ids = {token: at for at, token in enumerate(dict.fromkeys(vocabulary))}
    merges = [("h", "e"), ("o", "o"), ("▁", "t"), ("▁", "b"), ("b", "o"), ("t", "h"), ("▁t", "he"), ("▁b", "oo")]
    ids |= {"▁boo": len(ids)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    change(tokenizer)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    added = [AddedToken(mark, special=mark in SPECIAL, normalized=False) for mark in ("<s>", "</s>", *MARKS)]
    tokenizer.add_tokens(added)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def prepend() -> PreTrainedTokenizerFast:
    """As Llama 2's and Mistral 7B's: a space before the text between two marks, too."""

    def change(tokenizer: Tokenizer) -> None:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])

    return _sentence_piece(change)


def metaspace(scheme: str) -> PreTrainedTokenizerFast:
    """As TinyLlama's and Phi-3's, and newer ones: a space before each such text, before the first alone, or before
    none."""

    def change(tokenizer: Tokenizer) -> None:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)

    return _sentence_piece(change)


def unigram() -> PreTrainedTokenizerFast:
    """Its model finds control tokens in text, because they are words of its vocabulary."""
    words = [*MARKS, "<s>", "</s>", "▁", *_LETTERS, "▁the", "▁book"]
    tokenizer = Tokenizer(models.Unigram([("<unk>", -20.0), *((word, -1.0) for word in words)], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first")
    tokenizer.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in ("<s>", "</s>", *MARKS)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


KINDS: Final[dict[str, Callable[[], PreTrainedTokenizerFast]]] = {
    "byte level": byte_level,
    "prepend": prepend,
    "metaspace always": lambda: metaspace("always"),
    "metaspace first": lambda: metaspace("first"),
    "unigram": unigram,
}
