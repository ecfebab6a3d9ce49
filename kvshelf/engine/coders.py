"""Caches under the codecs of one model: the coders of codec klt, by their transforms."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import cached_property

from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.codecs import BITS, Codec
from kvshelf.artifact.coder import CacheDecoder, Coder
from kvshelf.artifact.growth import plain_again
from kvshelf.artifact.identity import Identity
from kvshelf.artifact.opened.arriving import ArrivingCache
from kvshelf.artifact.transforms import Transforms
from kvshelf.engine.exclusions import Combination, require_possible, rope_to_undo
from kvshelf.engine.forward.passes import Passes
from kvshelf.errors import BlobError, InvalidRequest, ModelMismatch, PolicyUnsupported
from kvshelf.kernels import ans
from kvshelf.model import calibration


class Coders:
    """Encodes and decodes the caches of one model."""

    def __init__(self, passes: Passes) -> None:
        self._passes = passes
        self._facts = passes.facts
        self._known: dict[str, Coder] = {}

    def encoded(self, cache: CompressedCache, codec: str) -> CompressedCache:
        """`cache` under a codec, also under klt, which needs this model's transforms. Raises as
        `CompressedCache.encoded`, and `PolicyUnsupported` where this model has no transforms."""
        return cache.encoded(codec, self.own if Codec.parse(codec).name == "klt" else None)

    def decoded(self, cache: CompressedCache) -> CompressedCache:
        """A cache under codec klt or lossless, or of residuals, with plain keys and values; any other as it is. Raises
        as `decoder_of`."""
        return cache.decoded(self.decoder_of(cache)) if cache.coded else cache

    def decoder_of(self, cache: CompressedCache | ArrivingCache) -> CacheDecoder | None:
        """Makes the plain rows of a cache under codec klt or of residuals; None for any other. Raises as `of`,
        `PolicyUnsupported` for residuals where policy kvdirect is refused, and `BlobError` for residuals of another
        width than the model's."""
        if not cache.projected:
            return self.of(cache.identity)
        require_possible(Combination(facts=self._facts, residuals=True))
        if widths := cache.residual_widths - {self._facts.residual_width}:
            raise BlobError(
                f"the cache has residuals of {min(widths)} numbers; its model makes {self._facts.residual_width}",
                reason="wrong_shape",
            )
        return self._passes.projection

    def recoded(self, cache: CompressedCache, codec: str) -> CompressedCache:
        """A cache that nothing was appended to, under a codec in place of its own. From `none` and `lossless` it is
        that of a creation under this codec, to the bit; from another the errors of both codecs add up. Raises as
        `encoded`, and `InvalidRequest` for a cache that cannot be coded a second time."""
        present = Codec.parse(cache.codec)
        if present.name == "lossless":
            cache = replace(cache.decoded(), codec="none")
        elif present.name in BITS:
            if cache.projected:
                raise InvalidRequest(f"residuals under {cache.codec} are not coded a second time", param="codec")
            layers = tuple(plain_again(layer, cache.identity.protect) for layer in cache.layers)
            cache = replace(cache, layers=layers, codec="none")
        return self.encoded(cache, codec)

    def of(self, cache: Identity) -> Coder | None:
        """The coder of a cache under codec klt; None for any other. Raises as `with_transforms`."""
        return self.with_transforms(cache.transforms) if cache.transforms else None

    @cached_property
    def own(self) -> Coder:
        """Encodes this model's caches under codec klt. Raises `PolicyUnsupported` without transforms, and where the
        model's RoPE cannot be undone."""
        facts = self._facts
        rope_to_undo(facts)
        return self._learned(calibration.find_transforms(facts.identity, facts.folder, self._passes.layer_shapes))

    @property
    def has_own(self) -> bool:
        """Whether `own` raises nothing."""
        try:
            return bool(self.own)
        except PolicyUnsupported:
            return False

    @property
    def writes_klt(self) -> bool:
        """Whether caches can be made under codec klt here."""
        return ans.can_encode() and self.has_own

    def with_transforms(self, digest: str) -> Coder:
        """The coder with the transforms of this digest. Raises `ModelMismatch` if they are unknown (see `learn`)."""
        if digest not in self._known:
            with suppress(PolicyUnsupported):
                self.own  # noqa: B018 - loads this model's own
        if digest not in self._known:
            raise ModelMismatch(
                f"the cache is under codec klt with the transforms {digest[:16]}, and they are neither those of "
                f"{self._facts.name!r} here nor on the shelf; fetch their file, or compress the document again",
                transforms=digest,
            )
        return self._known[digest]

    def knows(self, digest: str) -> bool:
        try:
            return bool(self.with_transforms(digest))
        except ModelMismatch:
            return False

    def learn(self, transforms: bytes) -> None:
        """Take a file of transforms, so that caches under them can be read. Raises `InvalidRequest` and
        `ModelMismatch`."""
        learned = Transforms.from_bytes(transforms)
        learned.require_of(self._facts.identity, self._passes.layer_shapes)
        self._learned(learned)

    def _learned(self, transforms: Transforms) -> Coder:
        rope = rope_to_undo(self._facts)
        return self._known.setdefault(transforms.digest, Coder(transforms, rope.rotate, rope.unrotate))
