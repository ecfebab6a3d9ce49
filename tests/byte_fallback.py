"""A tokenizer of the kind of Llama 2 and Mistral: what it has no word for is spelled in bytes, one token for each."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models

WORDS = (
    "a",
    "b",
    "▁",
    *(f"▁{first}{second}" for first in "bcdfghjklmnpqrstvwxz" for second in ("al", "em", "ir", "on", "us")),
)


def byte_fallback_tokenizer() -> Tokenizer:
    """Of 3 special tokens, 256 bytes, and the words."""
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    ids = {token: i for i, token in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in vocabulary[:3]])
    return tokenizer


def ids_of(tokenizer: Tokenizer, *tokens: str | bytes) -> list[int]:
    """The ids of words, and of each byte of what is given as bytes."""
    found = []
    for token in tokens:
        names = [token] if isinstance(token, str) else [f"<0x{byte:02X}>" for byte in token]
        found += [tokenizer.token_to_id(name) for name in names]
    assert None not in found
    return found
