"""The catalog that is read without torch."""

from __future__ import annotations

import pytest

from kvshelf.methods.catalog import KINDS
from kvshelf.methods.info import packaged
from kvshelf.methods.policies import registry as policies
from kvshelf.methods.selectors import registry as selectors
from kvshelf.methods.suffixes import registry as suffixes


@pytest.mark.parametrize(("kind", "registry"), [*zip(KINDS, (policies, selectors, suffixes), strict=True)])
def test_it_says_of_each_method_what_its_class_says(kind, registry):
    assert [*packaged(KINDS[kind])] == registry.infos()
