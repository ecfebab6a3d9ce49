"""Which served model answers from stored caches."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from kvshelf.artifact.identity import LinkedIdentity, ModelIdentity
from kvshelf.errors import ModelMismatch
from kvshelf.service.engines import serving
from tests.store.caches import MODEL

QUANTIZED = LinkedIdentity(**asdict(replace(MODEL, weights="rounded")), linked={MODEL.fingerprint(): 0.95})


@pytest.mark.parametrize("maker_first", [True, False])
def test_the_maker_answers_before_a_model_that_is_linked_to_it(maker_first: bool) -> None:
    both: list[tuple[str, ModelIdentity]] = [("maker", LinkedIdentity(**asdict(MODEL))), ("quantized", QUANTIZED)]
    identities = dict(both if maker_first else reversed(both))
    assert serving(identities, MODEL) == "maker"
    assert serving(identities, QUANTIZED.unlinked) == "quantized"


def test_a_linked_model_answers_where_the_maker_is_not_served() -> None:
    other = LinkedIdentity(**asdict(replace(MODEL, weights="other")))
    assert serving({"other": other, "quantized": QUANTIZED}, MODEL) == "quantized"
    with pytest.raises(ModelMismatch, match="weights differs"):
        serving({"other": other}, MODEL)
