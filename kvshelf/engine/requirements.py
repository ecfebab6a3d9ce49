"""Checks before the prefill: what a policy accepts from a caller, and what it needs of the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.codecs import Codec
from kvshelf.artifact.records import Indexed, parts_of
from kvshelf.artifact.shape import LayerShape
from kvshelf.engine.facts import ModelFacts
from kvshelf.errors import DocumentTooLong, InvalidRequest, PolicyUnsupported
from kvshelf.methods.method import Needs
from kvshelf.methods.policies.base import Absorber, Policy
from kvshelf.methods.policies.budgets import Budget
from kvshelf.methods.policies.together import chooses_together
from kvshelf.methods.policies.view import DocumentView, ProbePass, output_weight
from kvshelf.model.layers import LayerKind, readers, reducible
from kvshelf.model.rope import Rope, reach

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def require_budget_taken(policy: Policy, compression_ratio: float | None, budget_tokens: int | None) -> None:
    """Refuse a budget for a policy that has none, or whose parameters say it."""
    if policy.sizes_itself and (compression_ratio is not None or budget_tokens is not None):
        param = "budget_tokens" if compression_ratio is None else "compression_ratio"
        how = "has its size from its parameters" if policy.takes_budget else "keeps everything"
        raise InvalidRequest(f"policy {policy.name!r} {how} and takes no {param}", param=param)


def require_questions_taken(policy: Policy, expected_questions: Sequence[str]) -> None:
    """Refuse expected questions for a policy that would not look at them."""
    if expected_questions and not policy.takes_questions:
        raise InvalidRequest(
            f"policy {policy.name!r} does not look at questions; leave expected_questions out, or choose a policy that "
            "scores by the end of the prompt, snapkv say",
            param="expected_questions",
        )


def require_observable(
    policy: Policy,
    model: PreTrainedModel,
    kinds: Sequence[LayerKind],
    name: str,
    rope: Rope | None,
    *,
    has_text: bool,
) -> None:
    """Refuse a policy that observes what the model `name`, or an engine without tokenizer, cannot provide."""
    if Needs.ROPE in policy.needs and (rope is None or rope.length_dependent):
        raise PolicyUnsupported(
            f"policy {policy.name!r} has to undo the model's rotary embedding, and that of {name!r} "
            f"{'is not to be had' if rope is None else 'changes with the length of the sequence'}; choose a policy "
            "that does not",
            param="policy",
        )
    if Needs.TEXT in policy.needs and not has_text:
        raise PolicyUnsupported(
            f"policy {policy.name!r} reads the document's text, and this engine has no tokenizer; choose a policy that "
            "does not",
            param="policy",
        )
    layers = zip(getattr(model.base_model, "layers", [None]), kinds, strict=False)
    attention = [getattr(layer, "self_attn", None) for layer, kind in layers if kind.attends]
    if Needs.WEIGHTS in policy.needs and any(output_weight(module) is None for module in attention):
        raise PolicyUnsupported(
            f"policy {policy.name!r} weighs values by the attention's output projection, and {name!r} has no o_proj "
            "weight in every layer that could be read; choose a policy that does not",
            param="policy",
        )


def require_compressible(policy: Policy, kinds: Sequence[LayerKind], name: str, *, moves: bool) -> None:
    """Refuse a policy for a model whose windows, chunks or states it cannot leave as they are, or that has no other
    layers, or whose latents it cannot choose among. moves: whether the policy counts positions within the cache."""
    if any(kind.latents for kind in kinds):
        _require_one_choice(policy, name)
    if all(kind.reducible for kind in kinds):
        return
    if not reducible(kinds):
        raise PolicyUnsupported(
            f"every layer of {name!r} has {_stored_whole(kinds)}, which is stored whole, so policy {policy.name!r} has "
            "nothing to reduce; take policy full",
            param="policy",
        )
    if moves and not all(kind.sees_all for kind in kinds):
        raise _beside(policy, name, "counts positions within the cache", kinds)
    if Needs.CALL in policy.needs and any(kind.states for kind in kinds):
        raise _beside(policy, name, "sees the calls of attention modules in one pass", kinds)
    if Needs.CALIBRATION in policy.needs:
        raise _beside(policy, name, "needs a calibration over layers that all see the whole document", kinds)


def _require_one_choice(policy: Policy, name: str) -> None:
    """Refuse a policy that could not choose the same tokens for all heads of a layer, which share their latents."""
    if policy.budgets_heads:
        why = "gives each head a budget of its own"
    elif policy.prunes:
        why = "removes channels of each head's keys"
    elif not chooses_together(policy.chooser):
        why = "chooses other tokens in each head"
    else:
        return
    raise PolicyUnsupported(
        f"policy {policy.name!r} {why}, and all heads of a layer of {name!r} share the latents of a token (MLA); "
        "choose another policy",
        param="policy",
    )


def require_one_pass(
    policy: Policy,
    kinds: Sequence[LayerKind],
    name: str,
    num_tokens: int,
    passes: Sequence[ProbePass],
    absorber: Absorber | None,
) -> None:
    """Refuse ways to read a document that windows, chunks, states and latents do not go with."""
    if absorber is not None and any(kind.latents for kind in kinds):
        raise PolicyUnsupported(
            f"policy {policy.name!r} reads the document in chunks, and all heads of a layer of {name!r} share the "
            "latents of a token (MLA); take prefill=whole, or another policy",
            param="policy_params.prefill",
        )
    if absorber is not None and readers(kinds):
        raise PolicyUnsupported(
            f"policy {policy.name!r} reads the document in chunks, and layers of {name!r} read those of others "
            "(layer_map), which would be reduced before; take prefill=whole, or another policy",
            param="policy_params.prefill",
        )
    if all(kind.sees_all and not kind.states for kind in kinds):
        return
    if absorber is not None:
        why = "reads the document in chunks that see only what was kept of those before"
        raise _beside(policy, name, why, kinds)
    if any(probe.first_position != num_tokens for probe in passes):
        raise _beside(policy, name, "asks from other positions than the document's end", kinds)


def _beside(policy: Policy, name: str, why: str, kinds: Sequence[LayerKind]) -> PolicyUnsupported:
    return PolicyUnsupported(
        f"policy {policy.name!r} {why}, and some layers of {name!r} have {_stored_whole(kinds)}; choose another policy",
        param="policy",
    )


def _stored_whole(kinds: Sequence[LayerKind]) -> str:
    """What some layers have that is stored whole."""
    if any(kind.states for kind in kinds):
        return "recurrent states"
    return "a sliding window" if all(kind.chunk is None for kind in kinds) else "chunked attention"


def require_growing(cache: CompressedCache, facts: ModelFacts) -> None:
    """Refuse to append to a cache whose positions, or whose index, do not go on."""
    policy = cache.identity.policy
    if facts.ranks is not None:
        why = f"{facts.name!r} runs in several processes, which append to no cache"
    elif cache.repositioned:
        why = f"policy {policy!r} counted its positions within the cache, and no document goes on from there"
    elif any(isinstance(part, Indexed) for entries in cache.reduced for part in parts_of(entries)):
        why = f"policy {policy!r} made an index of the whole document, which appended tokens would not be in"
    else:
        return
    raise PolicyUnsupported(f"{why}; compress the whole document anew", param="cache_id")


def require_soft(passes: Sequence[ProbePass], model: PreTrainedModel, kinds: Sequence[LayerKind], name: str) -> None:
    """Refuse passes of learned tokens to a model without the linear layers that they add to."""
    named = {module for probe in passes if probe.soft is not None for module in probe.soft.tensors if "." in module}
    for module in {each.partition(".")[2].rpartition(".")[0] for each in named}:
        if not all(kind.sees_all and kind.attends and not kind.states for kind in kinds) or not all(
            any(found == module for found, _ in layer.named_modules()) for layer in model.base_model.layers
        ):
            raise PolicyUnsupported(
                f"learned tokens add to {module} in every layer, and {name!r} has other layers; take policy kvzip_gate",
                param="policy",
            )


def require_appending(policy: Policy, absorber: Absorber | None, *, moves: bool, soft: bool) -> None:
    """Refuse a policy that cannot reduce tokens behind a stored cache. moves: as of `require_compressible`. soft:
    whether it runs learned tokens."""
    if soft:
        why = "runs learned tokens in the same pass as the document"
    elif moves:
        why = "counts positions within the cache"
    elif absorber is not None:
        why = "reads a document chunk by chunk from its beginning"
    elif policy.indexes:
        why = "makes an index of a whole document"
    elif Needs.CALL in policy.needs:
        why = "sees the calls of attention modules of a whole document"
    else:
        return
    raise PolicyUnsupported(
        f"policy {policy.name!r} {why}, so it cannot reduce what is appended to a cache; choose another, or full",
        param="policy",
    )


def require_joinable(facts: ModelFacts) -> None:
    """Refuse several documents in one question to a model in which they would not be what each is by itself."""
    if any(kind.states for kind in facts.kinds):
        why = "has recurrent states, and those behind several documents cannot be joined"
    elif not all(kind.sees_all for kind in facts.kinds):
        why = f"has layers with {_stored_whole(facts.kinds)}, which reach back from the longest document alone"
    elif facts.one_by_one:
        why = "has positions that may change with a document's length"
    elif facts.ranks is not None:
        why = "runs in several processes, which take one document a question"
    else:
        return
    raise PolicyUnsupported(f"{facts.name!r} {why}; ask each document by itself", param="cache_ids")


def require_selectable(facts: ModelFacts) -> None:
    """Refuse selectors to a model that several processes share, and to one of whose layers some read others: a choice
    is for the queries of one layer."""
    if facts.ranks is not None:
        why = "runs in several processes, which read whole caches"
    elif readers(facts.kinds):
        why = "has layers that read the keys and values of others (layer_map)"
    else:
        return
    raise PolicyUnsupported(f"{facts.name!r} {why}; ask without select", param="select")


def require_bounded(facts: ModelFacts) -> None:
    """Refuse suffix policies to a model where a row's entries are not what they choose among, and to one that several
    processes share."""
    kinds = facts.kinds
    if facts.ranks is not None:
        why = "runs in several processes, which would have to drop the same entries"
    elif any(kind.latents for kind in kinds):
        why = "stores latents, which all heads of a layer share"
    elif readers(kinds):
        why = "has layers that read the keys and values of others (layer_map), by whose queries none chooses"
    elif not all(kind.sees_all for kind in kinds):
        why = f"has layers with {_stored_whole(kinds)}, which count what they see by places in the suffix"
    else:
        return
    raise PolicyUnsupported(f"{facts.name!r} {why}; ask without suffix", param="suffix.policy")


def require_suffix_fields(suffix: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of what a caller says of a suffix: `policy`, and `budget` and `params` if given. Raises `InvalidRequest`
    for others, and for a budget that is no number from 1."""
    given = dict(suffix)
    for name in given.keys() - {"policy", "budget", "params"}:
        raise InvalidRequest(f"suffix has no {name!r}; it has policy, budget and params", param=f"suffix.{name}")
    if not isinstance(given.get("policy"), str):
        raise InvalidRequest("suffix needs the name of a policy", param="suffix.policy")
    budget = given.get("budget")
    if budget is not None and (type(budget) is not int or budget < 1):
        raise InvalidRequest(f"suffix.budget is {budget!r}; it must be an integer from 1", param="suffix.budget")
    if not isinstance(given.get("params") or {}, Mapping):
        raise InvalidRequest("suffix.params must map names to values", param="suffix.params")
    return given


def require_own_keys(facts: ModelFacts) -> None:
    """Refuse policies at the question to a model whose heads share latents: they judge the keys of heads."""
    if any(kind.latents for kind in facts.kinds):
        raise PolicyUnsupported(
            f"the heads of {facts.name!r} share latents, of which no policy can choose at the question; take selector "
            "quest",
            param="select.method",
        )


def require_sentences(selector: str, documents: Sequence[Sequence[int]], facts: ModelFacts) -> None:
    """Refuse a selector of sentences where nobody knows those of the answer, or of one of the documents, and where
    queries cannot be compared with what is stored. documents: the ends of sentences of each."""
    if facts.text is None:
        why = f"needs the text of answers, and {facts.name!r} has no tokenizer here"
    elif any(kind.latents for kind in facts.kinds):
        why = f"compares queries with keys, and {facts.name!r} stores latents"
    elif not all(documents):
        raise PolicyUnsupported(
            "the cache has no sentence ends: it was made from token ids; take selector quest", param="select.method"
        )
    else:
        return
    raise PolicyUnsupported(f"selector {selector!r} {why}; take selector quest", param="select.method")


def require_plain(facts: ModelFacts) -> None:
    """Refuse to export the caches of a model that transformers' own cache would run as another one."""
    if readers(facts.kinds):
        raise PolicyUnsupported(
            f"{facts.name!r} has layers that read the keys and values of others (layer_map), which transformers' cache "
            "does not know; attach its caches with engine.attached(cache)",
            param="positions",
        )


def require_window(layer: int, found: int | None, told: int | None) -> None:
    """Refuse a model with a layer that has another window than its configuration tells."""
    if found != told:
        raise PolicyUnsupported(
            f"layer {layer} attends with a sliding window of {found}, and the model's configuration says {told}; "
            "kvshelf stores no layer that it may misread",
            param="model",
        )


def require_unshared(policy: Policy, absorber: Absorber | None, passes: Sequence[ProbePass], facts: ModelFacts) -> None:
    """Refuse chunks with probes to a model whose heads several processes share: none of them sees all scores. And
    learned tokens and calls of attention modules, as no process has all of a layer."""
    if facts.ranks is None:
        return
    param = "policy"
    if Needs.CALL in policy.needs:
        why = f"and policy {policy.name!r} sees whole layers; choose another policy"
    elif any(probe.soft for probe in passes):
        why = "and learned tokens add to whole layers; choose another policy"
    elif absorber is not None and absorber.probed:
        why, param = "which reduce whole layers; take prefill=whole", "policy_params.prefill"
    else:
        return
    raise PolicyUnsupported(f"{facts.name!r} runs in several processes, {why}", param=param)


def require_every_layer(seen: Iterable[int], expected: Sequence[int]) -> None:
    """Refuse a model with layers that did not run through kvshelf's attention."""
    if sorted(seen) != list(expected):
        raise PolicyUnsupported(
            f"only the layers {sorted(seen)} of {len(expected)} ran through transformers' attention interface; this "
            "model cannot be compressed",
            param="model",
        )


def require_own_heads(layers: Sequence[LayerShape], own: int, facts: ModelFacts) -> None:
    """Refuse a model whose processes do not each have their part of the KV heads of every layer, `own` of them."""
    for index, layer in enumerate(layers):
        if layer.kv_heads != own:
            raise PolicyUnsupported(
                f"in layer {index} of {facts.name!r} each process has {layer.kv_heads} KV heads in place of {own}, "
                "because transformers' plan for tensor parallelism does not share its attention; take one process",
                param="ranks",
            )


def require_one_rotation(
    num_tokens: int, passes: Sequence[ProbePass], absorber: Absorber | None, config: Any, name: str
) -> None:
    """Refuse forward passes over one document that a LongRoPE would rotate by different frequencies."""
    first = num_tokens if absorber is None else absorber.chunks[0]
    last = max((probe.first_position + len(probe.token_ids) for probe in passes), default=num_tokens)
    place = reach(config, first)
    if place is not None and max(num_tokens, last) > place:
        how = "its passes behind the document reach" if absorber is None else "its chunks begin before and end"
        raise PolicyUnsupported(
            f"{name!r} has a LongRoPE, which rotates sequences of more than {place} tokens by other frequencies, and "
            f"{how} beyond that; choose a policy that makes one pass over the document, keydiff say",
            param="policy",
        )


def require_room(passes: Sequence[ProbePass], max_tokens: int, name: str) -> None:
    """Refuse probe passes that reach beyond the longest sequence of the model."""
    for probe in passes:
        end = probe.first_position + len(probe.token_ids)
        if end > max_tokens:
            raise DocumentTooLong(
                f"the policy runs {len(probe.token_ids)} tokens behind the document, up to position {end}, and "
                f"{name!r} takes {max_tokens} tokens; shorten the document or the probe",
                param="document",
            )


def require_room_beside(document: DocumentView, budget: Budget) -> None:
    """Refuse protected tokens that fill the budget, before any work."""
    if not document.protect or document.num_protected < budget.tokens:
        return
    if budget.tokens == document.num_tokens:
        raise InvalidRequest(
            f"protect holds all {document.num_tokens} tokens of the document, and leaves none to compress; take codec "
            "none and policy full, or protect less",
            param="protect",
        )
    raise InvalidRequest(
        f"protect holds {document.num_protected} tokens, and the budget is {budget.tokens} of the document's "
        f"{document.num_tokens} entries per KV head, protected ones included; protect less, lower compression_ratio or "
        "raise budget_tokens",
        param="protect",
    )


def require_protectable(document: DocumentView, absorber: Absorber | None, *, moves: bool) -> None:
    """Refuse protected tokens where entries are gone before the document is read, and where they move. moves: as of
    `require_compressible`."""
    if not document.protect:
        return
    if moves:
        raise InvalidRequest(
            "positions=cache rotates every key to its place in the cache, and protected tokens stay as the model makes "
            "them; take positions=absolute, or leave protect out",
            param="protect",
        )
    if absorber is not None:
        raise InvalidRequest(
            "prefill=chunked reduces a document before all of it is read; take prefill=whole, or leave protect out",
            param="protect",
        )


def require_unprotected(document: DocumentView, codec: Codec) -> None:
    """Refuse protected tokens among the blocks of an index that a codec rounds."""
    if document.protect and codec.name != "none":
        raise InvalidRequest(
            f"an index needs the entries of its blocks together, and protect holds some apart from codec {codec}; take "
            "codec none, or another policy",
            param="protect",
        )
