"""How a policy is fitted to a document and a model: the last part of preparing, still before any work of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from kvshelf.store.artifact.identity import Identity, ModelIdentity, digest
from kvshelf.workers.engine.inputs.job import Job
from kvshelf.workers.engine.inputs.requirements import (
    require_observable,
    require_one_rotation,
    require_room,
    require_within_window,
)
from kvshelf.workers.model import calibration
from kvshelf.workers.model.rope import Rope
from kvshelf.workers.model.text import EncodedDocument
from kvshelf.workers.policies import Policy
from kvshelf.workers.policies.base import Absorber, Observes
from kvshelf.workers.policies.budgets import Budget
from kvshelf.workers.policies.view import ProbePass, Source

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, eq=False)
class Preparer:
    """Fits policies to documents of one model. Thread-safe: nothing here changes.

    `name` is the model's, for messages; `max_tokens` is its longest sequence.
    """

    model: PreTrainedModel
    name: str
    identity: ModelIdentity
    rope: Rope | None
    max_tokens: int

    def job(
        self,
        source: Source,
        policy: Policy,
        budget: Budget,
        *,
        encoded: EncodedDocument,
        given: frozenset[str],
        questions: Sequence[str],
    ) -> Job:
        """What `policy` does with a document. A budget that holds all of it leaves the policy nothing to do.

        encoded: the document of `source`. given: the parameters that the caller chose, which are not fitted. questions:
        the expected ones, as texts. Raises `PolicyUnsupported`, `InvalidRequest` or `DocumentTooLong`.
        """
        passes: tuple[ProbePass, ...] = ()
        absorber: Absorber | None = None
        require_within_window(source.num_tokens, self.model.config, self.name)
        if budget.tokens < source.num_tokens:
            require_observable(policy, self.model, self.name, self.rope, has_text=source.text is not None)
            source = self._calibrated(source, policy)
            policy = policy.fitted(source, budget, given)
            passes = tuple(policy.probe_passes(source))
            require_room(passes, self.max_tokens, self.name)
            absorber = policy.absorber(source, budget)
            require_one_rotation(source.num_tokens, passes, absorber, self.model.config, self.name)
        identity = Identity(
            model=self.identity,
            document=_ids_digest(source.token_ids),
            num_tokens=source.num_tokens,
            layout=encoded.layout,
            boundary=encoded.boundary,
            prefill="whole" if absorber is None else absorber.mode,
            policy=policy.name,
            policy_version=policy.revision,
            policy_params=policy.parameters(),
            budget_tokens=budget.tokens,
            compression_ratio=budget.compression_ratio,
            probe=policy.probe_text(source) if passes else "",
            expected_questions=tuple(questions),
        )
        return Job(source, policy, budget, passes, absorber, identity)

    def _calibrated(self, source: Source, policy: Policy) -> Source:
        """With what is known of the model's heads, for a policy that needs it. Read anew each time: a calibration made
        while the engine runs counts at once."""
        if Observes.CALIBRATION not in policy.observes:
            return source
        found = calibration.find(self.identity, self.model.config.name_or_path)
        return replace(source, calibration=found)


def _ids_digest(token_ids: Sequence[int]) -> str:
    return digest("kvshelf.tokens", torch.tensor(token_ids, dtype=torch.int64).numpy().tobytes())
