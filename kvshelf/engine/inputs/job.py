"""Documents that are ready to be compressed, and the levels to compress them to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.coder import CacheDecoder, Coder
from kvshelf.artifact.identity import Identity
from kvshelf.artifact.packed import Rotate
from kvshelf.artifact.records import LayerRecord
from kvshelf.artifact.transforms import Transforms
from kvshelf.engine.attention.attachment import Attachment
from kvshelf.engine.soft import Soft
from kvshelf.kernels.transfer import upload
from kvshelf.methods.policies import Policy
from kvshelf.methods.policies.base import Absorber
from kvshelf.methods.policies.budgets import Budget
from kvshelf.methods.policies.view import DocumentView, ProbePass
from kvshelf.model.images import PlacedImage


@dataclass(frozen=True, eq=False)
class Parent:
    """A stored cache to which tokens are appended. coder: of codec klt, with the transforms of the cache; None under
    any other codec. decoder: as of `Coders.decoder_of`. devices, rotate: as of an `Attachment`."""

    cache: CompressedCache
    coder: Coder | None
    decoder: CacheDecoder | None
    devices: Sequence[torch.device]
    rotate: Rotate | None

    @cached_property
    def plain(self) -> CompressedCache:
        """The cache with rows that attention can read."""
        return self.cache.decoded(self.decoder) if self.cache.coded else self.cache

    @property
    def layers(self) -> Sequence[LayerRecord]:
        """The layers of `plain`, where the model's layers are."""
        return self.plain.to(self.devices).layers

    @cached_property
    def document(self) -> Attachment:
        """The cache as the model's layers read it."""
        return Attachment(self.plain, self.devices, self.rotate)


@dataclass(frozen=True)
class Job:
    """A checked and tokenized document, ready to be compressed. Its identity is known before any work is done.

    parent: the cache that the document is appended to, if it is. images: of the document.
    """

    document: DocumentView
    policy: Policy
    budget: Budget
    passes: tuple[ProbePass, ...]
    absorber: Absorber | None
    identity: Identity
    parent: Parent | None = None
    images: tuple[PlacedImage, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Of the document, without those of the parent."""
        return self.document.num_tokens

    @property
    def run_tokens(self) -> int:
        """Of the document and the policy's passes behind it."""
        return self.num_tokens + sum(len(probe.token_ids) for probe in self.passes)

    @property
    def soft(self) -> Soft | None:
        """The learned tokens of its passes: at most one pass has some."""
        first = self.num_tokens
        for probe in self.passes:
            if probe.soft is not None:
                return Soft(probe.soft.tensors, slice(first, first + len(probe.token_ids)))
            first += len(probe.token_ids)
        return None

    def inputs(self, device: torch.device, measured: Sequence[ProbePass] = ()) -> dict[str, Tensor]:
        """Inputs of one forward pass: ids and positions of the document and of every probe pass behind it. measured:
        more passes behind those of the policy, which the policy does not see."""
        ids, positions = list(self.document.token_ids), list(range(self.num_tokens))
        for probe in (*self.passes, *measured):
            ids += probe.token_ids
            positions += range(probe.first_position, probe.first_position + len(probe.token_ids))
        input_ids, position_ids = upload([torch.tensor([ids]), torch.tensor([positions])], device)
        # Without a mask, transformers would take positions that start again for packed sequences.
        attention_mask = torch.ones_like(input_ids)
        return {"input_ids": input_ids, "position_ids": position_ids, "attention_mask": attention_mask}


@dataclass(frozen=True)
class Level:
    """One compressed form of a document: a job and the codec of its cache (see `kvshelf.artifact.codecs`).

    transforms: those of codec klt. Made by `Compressor.level`.
    """

    job: Job
    codec: str = "none"
    transforms: Transforms | None = None

    @property
    def identity(self) -> Identity:
        """The identity of the encoded cache."""
        return self.job.identity if self.transforms is None else self.transforms.mark(self.job.identity)

    @property
    def keeps_all(self) -> bool:
        """Whether the result is the full cache to the bit; keys and values made of residuals are so up to rounding."""
        policy, whole = self.job.policy, self.job.budget.tokens == self.job.num_tokens
        return self.codec == "none" and whole and not (policy.prunes or policy.has_residuals)

    @property
    def loses_nothing(self) -> bool:
        """Whether the result answers as the full cache of its whole document. Tokens that are appended to a cache may
        not: the cache may have lost entries."""
        return self.keeps_all and self.job.parent is None


def shared(levels: Sequence[Level]) -> list[list[Level]]:
    """Group levels by prefill, in order: levels of one document share a prefill if their probe passes are equal.

    A policy that reads the document chunk by chunk changes what later chunks see, so it has a prefill of its own.
    Policies with different probe passes do not share one either: the passes of one would change last bits of the
    other's scores, and equal requests must give equal bytes.
    """
    groups: list[list[Level]] = []
    for level in levels:
        group = next((group for group in groups if _share(group[0].job, level.job)), None)
        if group is None:
            groups.append([level])
        else:
            group.append(level)
    return groups


def _share(one: Job, other: Job) -> bool:
    whole = one.absorber is None and other.absorber is None
    return one is other or (whole and one.identity.document == other.identity.document and one.passes == other.passes)
