"""Fits a policy to a document and a model: the last step before the prefill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kvshelf.artifact.identity import Identity, canonical_json, digest
from kvshelf.engine.exclusions import Combination, require_possible
from kvshelf.engine.facts import ModelFacts
from kvshelf.engine.inputs.job import Job, Parent
from kvshelf.errors import DocumentTooLong, InvalidRequest
from kvshelf.methods.method import Needs
from kvshelf.methods.policies import Policy
from kvshelf.methods.policies.base import Absorber
from kvshelf.methods.policies.budgets import Budget
from kvshelf.methods.policies.gate_file import Geometry
from kvshelf.methods.policies.view import DocumentView, ProbePass
from kvshelf.model import calibration
from kvshelf.model.layers import reducible
from kvshelf.model.loading import head_size
from kvshelf.model.text import EncodedDocument


@dataclass(frozen=True, eq=False)
class Preparer:
    """Fits policies to documents of one model. Thread-safe, because it is immutable."""

    facts: ModelFacts

    def job(
        self,
        document: DocumentView,
        policy: Policy,
        budget: Budget,
        *,
        encoded: EncodedDocument,
        chosen: frozenset[str],
        questions: Sequence[str],
        parent: Parent | None = None,
    ) -> Job:
        """The job that compresses `document` by `policy`. With a budget for the whole document the policy has no work.

        encoded: the same document, with its layout. chosen: the parameters that the caller chose, which are not fitted.
        questions: the expected ones, as texts. parent: the cache that `document` is appended to. Raises
        `PolicyUnsupported`, `InvalidRequest` or `DocumentTooLong`.
        """
        document = self.of_model(document)
        passes: tuple[ProbePass, ...] = ()
        absorber: Absorber | None = None
        _require_room_beside(document, budget)
        combination = Combination(
            facts=self.facts,
            policy=policy,
            document=document,
            budget=budget,
            verb=None if parent is None else "append",
            cache=None if parent is None else parent.cache,
        )
        require_possible(combination)
        if combination.at_work is not None:
            document = self.gated(self.calibrated(document, policy), policy)
            judged, rest = document.judged, budget.beside(document.num_protected, document.num_tokens)
            if policy.indexes:  # of all entries, which it keeps
                judged, rest = document, budget
            policy = policy.fitted(judged, rest, chosen)
            passes = tuple(policy.probe_passes(judged))
            for probe in passes:
                end = probe.first_position + len(probe.token_ids)
                if end > self.facts.max_tokens:
                    raise DocumentTooLong(
                        f"the policy runs {len(probe.token_ids)} tokens behind the document, up to position {end}, and "
                        f"{self.facts.name!r} takes {self.facts.max_tokens} tokens; shorten the document or the probe",
                        param="document",
                    )
            absorber = policy.absorber(judged, rest)
            # Again: what a policy runs is known once it is fitted, and fitting reads files that other refusals spare.
            combination = replace(combination, policy=policy, passes=passes, absorber=absorber)
            require_possible(combination)
        identity = self._identity(document, combination, encoded, questions)
        if parent is not None:
            before = parent.cache
            kept_tokens = before.kept_tokens if absorber is None else None
            identity = identity.behind(before.identity, before.codec, kept_tokens, as_bytes(document.token_ids))
        return Job(document, policy, budget, passes, absorber, identity, parent, encoded.images)

    def _identity(
        self, document: DocumentView, fitted: Combination, encoded: EncodedDocument, questions: Sequence[str]
    ) -> Identity:
        """The identity of a document that a fitted policy reduces, as if it were appended to nothing."""
        policy, budget = fitted.policy, fitted.budget
        assert policy is not None
        assert budget is not None
        named = as_bytes(document.token_ids if encoded.named_ids is None else encoded.named_ids)
        images = tuple((image.first, image.end, image.digest) for image in encoded.images)
        parts = ("kvshelf.images", named, canonical_json(images)) if images else ("kvshelf.tokens", named)
        return Identity(
            model=self.facts.identity,
            document=digest(*parts),
            num_tokens=document.num_tokens,
            layout=encoded.layout,
            boundary=encoded.boundary,
            prefill="whole" if fitted.absorber is None else fitted.absorber.mode,
            policy=policy.name,
            policy_version=policy.revision,
            policy_params=policy.parameters(),
            budget_tokens=budget.tokens,
            compression_ratio=budget.compression_ratio,
            probe=policy.probe_text(document) if fitted.passes else "",
            protect=document.protect,
            expected_questions=tuple(questions),
            date=encoded.date,
            variables=encoded.variables,
            images=images,
            image_encoder=self.facts.images.digest if images and self.facts.images is not None else "",
        )

    def of_model(self, document: DocumentView) -> DocumentView:
        """The document with the model's sizes, as policies see it."""
        return replace(document, num_layers=len(reducible(self.facts.kinds)), group=self.group)

    @property
    def group(self) -> int:
        """Query heads of a KV head, in every layer."""
        heads = int(self.facts.model.config.num_attention_heads)
        return heads // int(getattr(self.facts.model.config, "num_key_value_heads", None) or heads)

    def calibrated(self, document: DocumentView, policy: Policy) -> DocumentView:
        """The document with the model's calibration, for a policy that needs one. The file is looked for each time, so
        that a calibration made while the engine runs counts at once."""
        if Needs.CALIBRATION not in policy.needs:
            return document
        heads = (int(self.facts.model.config.num_attention_heads),)
        file = calibration.find(self.facts.identity, self.facts.folder, calibration.Calibration, heads, "the policy")
        return replace(document, calibration=file)

    def gated(self, document: DocumentView, policy: Policy) -> DocumentView:
        """The document with the model's gates for a policy that needs some. The file is looked for each time, too."""
        if Needs.GATES not in policy.needs:
            return document
        gates = policy.gate_file(self.facts.identity, self.facts.model.config.name_or_path, self.geometry)
        return replace(document, gates=gates)

    @property
    def geometry(self) -> Geometry:
        """The sizes of the model that gates depend on."""
        config = self.facts.model.config
        heads, layers = int(config.num_attention_heads), len(reducible(self.facts.kinds))
        width = getattr(config, "intermediate_size", None) or 0
        within = int(max(width) if isinstance(width, list) else width)  # Gemma 3n has one for each layer
        return Geometry(layers, heads, heads // self.group, head_size(config), int(config.hidden_size), within)


def as_bytes(token_ids: Sequence[int]) -> bytes:
    """Token ids as identities digest them: int64, little-endian."""
    return torch.tensor(token_ids, dtype=torch.int64).numpy().tobytes()


def _require_room_beside(document: DocumentView, budget: Budget) -> None:
    """Refuse protected tokens that fill the budget, before any work."""
    if not document.protect or document.num_protected < budget.tokens:
        return
    if budget.tokens == document.num_tokens:
        raise InvalidRequest(
            f"protect holds all {document.num_tokens} tokens of the document, and leaves none to compress; take codec "
            "none and policy full, or protect less",
            param="protect",
        )
    raise InvalidRequest(
        f"protect holds {document.num_protected} tokens, and the budget is {budget.tokens} of the document's "
        f"{document.num_tokens} entries per KV head, protected ones included; protect less, lower compression_ratio or "
        "raise budget_tokens",
        param="protect",
    )
