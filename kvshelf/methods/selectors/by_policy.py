"""A policy at the question: the entries that it would keep, had the prompt ended with this question."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from kvshelf.methods.policies.base import Policy, ProbedPolicy
from kvshelf.methods.selectors.base import Selector


@dataclass(frozen=True)
class ByPolicy(Selector):
    """Read the entries that a policy keeps when the question ends the prompt; the whole answer reads these.

    The policies that judge by the end of the prompt can be used so: over a cache with all entries they lose nothing to
    a question that nobody expected. The question's own tokens read all entries, and the policy sees the last of them.
    Where its window has more rows than the question has tokens, it is as long as the question: a stored cache has no
    queries of the document. Those that sum attention over all rows (`h2o`, `ems`) sum the question's. Those that read
    the text know the ends of sentences, which the cache has. Where one merges (`ems`), the answer reads entries that
    were merged for this question, a copy in memory; the stored cache does not change.

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
    """Whether a policy can choose for a question: its queries alone judge, without a pass of the policy's own, and
    entries stay of one precision."""
    own_pass = policy.probe_passes not in (Policy.probe_passes, ProbedPolicy.probe_passes)
    return policy.selects and not own_pass and not policy.sets_precision
