"""Instructions checked by program."""

from __future__ import annotations

import pytest

from kvshelf_bench.scorers.rules import RULES, kept

KEPT = [
    ("words_at_most:3", "one two three", "one two three four"),
    ("words_at_least:2", "one two", "one"),
    ("lines_at_least:2", "a\n\nb", "a b"),
    ("mentions:north harbour", "At the North  Harbour.", "north of the harbour"),
    ("avoids:red", "a red-brown... no: a credit", None),
    ("begins_with:Dear", "Dear all", "dear all"),
    ("ends_with:Yours.", "Hello. Yours.", "Yours. Hello"),
    ("upper_case", "YES, 12", "Yes"),
    ("lower_case", "yes, 12", "YES"),
    ("bullets", "- one\n* two", "- one\ntwo"),
    ("json", '{"a": 1}', "{a: 1}"),
    ("no_comma", "one; two", "one, two"),
]


@pytest.mark.parametrize(("rule", "right", "wrong"), KEPT)
def test_a_rule(rule, right, wrong):
    expected = 0.0 if rule == "avoids:red" else 1.0
    assert kept(right, [rule]) == expected
    if wrong is not None:
        assert kept(wrong, [rule]) == 0
    assert kept("", [rule]) == 0, "no answer keeps no rule"


def test_the_score_is_the_share_of_the_rules_and_each_rule_is_tested():
    assert kept("YES, 12", ["upper_case", "no_comma"]) == 0.5
    assert {rule.partition(":")[0] for rule, *_ in KEPT} == RULES.keys()
    assert kept("a credit", ["avoids:red"]) == 1
