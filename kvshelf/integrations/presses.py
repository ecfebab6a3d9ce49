"""Presses of kvpress as policies: `press:criticalkv` is `CriticalKVPress`, where the package kvpress is installed."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, make_dataclass, replace
from functools import cache
from importlib import import_module
from importlib.metadata import version
from inspect import Parameter, cleandoc, signature
from types import NoneType
from typing import Any, ClassVar, Literal, Self, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn

from kvshelf.artifact.records import Kept
from kvshelf.engine.attention.attached import IMPLEMENTATION
from kvshelf.errors import InvalidRequest, PolicyUnsupported
from kvshelf.methods.method import Needs, parameter, parameter_fields
from kvshelf.methods.policies.base import Policy, keep
from kvshelf.methods.policies.budgets import Budget, LayerBudget
from kvshelf.methods.policies.view import DocumentView, LayerView
from kvshelf.model.prepacking import PackedLinear

_SIMPLE = (bool, int, float, NoneType)
"""Types of parameters that a request can give, beside a choice of words: a free text may name a file or a data set."""

_BASE = "snapkv"
"""What presses are made around by default."""

_SET_ELSEWHERE = ("self", "compression_ratio", "press")


@dataclass(frozen=True)
class Pressed(Policy):
    """The policy of one press: any class of kvpress that scores entries (`ScorerPress`), or is made around one that
    does, which then has a parameter `base`, and those of its base beside its own. The press's forward hook runs on a
    cache with one layer; kvshelf keeps those of its own entries that are left there.

    What the chat template writes before the document stays, and the press sees what follows. It may keep other numbers
    of entries than the budget, as it does in kvpress. Random numbers are those of a fixed seed for each layer. A cache
    names the version of kvpress.
    """

    needs: ClassVar[Needs] = Needs.CALL
    press_class: ClassVar[type[Any]]

    inner: Pressed | None = None
    press: Any = field(default=None, compare=False, repr=False)
    """Of one document, because a press keeps what it has seen."""

    @classmethod
    def build(cls, params: Mapping[str, Any], known: Mapping[str, type[Any]]) -> Self:
        names = {f.name for f in parameter_fields(cls)}
        around = "base" in names
        policy = super().build({k: v for k, v in params.items() if k in names or not around}, known)
        if around:
            base = presses()[policy.parameters()["base"]]
            policy = replace(policy, inner=base.build({k: v for k, v in params.items() if k not in names}, known))
        policy._make()  # refuses values that the press does not take
        return policy

    def parameters(self) -> dict[str, Any]:
        return ({} if self.inner is None else self.inner.parameters()) | super().parameters()

    @property
    def revision(self) -> int:
        numbers = [int(part) for part in version("kvpress").split(".")[:3] if part.isdigit()]
        return sum(number * 1000**place for place, number in enumerate(reversed(numbers)))

    @property
    def exact(self) -> bool:
        return False

    def has_work(self, budget: Budget, num_tokens: int) -> bool:
        return not self.takes_budget or super().has_work(budget, num_tokens)

    def fitted(self, document: DocumentView, budget: Budget, given: frozenset[str]) -> Self:
        policy = super().fitted(document, budget, given)
        press, first = self._make(), document.protected_prefix
        if self.takes_budget:
            press.compression_ratio = _ratio(
                document.num_tokens - first, budget.tokens - first, budget.compression_ratio
            )
        return replace(policy, press=press)

    def reduce(self, layer: LayerView, budget: LayerBudget) -> Kept:  # noqa: ARG002 - the press knows it
        call, first = layer.call, layer.protected_prefix
        assert call is not None, "the policy says that it needs the call"
        from transformers import DynamicCache

        module, past = _alone(layer.module, call.model), DynamicCache()
        keys, values = layer.keys[None, :, first:], layer.values[None, :, first:]
        past.update(keys, values, layer.layer_idx)
        places = torch.arange(keys.shape[2], device=keys.device)
        of_tokens = slice(first, layer.num_tokens)
        named = {
            **call.arguments,
            "hidden_states": call.arguments["hidden_states"][:, of_tokens],
            "position_embeddings": tuple(
                embedding[:, of_tokens] for embedding in call.arguments["position_embeddings"]
            ),
            "past_key_values": past,
            "cache_position": places,
        }
        try:
            with torch.random.fork_rng():
                torch.manual_seed(layer.layer_idx)
                if layer.place == 0:
                    self.press.post_init_from_model(call.model)
                self.press.forward_hook(module, (), named, (None, None))
        except Exception as error:  # another package's code may raise anything
            raise PolicyUnsupported(
                f"policy {self.name!r} cannot compress this: {type(error).__name__}: {error}", param="policy"
            ) from error
        pressed = past.layers[layer.layer_idx]
        mask = torch.ones(layer.kv_heads, layer.num_tokens, dtype=torch.bool, device=keys.device)
        mask[:, first:] = self._mask_of_kept((keys[0], values[0]), (pressed.keys[0], pressed.values[0]))
        if (hidden := getattr(module, "masked_key_indices", None)) is not None:
            _, heads, columns = hidden
            mask[heads, columns + first] = False
        return keep(layer, mask)

    def _mask_of_kept(self, of_all: tuple[Tensor, Tensor], of_kept: tuple[Tensor, Tensor]) -> Tensor:
        """Which entries of each head are left, `[kv_heads, n]` bool, by the bits of their keys and values."""
        mask = torch.zeros(of_all[0].shape[:2], dtype=torch.bool)
        for head, (every, some) in enumerate(zip(_rows(*of_all), _rows(*of_kept), strict=True)):
            places: dict[bytes, list[int]] = {}
            for place, row in enumerate(every):
                places.setdefault(row, []).append(place)
            for row in some:
                if not places.get(row):
                    raise PolicyUnsupported(
                        f"policy {self.name!r} changes the entries that it keeps, and kvshelf stores those of the "
                        "model; choose another press",
                        param="policy",
                    )
                mask[head, places[row].pop(0)] = True
        return mask.to(of_all[0].device)

    def _make(self) -> Any:
        parameters = {f.name: getattr(self, f.name) for f in parameter_fields(type(self)) if f.name != "base"}
        if self.inner is not None:
            parameters["press"] = self.inner._make()
        try:
            return self.press_class(**parameters)
        except Exception as error:  # another package's code may raise anything
            message = f"policy {self.name!r} does not take these parameters: {type(error).__name__}: {error}"
            raise InvalidRequest(message, param="policy_params") from error


def _rows(keys: Tensor, values: Tensor) -> Iterator[list[bytes]]:
    """The bytes of each entry, by head."""
    for head in torch.cat([keys, values], dim=-1).contiguous().cpu().view(torch.uint8).numpy():
        yield [row.tobytes() for row in head]


def _ratio(num_tokens: int, kept: int, ratio: float) -> float:
    """The ratio by which a press keeps so many of these tokens: `ratio` where it does."""
    return ratio if int(num_tokens * (1 - ratio)) == kept else 1 - (kept + 0.5) / num_tokens


def _alone(module: nn.Module | None, model: Any) -> Any:
    """The attention module for a press, which may leave something at it, and reads weights as they are in the
    checkpoint. The model's own module stays as it is."""
    alone: Any = copy.copy(module)
    alone._modules = {name: _plain(child) for name, child in alone._modules.items()}
    alone.rotary_emb = model.base_model.rotary_emb
    return alone


def _plain(module: nn.Module | None) -> nn.Module | None:
    if not isinstance(module, PackedLinear):
        return module
    weight = module.unpacked
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=module.bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if module.bias is not None:
        linear.bias = nn.Parameter(module.bias, requires_grad=False)
    return linear


@cache
def presses() -> Mapping[str, type[Pressed]]:
    """The presses that requests can make, by the names of their classes without `Press`, in lower case.

    Raises `InvalidRequest` where kvpress cannot be imported.
    """
    kvpress = _imported()
    scorer = kvpress.ScorerPress
    named = {name: getattr(kvpress, name) for name in sorted(kvpress.__all__) if name.endswith("Press")}
    named = {name: cls for name, cls in named.items() if cls is not scorer and _fits(cls, scorer)}
    bases = {_name(name): cls for name, cls in named.items() if issubclass(cls, scorer) and not _wraps(cls)}
    return {_name(name): _policy(cls, bases) for name, cls in named.items()}


def _imported() -> Any:
    """kvpress, which wraps every attention function that is registered. Those of kvshelf are taken out again: they get
    stored caches, which the wrapper does not know."""
    try:
        kvpress = import_module("kvpress")
    except Exception as error:  # beside a transformers that it does not know it may raise anything
        raise InvalidRequest(
            f"policies with 'press' are those of kvpress, which cannot be imported: {type(error).__name__}: {error}; "
            "it needs a transformers of its own (pip install kvpress says which)",
            param="policy",
        ) from error
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for name in [name for name in ALL_ATTENTION_FUNCTIONS._local_mapping if name.startswith(IMPLEMENTATION)]:
        del ALL_ATTENTION_FUNCTIONS._local_mapping[name]  # also those under which passes are recorded and gates trained
    return kvpress


def _name(press: str) -> str:
    return press.removesuffix("Press").lower()


def _wraps(cls: type) -> bool:
    return "press" in signature(cls).parameters


def _fits(cls: type, scorer: type) -> bool:
    """Whether a press scores or is made around one that does, and a request can give all its parameters."""
    defaults = [field.default for name, field in signature(cls).parameters.items() if name not in _SET_ELSEWHERE]
    return (issubclass(cls, scorer) or _wraps(cls)) and Parameter.empty not in defaults


def _takes_ratio(cls: type, base: type) -> bool:
    """Whether a press, made around `base` where it is made around another one, removes a given part."""
    try:
        press: Any = cls(press=base()) if _wraps(cls) else cls()
        press.compression_ratio = 0.5
    except AttributeError:
        return False
    return True


def _policy(cls: type, bases: Mapping[str, type]) -> type[Pressed]:
    """The policy of a press. bases: the presses that another one can be made around."""
    hints = get_type_hints(cls.__init__)  # type: ignore[misc]
    fields: list[tuple[str, Any, Any]] = []
    for name, setting in signature(cls).parameters.items():
        if name not in _SET_ELSEWHERE and (kinds := _types(hints.get(name), setting.default)) is not None:
            help_text = f"see {cls.__name__} of kvpress"
            fields.append((name, *kinds[:1], parameter(setting.default, help_text, choices=kinds[1])))
    if _wraps(cls):
        help_text = "the press that scores; its own parameters are given beside this one"
        fields.insert(0, ("base", str, parameter(_BASE, help_text, choices=tuple(bases))))
    about = {
        "__doc__": cleandoc(cls.__doc__ or ""),
        "name": f"press:{_name(cls.__name__)}",
        "source": f"{cls.__name__} of kvpress {version('kvpress')}",
        "press_class": cls,
        "takes_budget": _takes_ratio(cls, bases[_BASE]),
    }
    return make_dataclass(cls.__name__, fields, bases=(Pressed,), frozen=True, namespace=about)


def _types(hint: Any, default: Any) -> tuple[Any, tuple[Any, ...] | None] | None:
    """The type of a parameter and its choices; None for one that no request can give."""
    if get_origin(hint) is Literal:
        return str, get_args(hint)
    kinds = get_args(hint) or (hint,)
    return (hint, None) if all(kind in _SIMPLE for kind in kinds) and type(default) in _SIMPLE else None
