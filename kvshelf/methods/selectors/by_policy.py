"""A policy at the question: the entries that it would keep, had the prompt ended with this question."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from kvshelf.methods.method import Needs
from kvshelf.methods.policies.base import Policy, ProbedPolicy, TailPolicy
from kvshelf.methods.selectors.base import Selector


@dataclass(frozen=True)
class ByPolicy(Selector):
    """Read the entries that a policy keeps when the question ends the prompt; the whole answer reads these.

    The policies that judge by the end of the prompt can be used so: over a cache with all entries they lose nothing to
    a question that nobody expected. The question's own tokens read all entries, and the policy sees the last of them.
    Where its window has more rows than the question has tokens, it is as long as the question: a stored cache has no
    queries of the document.

    On a cache with all entries it reads what the same policy stores with `expected_questions=[the question]`, if its
    window is no longer than the question.
    """

    name: ClassVar[str] = "policy"
    source: ClassVar[str] = "the policy's paper"
    advice: ClassVar[str] = "where one choice for the whole answer is enough."

    policy: Policy = field(kw_only=True)

    def policy_at(self, question_tokens: int) -> Policy:
        policy = self.policy
        if isinstance(policy, TailPolicy):
            return replace(policy, window=min(policy.window, question_tokens))
        return policy


def can_select(policy: type[Policy]) -> bool:
    """Whether a policy can choose for a question: it judges by the end of the prompt, makes no pass of its own, needs
    no text of the document, and leaves entries as they are, and of one precision."""
    judges = issubclass(policy, ProbedPolicy) and policy.probe_passes is ProbedPolicy.probe_passes
    plain = not (policy.merges or policy.sets_precision)
    return judges and plain and Needs.TEXT not in policy().needs
