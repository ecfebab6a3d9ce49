"""The identity of a compressed cache: everything that its content address is computed over."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

import msgpack
from blake3 import blake3

from kvshelf.errors import InvalidRequest, ModelMismatch

Layout = Literal["chat", "plain"]
Boundary = Literal["text", "document", "after_system", "after_user", "after_assistant"]
"""Where the cached tokens end: after plain text, inside the user turn of the document, or after a whole turn."""

RopeMode = Literal["baked", "pre"]
"""Whether a layer's keys are rotated to the positions of their tokens, or not rotated yet."""

_OPTIONAL = ("date", "variables", "protect", "images", "image_encoder")
"""Fields of an identity that its JSON leaves out where they are empty."""

MAX_PROTECTED_SPANS = 1024
"""Of a document. Limited, because its blob's header has them."""

MAX_IMAGES = 32
"""Of a document, for the same reason."""

_LINK_HINT = " Under --engine llama.cpp, a quantization of its weights can be linked to them: kvshelf models link."

DIGEST_BYTES = 20
"""Length of every digest that becomes part of an id: 160 bits, so that no two identities ever collide by chance."""


def digest(domain: str, *parts: bytes | str, key: bytes | None = None) -> str:
    """Hex BLAKE3 of `parts`, each prefixed with its length, under a domain name.

    The length prefixes keep ("ab", "c") apart from ("a", "bc"); the domain keeps equal parts with different meanings
    apart. With `key` (32 bytes) the hash is keyed: only the key's holder can test a guess of the content against an id.
    """
    hasher = blake3(key=key) if key is not None else blake3()
    for part in (domain, *parts):
        data = part.encode() if isinstance(part, str) else part
        hasher.update(len(data).to_bytes(8, "little"))
        hasher.update(data)
    return hasher.hexdigest(length=DIGEST_BYTES)


def canonical_json(value: Any) -> str:
    """The canonical JSON text of a value: sorted keys, no spaces, no NaN. Equal values give equal text everywhere."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def canonical_msgpack(value: Any) -> bytes:
    """The canonical msgpack of a value: keys of every map sorted, shortest integers, 64-bit floats. For long texts it
    takes a third of the time that JSON takes."""
    data: bytes = msgpack.packb(_sorted(value), use_bin_type=True)
    return data


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [item if type(item) is int else _sorted(item) for item in value]  # most of a header: entries of heads
    return value


@dataclass(frozen=True)
class ModelIdentity:
    """Everything in a model that the KV of a prefill and the text around the document depend on.

    `weights`, `tokenizer` and `template` are hex digests, the latter two "" where the engine has none. `rope` and
    `attention` are canonical JSON, so that people can read a mismatch. `name` is for people and is never compared.
    """

    name: str = field(compare=False)
    weights: str
    dtype: str
    rope: str
    attention: str
    tokenizer: str
    template: str

    def fingerprint(self) -> str:
        """Hex digest of the compared fields."""
        return digest("kvshelf.model", *(getattr(self, f.name) for f in fields(self) if f.compare))

    @property
    def unlinked(self) -> ModelIdentity:
        """The identity of the model alone, without links."""
        return self

    def links(self, made_under: ModelIdentity) -> bool:  # noqa: ARG002
        """Whether caches of this other model are read because of a link."""
        return False

    def require_match(self, made_under: ModelIdentity) -> None:
        """Raise `ModelMismatch` unless a cache made under `made_under` may be attached to this model.

        A side that has no tokenizer works with token ids only and cannot disagree about text.
        """
        for f in fields(ModelIdentity):
            value, cache_value = getattr(self, f.name), getattr(made_under, f.name)
            textual = f.name in ("tokenizer", "template") and "" in (self.tokenizer, made_under.tokenizer)
            if f.compare and value != cache_value and not textual:
                raise ModelMismatch(
                    f"the cache was made under {made_under.name!r} (fingerprint {made_under.fingerprint()[:16]}) and "
                    f"cannot be attached to {self.name!r} (fingerprint {self.fingerprint()[:16]}): {f.name} differs, "
                    f"{cache_value[:80]!r} against {value[:80]!r}. Load the model it was made with, or compress the "
                    "document again with this one." + (_LINK_HINT if f.name == "weights" else ""),
                    cache_fingerprint=made_under.fingerprint(),
                    model_fingerprint=self.fingerprint(),
                    field=f.name,
                )


@dataclass(frozen=True)
class LinkedIdentity(ModelIdentity):
    """The identity of a model that also answers from caches of other models, because the agreement was measured.
    linked: the agreement by the other's fingerprint. The model's own caches do not depend on it."""

    linked: Mapping[str, float] = field(default_factory=dict, compare=False)

    @property
    def unlinked(self) -> ModelIdentity:
        return ModelIdentity(**{field.name: getattr(self, field.name) for field in fields(ModelIdentity)})

    def links(self, made_under: ModelIdentity) -> bool:
        return made_under.fingerprint() in self.linked.keys() - {self.fingerprint()}

    def require_match(self, made_under: ModelIdentity) -> None:
        if not self.links(made_under):
            super().require_match(made_under)

    def require_own(self, made_under: ModelIdentity) -> None:
        """As `require_match`, for what a link does not allow: to go on with a cache."""
        if self.links(made_under):
            raise ModelMismatch(
                f"the cache was made under {made_under.name!r}, and {self.name!r} only answers from it, by their link; "
                "nothing can be put behind it here, because a cache is of one model from its first token to its last",
                cache_fingerprint=made_under.fingerprint(),
                model_fingerprint=self.fingerprint(),
                field="weights",
            )
        super().require_match(made_under)


@dataclass(frozen=True)
class Identity:
    """Everything the bytes of a compressed cache depend on, but for the device and the versions of libraries.

    `document` is a digest of the token ids, never the text. `prefill` names the prefill mode ("whole"), because a
    chunked prefill gives other numbers. `policy_params` are the parameters as used, after defaults were shrunk to the
    document. `budget_tokens` is the mean number of entries kept per layer and KV head, `compression_ratio` the
    requested fraction to remove. `transforms` is the digest of those that the codec `klt` encoded it by, "" under any
    other codec. `parent` is the digest of the cache that the document was appended to (`as_parent`), "" for a document
    that was compressed as one. Then the policy and what is said of it are those of the appended tokens (of all, where
    `prefill` is not "appended"), `num_tokens` and `budget_tokens` count those of the parent, too, and `document`
    follows from its document and the tokens. `date` is the day, as YYYY-MM-DD, that a chat template wrote into the
    document's tokens, "" where it writes none; `document` is the same whatever the day. `variables` are those that the
    chat template was told and that changed what it wrote into these tokens. `protect` are spans of the document's
    tokens, each with the place behind its last, ascending and apart: every policy keeps them, and no codec rounds them.
    `images` are the spans of tokens that are images, each with the hex SHA-256 of its pixels, of which `document` is a
    digest, too; `image_encoder` is the digest of what read them.
    """

    model: ModelIdentity
    document: str
    num_tokens: int
    layout: Layout
    boundary: Boundary
    prefill: str
    policy: str
    policy_version: int
    policy_params: Mapping[str, Any]
    budget_tokens: int
    compression_ratio: float
    probe: str = ""
    expected_questions: tuple[str, ...] = ()
    transforms: str = ""
    parent: str = ""
    date: str = ""
    variables: Mapping[str, Any] = field(default_factory=dict)
    protect: tuple[tuple[int, int], ...] = ()
    images: tuple[tuple[int, int, str], ...] = ()
    image_encoder: str = ""

    def __post_init__(self) -> None:
        # 0 and 0.0 are equal and must have one content address; JSON and msgpack write them differently.
        object.__setattr__(self, "compression_ratio", float(self.compression_ratio))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, for the blob header and the manifest, without empty fields of `_OPTIONAL`."""
        values = asdict(self) | {
            "policy_params": dict(self.policy_params),
            "expected_questions": list(self.expected_questions),
            "variables": dict(self.variables),
            "protect": [list(span) for span in self.protect],
            "images": [list(image) for image in self.images],
        }
        return {name: value for name, value in values.items() if value or name not in _OPTIONAL}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Identity:
        """The inverse of `to_dict`. Raises `TypeError` on a missing or unknown field."""
        values = dict(data)
        values["model"] = ModelIdentity(**values["model"])
        values["expected_questions"] = tuple(values["expected_questions"])
        values["protect"] = tuple((first, end) for first, end in values.get("protect") or ())
        values["images"] = tuple((first, end, pixels) for first, end, pixels in values.get("images") or ())
        return cls(**values)

    def content(self) -> str:
        """Canonical JSON of the compared fields; content addresses are computed over it."""
        data = self.to_dict()
        del data["model"]["name"]
        return canonical_json(data)

    def as_parent(self, codec: str) -> str:
        """Hex digest of a cache, as the identities of those name it that were made by appending to it. codec: its
        canonical text. The same in every home, unlike the cache's id."""
        return digest("kvshelf.parent", self.content(), codec)

    def behind(self, parent: Identity, codec: str, kept_tokens: int | None, token_ids: bytes) -> Identity:
        """This identity, of tokens as a document, for the same tokens appended to the cache `parent` under `codec`.
        kept_tokens: of that cache; None: its entries and the new ones share a budget. token_ids: int64, little-endian.
        """
        return replace(
            self,
            document=digest("kvshelf.appended", parent.document, token_ids),
            num_tokens=parent.num_tokens + self.num_tokens,
            prefill=self.prefill if kept_tokens is None else "appended",
            budget_tokens=self.budget_tokens + (kept_tokens or 0),
            protect=parent.protect + tuple((a + parent.num_tokens, b + parent.num_tokens) for a, b in self.protect),
            parent=parent.as_parent(codec),
            images=parent.images,
            image_encoder=parent.image_encoder,
        )

    def cache_id(self, *, key: bytes, tenant: str, codec: str, format_major: int) -> str:
        """`kvs_...`, the content address of this artifact in one home, for one tenant, under one codec.

        Raises `InvalidRequest` for parameters or text that have no JSON form.
        """
        try:
            content = self.content().encode()
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"the identity of the cache cannot be written down: {error}") from error
        return "kvs_" + digest("kvshelf.cache", content, tenant, codec, str(format_major), key=key)

    def document_id(self, *, key: bytes, tenant: str) -> str:
        """`doc_...`, shared by every cache of one document, whatever the policy or model weights."""
        return "doc_" + digest(
            "kvshelf.document", tenant, self.document, self.model.tokenizer, self.model.template, key=key
        )
