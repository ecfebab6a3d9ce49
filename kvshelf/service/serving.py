"""Which served model can answer from stored caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvshelf.artifact.identity import ModelIdentity
from kvshelf.errors import InvalidRequest, ModelMismatch
from kvshelf.store.manifest import Manifest


def serving(identities: Mapping[str, ModelIdentity], made_under: ModelIdentity) -> str:
    """The name of a served model that can use caches made under this one. Raises `ModelMismatch` if none can."""
    refusals: dict[str, ModelMismatch] = {}
    for name, ours in identities.items():
        try:
            ours.require_match(made_under)
        except ModelMismatch as error:
            refusals[name] = error
        else:
            return name
    raise refusals.get(made_under.name, next(iter(refusals.values())))


def serving_all(
    identities: Mapping[str, ModelIdentity], manifests: Sequence[Manifest], *, others_too: bool = False
) -> str | None:
    """The name of the served model for caches that are asked together. Raises `InvalidRequest` for caches of several
    models.

    others_too: whether caches of a model that nobody runs may be among them; None if all are. Otherwise raises
    `ModelMismatch`; of several caches, `details["cache_id"]` is the one.
    """
    of: dict[str, str] = {}  # by served model, a cache
    for manifest in manifests:
        try:
            of.setdefault(serving(identities, ModelIdentity(**manifest.identity["model"])), manifest.id)
        except ModelMismatch as error:
            if others_too:
                continue
            if len(manifests) > 1:
                error.details["cache_id"] = manifest.id
            raise
    if len(of) > 1:
        caches = ", ".join(f"{cache_id} of {model!r}" for model, cache_id in of.items())
        raise InvalidRequest(
            f"the caches are of several models ({caches}); ask those of one model together", param="cache_ids"
        )
    return next(iter(of), None)
