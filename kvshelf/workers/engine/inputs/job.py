"""A document that is ready to be compressed, and the levels at which it is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvshelf.store.artifact.identity import Identity
from kvshelf.workers.policies import Policy
from kvshelf.workers.policies.base import Absorber
from kvshelf.workers.policies.budgets import Budget
from kvshelf.workers.policies.view import ProbePass, Source


@dataclass(frozen=True)
class Job:
    """A checked and tokenized document, ready to be compressed. Its identity is known before any work is done."""

    source: Source
    policy: Policy
    budget: Budget
    passes: tuple[ProbePass, ...]
    absorber: Absorber | None
    identity: Identity

    @property
    def num_tokens(self) -> int:
        return self.source.num_tokens

    def inputs(self, device: torch.device, measured: Sequence[ProbePass] = ()) -> dict[str, Tensor]:
        """Ids and positions of the document and, behind it, of every probe pass: what one forward pass takes.

        `measured` are passes behind those of the policy, which it does not look at.
        """
        ids, positions = list(self.source.token_ids), list(range(self.num_tokens))
        for probe in (*self.passes, *measured):
            ids += probe.token_ids
            positions += range(probe.first_position, probe.first_position + len(probe.token_ids))
        input_ids = torch.tensor([ids], device=device)
        # With a mask given, transformers does not take positions that start again for packed rows.
        return {
            "input_ids": input_ids,
            "position_ids": torch.tensor([positions], device=device),
            "attention_mask": torch.ones_like(input_ids),
        }


@dataclass(frozen=True)
class Level:
    """One way to keep a document: what a job leaves of it, under a codec (see `kvshelf.store.artifact.codecs`)."""

    job: Job
    codec: str = "none"

    @property
    def keeps_all(self) -> bool:
        """Whether it is the full cache itself, to the last bit."""
        return self.codec == "none" and self.job.budget.tokens == self.job.num_tokens


def shared(levels: Sequence[Level]) -> list[list[Level]]:
    """The levels by prefill: those of one document whose policies look at the same passes behind it share one.

    In their order. Policies that read the document chunk by chunk change what later chunks see, so each has its own.
    Nor are different passes run behind each other: a policy's scores would not change by it but for last bits, and
    equal requests are to give equal bytes.
    """
    groups: list[list[Level]] = []
    for level in levels:
        for group in groups:
            if group[0].job is level.job or _alike(group[0].job, level.job):
                group.append(level)
                break
        else:
            groups.append([level])
    return groups


def _alike(one: Job, other: Job) -> bool:
    whole = one.absorber is None and other.absorber is None
    return whole and one.identity.document == other.identity.document and one.passes == other.passes
