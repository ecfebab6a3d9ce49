"""Creations from a kept source: the same cache again, or a finer one of its document."""

from __future__ import annotations

import json
from typing import Any

from kvshelf.api import CreateCache, Message
from kvshelf.artifact.identity import Boundary
from kvshelf.methods.policies import POLICIES
from kvshelf.store.manifest import Judgement, Manifest
from kvshelf.store.types import Source, TokenIds


class Recreation(CreateCache):
    """A creation from a kept source. No request is one: the service makes it.

    Of token ids the first `protected_prefix` were written by the chat template. boundary: where the document ends.
    judged: what was asked of the cache and holds again, because it is the same: `min_quality` and its certificate.
    """

    protected_prefix: int = 0
    boundary: Boundary = "text"
    judged: Judgement = Judgement()


def document_fields(manifest: Manifest, source: Source) -> dict[str, Any]:
    """The fields of a creation that say what is compressed."""
    identity = manifest.identity
    fields: dict[str, Any] = {"layout": identity["layout"], "boundary": identity["boundary"]}
    fields |= {"date": identity.get("date"), "chat_template_kwargs": identity.get("variables")}
    if isinstance(source, TokenIds):
        return fields | {"token_ids": list(source.ids), "protected_prefix": source.protected_prefix}
    if identity["boundary"] in ("text", "document"):
        return fields | {"document": source}
    return fields | {"messages": [Message(**message) for message in json.loads(source)]}


def recreation(manifest: Manifest, source: Source, *, keep: bool, now: float) -> Recreation:
    """The creation that made a cache, with all the parameters it used: none is left to a default. keep: whether its
    source is to be kept once more, as under another id; for as long as it was, from now on."""
    identity, kept = manifest.identity, manifest.source
    is_known = manifest.policy in POLICIES
    sizes_itself = is_known and POLICIES.build(manifest.policy, manifest.policy_params).sizes_itself
    ends = None if kept is None else kept.expires_at
    return Recreation.model_construct(  # validated when it was a request
        **document_fields(manifest, source),
        policy=manifest.policy,
        policy_params=manifest.policy_params,
        compression_ratio=None if sizes_itself else manifest.compression_ratio,
        codec=manifest.made_codec,
        expected_questions=list(identity["expected_questions"]),
        protect=[f"tokens:{first}-{end}" for first, end in identity.get("protect") or ()],
        **_lifetime(manifest),
        name=manifest.name,
        labels=manifest.labels,
        keep_source=keep and ("tokens" if isinstance(source, TokenIds) else True),
        source_ttl_s=None if ends is None else max(ends - now, 1.0),
        judged=Judgement(min_quality=manifest.min_quality, certificate=None if keep else manifest.certificate),
    )


def finer(manifest: Manifest, source: Source, floor: float, now: float) -> Recreation:
    """The creation of the smallest cache of the same document whose quality reaches a floor. The policy is free: what a
    ratio of the same one would have to be is not known."""
    same = recreation(manifest, source, keep=True, now=now)
    free: dict[str, Any] = {"policy": "auto", "policy_params": {}, "compression_ratio": None, "expected_questions": []}
    free["judged"] = Judgement()
    default = Recreation.model_fields["codec"].get_default(call_default_factory=True)
    return same.model_copy(update={**free, "codec": default, "min_quality": floor})


def _lifetime(manifest: Manifest) -> dict[str, Any]:
    """The lifetime that a cache was given, as a creation asks for it."""
    if manifest.ttl_renew_s is not None:
        return {"ttl_s": manifest.ttl_renew_s, "ttl_renew": True}
    return {"ttl_s": None if manifest.expires_at is None else manifest.expires_at - manifest.created_at}
