"""Models whose code takes only caches of a class of its own."""

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
    """The class of a model's caches: `base`, or a subclass of it and of the model's own class (MiniMax)."""
    classes: tuple[Any, Any] = base, own_class(model)
    return base if classes[1] is None else cast("type[C]", _both(*classes))


@cache
def _both(base: Any, own: Any) -> Any:
    bases = (_LinearStates, own) if issubclass(own, base) else (base, _LinearStates, own)
    return type(f"{base.__name__}Of{own.__name__}", bases, {})


def own_class(model: PreTrainedModel) -> type[Cache] | None:
    """The class of caches that a model's code defines; None if it defines none."""
    code = sys.modules[type(model).__module__]
    classes = (kind for kind in vars(code).values() if isinstance(kind, type) and issubclass(kind, Cache))
    return next((kind for kind in classes if kind.__module__ == code.__name__), None)


def has_linear_states(own: type[Cache]) -> bool:
    """Whether a model's own class has the methods that `cache_class` needs."""
    return hasattr(own, "get_linear_cache") and hasattr(own, "set_linear_cache")


class _LinearStates(Cache):  # type: ignore[misc]
    """The states of lightning attention, `[B, heads, D, D]`, in the layers of a cache. As the first base it replaces
    the methods of a class that keeps them beside its layers."""

    is_croppable = getattr(Cache, "is_croppable", False)  # which older transformers have not
    __init__ = Cache.__init__
    __len__ = Cache.__len__
    batch_repeat_interleave = Cache.batch_repeat_interleave
    batch_select_indices = Cache.batch_select_indices
    crop = Cache.crop

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """None before any token: then the module reads the tokens in blocks."""
        state: Tensor | None = self.get_recurrent_state(layer_idx)
        return state

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """Called after the tokens of a pass."""
        self.update_recurrent_state(linear_cache, layer_idx)
        self.layers[layer_idx].has_previous_state[0] = True  # other models set it with their convolution's state
