"""Fits a policy to a document and a model: the last step before the prefill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from kvshelf.artifact.identity import Identity, ModelIdentity, digest
from kvshelf.engine.inputs.job import Job, Parent
from kvshelf.engine.requirements import (
    require_appending,
    require_compressible,
    require_observable,
    require_one_pass,
    require_one_rotation,
    require_protectable,
    require_room,
    require_room_beside,
    require_soft,
)
from kvshelf.methods.method import Needs
from kvshelf.methods.policies import Policy
from kvshelf.methods.policies.base import Absorber
from kvshelf.methods.policies.budgets import Budget
from kvshelf.methods.policies.gate_file import Geometry
from kvshelf.methods.policies.view import DocumentView, ProbePass
from kvshelf.model import calibration
from kvshelf.model.layers import LayerKind, reducible
from kvshelf.model.loading import head_size
from kvshelf.model.rope import Rope
from kvshelf.model.text import EncodedDocument

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, eq=False)
class Preparer:
    """Fits policies to documents of one model. Thread-safe, because it is immutable.

    `name`: the model's, for error messages. `max_tokens`: its longest sequence. kinds: of its layers.
    """

    model: PreTrainedModel
    name: str
    identity: ModelIdentity
    rope: Rope | None
    max_tokens: int
    kinds: tuple[LayerKind, ...]

    def job(
        self,
        document: DocumentView,
        policy: Policy,
        budget: Budget,
        *,
        encoded: EncodedDocument,
        given: frozenset[str],
        questions: Sequence[str],
        parent: Parent | None = None,
    ) -> Job:
        """The job that compresses `document` by `policy`. With a budget for the whole document the policy has no work.

        encoded: the same document, with its layout. given: the parameters that the caller chose, which are not
        fitted. questions: the expected ones, as texts. parent: what `document` is appended to. Raises
        `PolicyUnsupported`, `InvalidRequest` or `DocumentTooLong`.
        """
        document = self.of_model(document)
        passes: tuple[ProbePass, ...] = ()
        absorber: Absorber | None = None
        require_room_beside(document, budget)
        if policy.has_work(budget, document.num_tokens):
            has_text = document.text is not None
            require_observable(policy, self.model, self.kinds, self.name, self.rope, has_text=has_text)
            moves = policy.next_position(document.num_tokens, budget) != document.num_tokens
            require_compressible(policy, self.kinds, self.name, moves=moves)
            document = self.gated(self.calibrated(document, policy), policy)
            judged, left = document.judged, budget.beside(document.num_protected, document.num_tokens)
            if policy.indexes:  # of all entries, which it keeps
                judged, left = document, budget
            policy = policy.fitted(judged, left, given)
            passes = tuple(policy.probe_passes(judged))
            require_room(passes, self.max_tokens, self.name)
            absorber = policy.absorber(judged, left)
            require_protectable(document, absorber, moves=moves)
            require_one_pass(policy, self.kinds, self.name, document.end, passes, absorber)
            require_one_rotation(document.end, passes, absorber, self.model.config, self.name)
            require_soft(passes, self.model, self.kinds, self.name)
            if parent is not None:
                require_appending(policy, absorber, moves=moves, soft=any(probe.soft for probe in passes))
        token_ids = as_bytes(document.token_ids)
        named = token_ids if encoded.named_ids is None else as_bytes(encoded.named_ids)
        identity = Identity(
            model=self.identity,
            document=digest("kvshelf.tokens", named),
            num_tokens=document.num_tokens,
            layout=encoded.layout,
            boundary=encoded.boundary,
            prefill="whole" if absorber is None else absorber.mode,
            policy=policy.name,
            policy_version=policy.revision,
            policy_params=policy.parameters(),
            budget_tokens=budget.tokens,
            compression_ratio=budget.compression_ratio,
            probe=policy.probe_text(document) if passes else "",
            protect=document.protect,
            expected_questions=tuple(questions),
            date=encoded.date,
            variables=encoded.variables,
        )
        if parent is not None:
            before = parent.cache
            identity = identity.behind(before.identity, before.codec, before.kept_tokens, token_ids)
        return Job(document, policy, budget, passes, absorber, identity, parent)

    def of_model(self, document: DocumentView) -> DocumentView:
        """The document with what policies may know of the model."""
        return replace(document, num_layers=len(reducible(self.kinds)), group=self.group)

    @property
    def group(self) -> int:
        """Query heads of a KV head, in every layer."""
        heads = int(self.model.config.num_attention_heads)
        return heads // int(getattr(self.model.config, "num_key_value_heads", None) or heads)

    def calibrated(self, document: DocumentView, policy: Policy) -> DocumentView:
        """The document with the model's calibration, for a policy that needs one. It is read anew each time, so that a
        calibration made while the engine runs counts at once."""
        if Needs.CALIBRATION not in policy.needs:
            return document
        found = calibration.find(self.identity, self.model.config.name_or_path)
        return replace(document, calibration=found)

    def gated(self, document: DocumentView, policy: Policy) -> DocumentView:
        """The document with the model's gates for a policy that needs some. Looked for anew each time, as above."""
        if Needs.GATES not in policy.needs:
            return document
        gates = policy.gate_file(self.identity, self.model.config.name_or_path, self.geometry)
        return replace(document, gates=gates)

    @property
    def geometry(self) -> Geometry:
        """What the shapes of gates follow from."""
        config = self.model.config
        heads = int(config.num_attention_heads)
        within = int(getattr(config, "intermediate_size", None) or 0)
        sizes = head_size(config), int(config.hidden_size), within
        return Geometry(len(reducible(self.kinds)), heads, heads // self.group, *sizes)


def as_bytes(token_ids: Sequence[int]) -> bytes:
    """Token ids as identities digest them: int64, little-endian."""
    return torch.tensor(token_ids, dtype=torch.int64).numpy().tobytes()
