"""The common parts of the files of all engines: an exported prefix, and the file's description of itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any, Final

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor
from transformers import DynamicCache

from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.identity import digest
from kvshelf.artifact.shape import LayerShape
from kvshelf.engine.engine import Engine
from kvshelf.errors import InvalidRequest, PolicyUnsupported

FORMAT: Final = "kvshelf.engine-file/1"

DTYPES: Final = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

_ROTATIONS: Final = ("default", "llama3")
"""Kinds of RoPE that both engines compute as transformers does, as was tried. YaRN's factor has other places there."""

_MARK: Final = "question-of-the-user"


@dataclass(frozen=True, eq=False)
class Prefix:
    """A cache as an ordinary prefix of K tokens, on the CPU.

    layers: keys and values of each, `[kv_heads, K, D]`, in the file's dtype. token_ids: K of them, the document's where
    every token of it has its entry, otherwise stand-ins. about: the file's description, of JSON types.
    """

    layers: Sequence[tuple[Tensor, Tensor]]
    token_ids: Sequence[int]
    about: dict[str, Any]

    @property
    def entries(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class EngineFile:
    """A file of an engine, to be written once. nbytes: of all its pieces."""

    nbytes: int
    pieces: Iterable[memoryview | bytes]


def prefix_of(
    engine: Engine, cache: CompressedCache, *, of: str, types: Iterable[str], dtype: str | None, document: Sequence[int]
) -> Prefix:
    """The prefix in a file. of: the engine's name. types: of models, as transformers names them, that it is known to
    compute alike. dtype: one of `DTYPES`; None: the cache's. document: its token ids, if known.

    Raises as `Engine.export`, `PolicyUnsupported` for another model, and `InvalidRequest` for a dtype that the numbers
    do not fit.
    """
    require_alike(engine, of, types)
    if dtype is not None and dtype not in DTYPES:
        raise InvalidRequest(f"dtype is {dtype!r}; one of {', '.join(DTYPES)}", param="dtype")
    past = engine.export(cache)
    layers = layers_of(past, of, None if dtype is None else DTYPES[dtype])
    # All images have the same tokens: stand-ins tell the caches apart.
    whole = not cache.identity.images and len(document) == past.get_seq_length() == cache.num_tokens
    ids = list(document) if whole else _stand_ins(cache, past.get_seq_length(), engine.model.config.vocab_size)
    return Prefix(layers, ids, _about(engine, cache, of, len(ids), layers[0][0].dtype, stand_ins=not whole))


def layers_of(past: DynamicCache, of: str, dtype: torch.dtype | None) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of each layer of an exported cache, `[kv_heads, K, D]`, on the CPU. dtype: None: the cache's.
    Raises as `prefix_of`."""
    if type(past) is not DynamicCache or not past.get_seq_length():
        raise _unsupported(of, "it is no plain list of keys and values", "policy")
    dtype = past.layers[0].keys.dtype if dtype is None else dtype
    return [
        (_cast(layer.keys[0], dtype, index, "keys"), _cast(layer.values[0], dtype, index, "values"))
        for index, layer in enumerate(past.layers)
    ]


def require_alike(engine: Engine, of: str, types: Iterable[str]) -> None:
    """Raises `PolicyUnsupported` for a model that an engine is not known to compute as transformers does."""
    config = engine.model.config
    if config.model_type not in (known := sorted(types)):
        raise _unsupported(
            of, f"models of the type {config.model_type!r} were not compared with {of}'s", "model", known
        )
    rotation = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rotation not in _ROTATIONS:
        raise _unsupported(of, f"its RoPE of the kind {rotation!r} was not compared with {of}'s", "model", _ROTATIONS)
    for index, layer in enumerate(engine.passes.layer_shapes):
        if not layer.kv_heads or layer != LayerShape(layer.kv_heads, layer.key_dim, layer.value_dim, layer.dtype):
            raise _unsupported(of, f"layer {index} has a window, chunks, latents, states or no keys", "model")


def _unsupported(of: str, reason: str, param: str, known: Sequence[str] = ()) -> PolicyUnsupported:
    those = f" (known: {', '.join(known)})" if known else ""
    return PolicyUnsupported(f"the cache cannot become a file of {of}: {reason}{those}", param=param)


def _cast(states: Tensor, dtype: torch.dtype, index: int, name: str) -> Tensor:
    cast = states.to("cpu", dtype)
    if not bool(cast.isfinite().all()):
        raise InvalidRequest(
            f"the {name} of layer {index} reach {float(states.abs().max()):.3g}, which {dtype} does not hold; take "
            "dtype bfloat16 or float32",
            param="dtype",
        )
    return cast


def _stand_ins(cache: CompressedCache, count: int, vocabulary: int) -> list[int]:
    """Token ids in the places of entries. They differ from cache to cache: engines find their prefixes by tokens, and
    would take equal ones for the same document."""
    seed = digest("kvshelf.stand-ins", cache.identity.content(), cache.codec)
    ids: list[int] = np.random.default_rng(int(seed, 16)).integers(vocabulary, size=count).tolist()
    return ids


def _about(
    engine: Engine, cache: CompressedCache, of: str, entries: int, dtype: torch.dtype, *, stand_ins: bool
) -> dict[str, Any]:
    identity = cache.identity
    model = {name: value for name, value in asdict(identity.model).items() if name != "attention"}
    norms = norms_digest(_norms(engine), identity.model.dtype)
    about: dict[str, Any] = {
        "format": FORMAT,
        "kvshelf": version("kvshelf"),
        "engine": of,
        "dtype": str(dtype).removeprefix("torch."),
        "entries": entries,
        "stand_ins": stand_ins,
        "document": {"digest": identity.document, "tokens": cache.num_tokens},
        "policy": identity.policy,
        "codec": cache.codec,
        "model": model | {"fingerprint": identity.model.fingerprint(), "layers": len(cache.layers), "norms": norms},
    }
    if engine.text is not None:
        before, _, after = engine.text.decode(engine.encode_query(cache, _MARK)).partition(_MARK)
        decoder = engine.text.decoder()
        tokens = [decoder.id_to_token(id) or "" for id in range(decoder.get_vocab_size())]
        about["question"] = {"before": before, "after": after}
        about["model"]["vocabulary"] = {"size": len(tokens), "digest": vocabulary_digest(tokens)}
    return about


def _norms(engine: Engine) -> Iterator[np.ndarray]:
    base: Any = engine.model.base_model
    for layer in base.layers:
        yield layer.input_layernorm.weight.detach().float().cpu().numpy()
        yield layer.post_attention_layernorm.weight.detach().float().cpu().numpy()
    yield base.norm.weight.detach().float().cpu().numpy()


def norms_digest(norms: Iterable[np.ndarray], dtype: str) -> str:
    """Hex digest of the norms' weights, of each layer's two and the last, rounded to a dtype. No quantization changes
    them, so models with equal norms have the same weights."""
    hasher = blake3()
    for norm in norms:
        rounded = torch.from_numpy(np.ascontiguousarray(norm, np.float32)).to(DTYPES[dtype]).float()
        hasher.update(rounded.numpy().astype("<f4").tobytes())
    return hasher.hexdigest(length=20)


def vocabulary_digest(tokens: Iterable[str]) -> str:
    """Hex digest of a vocabulary in the order of its ids."""
    return digest("kvshelf.vocabulary", *tokens)


def raw(states: Tensor) -> memoryview:
    """The bytes of a tensor, little-endian, in the order of its indices."""
    flat: Any = states.flatten().view(torch.uint8).numpy()
    return memoryview(flat)
