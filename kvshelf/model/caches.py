"""Models whose code takes no cache but of a class of its own."""

from __future__ import annotations

import sys
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar, cast

from torch import Tensor
from transformers.cache_utils import Cache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

C = TypeVar("C", bound=Cache)


def cache_class(base: type[C], model: PreTrainedModel) -> type[C]:
    """The class of caches to make for a model in place of `base`: itself, or a subclass of it and of the model's own
    class (MiniMax)."""
    classes: tuple[Any, Any] = base, own_class(model)
    return base if classes[1] is None else cast("type[C]", _both(*classes))


@cache
def _both(base: Any, own: Any) -> Any:
    bases = (_LinearStates, own) if issubclass(own, base) else (base, _LinearStates, own)
    return type(f"{base.__name__}Of{own.__name__}", bases, {})


def own_class(model: PreTrainedModel) -> type[Cache] | None:
    """The class of caches that a model's code has for itself."""
    code = sys.modules[type(model).__module__]
    found = (each for each in vars(code).values() if isinstance(each, type) and issubclass(each, Cache))
    return next((each for each in found if each.__module__ == code.__name__), None)


def has_linear_states(own: type[Cache]) -> bool:
    """Whether `cache_class` knows how a model's own class is asked for states."""
    return hasattr(own, "get_linear_cache") and hasattr(own, "set_linear_cache")


class _LinearStates(Cache):  # type: ignore[misc]
    """The states of lightning attention, `[B, heads, D, D]`, in the layers of a cache. Stands before a class that keeps
    them beside its layers, of which nothing but the name is left."""

    is_croppable = getattr(Cache, "is_croppable", False)  # which older transformers have not
    __init__ = Cache.__init__
    __len__ = Cache.__len__
    batch_repeat_interleave = Cache.batch_repeat_interleave
    batch_select_indices = Cache.batch_select_indices
    crop = Cache.crop

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """None before any token: then the module reads the tokens in blocks."""
        found: Tensor | None = self.get_recurrent_state(layer_idx)
        return found

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """Behind the tokens of a pass."""
        self.update_recurrent_state(linear_cache, layer_idx)
        self.layers[layer_idx].has_previous_state[0] = True  # which elsewhere a convolution's state says
