"""Questions on several caches: fields that mean nothing there are refused with what to do."""

from __future__ import annotations

from typing import Any

import pytest

from kvshelf.api import JointQuery
from kvshelf.api.strict import parse_request
from kvshelf.errors import InvalidRequest


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("repair", 0.15, "leave repair out, and take route"),
        ("repair", None, "answered no more than documents asked together"),
        ("compare", True, "leave compare out"),
        ("store", True, "leave store out"),
    ],
)
def test_fields_of_one_cache_and_repair_are_refused(field: str, value: Any, told: str) -> None:
    body = {"cache_ids": ["kvs_1", "kvs_2"], "prompt": "Who?", field: value}
    with pytest.raises(InvalidRequest) as caught:
        parse_request(JointQuery, body)
    assert caught.value.param == field
    assert told in caught.value.message
