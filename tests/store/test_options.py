"""The keyword arguments of a store, and the values that they make."""

from __future__ import annotations

from dataclasses import fields

import pytest

from kvshelf.store.base import Store
from kvshelf.store.index import Filters
from kvshelf.store.types import FilterFields


def test_keyword_arguments_are_those_of_the_values() -> None:
    assert FilterFields.__annotations__.keys() == {field.name for field in fields(Filters)} - {"tenant"}


@pytest.mark.parametrize("call", ["list", "put", "update"])
def test_a_name_that_does_not_exist_is_refused_as_by_a_call(store: Store, call: str) -> None:
    arguments = {"list": [], "put": [None], "update": ["kvs_" + "0" * 40]}[call]
    with pytest.raises(TypeError, match="unexpected keyword argument 'tag'"):
        getattr(store, call)(*arguments, tag="a")
