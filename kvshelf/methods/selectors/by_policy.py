"""A policy at the question: the entries that it would keep, had the prompt ended with this question."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from kvshelf.methods.policies.base import Policy, ProbedPolicy
from kvshelf.methods.selectors.base import Selector


@dataclass(frozen=True)
class ByPolicy(Selector):
    """Read the entries that a policy keeps when the question ends the prompt; the whole answer reads these.

    Policies that judge by the end of the prompt can be selectors: over a cache with all entries they lose nothing to an
    unexpected question. The question's own tokens read all entries, and the policy sees the last of them. Its window is
    at most as long as the question: a stored cache has no queries of the document. Policies that sum attention over all
    rows (`h2o`, `ems`) sum the question's. Policies that read the text know the ends of sentences from the cache. Under
    one that merges (`ems`), the answer reads a copy of entries that were merged for this question.

    On a cache with all entries it reads what the same policy stores with `expected_questions=[the question]`, if its
    window is no longer than the question, its segments are sentences, and it needs no sums over the document's rows.
    """

    name: ClassVar[str] = "policy"
    source: ClassVar[str] = "the policy's paper"
    advice: ClassVar[str] = "where one choice for the whole answer is enough."

    policy: Policy = field(kw_only=True)

    def policy_at(self, question_tokens: int) -> Policy:
        return self.policy.at_question(question_tokens)


def can_select(policy: type[Policy]) -> bool:
    """Whether a policy can choose for a question: by its queries alone, without a pass, and with one precision."""
    own_pass = policy.probe_passes not in (Policy.probe_passes, ProbedPolicy.probe_passes)
    return policy.selects and not own_pass and not policy.sets_precision
