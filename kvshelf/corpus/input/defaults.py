"""A batch's defaults: the fields of a creation that its rows have where they do not choose themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, Final

from kvshelf.api import CreateCache
from kvshelf.api.creation import CHOSEN_BY_AUTO
from kvshelf.api.strict import parse_request
from kvshelf.errors import InvalidRequest
from kvshelf.methods.catalog import policy_info

DOCUMENTS: Final = ("document", "messages", "token_ids")
"""A row gives exactly one of these fields."""

_SIZES: Final = ("compression_ratio", "budget_tokens", "levels")
_ALTERNATIVES: Final = (_SIZES, ("ttl_s", "expires_at"), ("ttl_renew", "expires_at"), ("max_bytes", "bytes_per_token"))
"""A row that gives one field of a group drops the batch's defaults for the others."""

_BY_CERTIFICATE: Final = frozenset(CHOSEN_BY_AUTO) | {"policy", "min_quality", "max_bytes", "bytes_per_token"}
"""Fields in whose place a certificate chooses."""

_LAYOUTS: Final = {"messages": "chat", "token_ids": "plain"}
"""The only layout of these documents."""


def require_defaults(defaults: Mapping[str, Any]) -> CreateCache:
    """The `CreateCache` of a row that gives only a document. A default of None counts as not given. Raises
    `InvalidRequest` for fields that no row can have."""
    for name in DOCUMENTS:
        if defaults.get(name) is not None:
            raise InvalidRequest(f"{name} is a row's own, and no default for all rows", param=name)
    return parse_request(CreateCache, _without_nulls(defaults) | {"document": "any"})


def with_defaults(fields: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """A row's fields, and the batch's defaults that go with what the row chose. Labels of both are joined."""
    kept = _without_nulls(defaults)
    chosen = _without_nulls(fields)
    for group in _ALTERNATIVES:
        if not chosen.keys().isdisjoint(group):
            _drop(kept, group)
    if "certificate" in chosen:
        _drop(kept, _BY_CERTIFICATE)
    elif not chosen.keys().isdisjoint(_BY_CERTIFICATE):
        _drop(kept, ("certificate",))
    _settle_policy(kept, chosen)
    if "token_ids" in chosen and kept.get("keep_source") is True:
        kept["keep_source"] = "tokens"  # of token ids the ids are the source
    if chosen.get("keep_source") is False:
        _drop(kept, ("source_ttl_s",))
    if any(name in chosen and kept.get("layout") != layout for name, layout in _LAYOUTS.items()):
        _drop(kept, ("layout",))
    labels = fields.get("labels")
    if isinstance(labels, Mapping) and "labels" in kept:
        return {**kept, **fields, "labels": {**kept["labels"], **labels}}
    return {**kept, **fields}


def _settle_policy(kept: dict[str, Any], chosen: Mapping[str, Any]) -> None:
    """Drop a policy that takes no size where the row gives one, and what the row's policy does not take."""
    sized = not chosen.keys().isdisjoint(_SIZES)
    if "policy" in chosen or (sized and not _untaken_by(kept).isdisjoint(_SIZES)):
        _drop(kept, ("policy", "policy_params"))  # the parameters belong to the policy
    if "policy" in chosen or "policy_params" in chosen:
        _drop(kept, _untaken_by({**kept, **chosen}))


def _untaken_by(fields: Mapping[str, Any]) -> frozenset[str]:
    """The fields that the policy of these fields does not take. Nothing has checked a row's fields yet."""
    policy, params = fields.get("policy"), fields.get("policy_params")
    base = params.get("base") if isinstance(params, Mapping) else None
    return _untaken(policy, base if isinstance(base, str) else None) if isinstance(policy, str) else frozenset()


@cache
def _untaken(policy: str, base: str | None) -> frozenset[str]:
    """base: the policy that scores in place of `policy`."""
    if policy == "auto":
        return frozenset(CHOSEN_BY_AUTO)
    try:
        about = policy_info(policy)
        scorer = about if base is None or "base" not in about.parameters else policy_info(base)
    except InvalidRequest:
        return frozenset()  # the service that compresses the row refuses it, or has this policy from another package
    return frozenset(() if about.takes_budget else _SIZES) | (
        set() if scorer.takes_questions else {"expected_questions"}
    )


def _drop(fields: dict[str, Any], names: Iterable[str]) -> None:
    for name in names:
        fields.pop(name, None)


def _without_nulls(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
