"""Latent attention (MLA) over the cache: its products of weights, and latents on their way to the attention function.

A module of transformers caches latents and the rotated part of the keys that all heads share, and makes keys and values
of every head from them (`expand_kv`) before it calls the attention function. Over a stored document that would expand
all of its tokens at every step. Attention is the same in the latent space (DeepSeek-V2, arXiv 2405.04434, section
2.1.2): with key = W_uk latent, q . key = (W_uk^T q) . latent, and the mean of values W_uv latent is W_uv times the mean
of the latents. All query heads then read one KV head.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from torch import Tensor, nn

from kvshelf.errors import PolicyUnsupported, StateConflict
from kvshelf.kernels.prefix_attention import LogitRules

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LATENTS: Final = "kvshelf_latents"
"""Name of the keyword that carries the `Handover` of a pass into every layer."""

_SAMPLES: Final = 4
"""Latents on which `Absorbed` is compared with the module."""

_ROUNDING: Final = {torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Largest difference to the module, relative to the largest number, that rounding explains; else 1e-4."""


@dataclass(frozen=True, eq=False)
class Absorbed:
    """The products that make keys and values of latents, applied to queries and outputs instead.

    into: W_uk, `[q_heads, nope, rank]`. back: W_uv, `[q_heads, rank, Dv]`. A head's key is `[W_uk latent, rotated]`.
    FLOPs of a token: 2 * q_heads * rank * (nope + Dv), those of expanding one token.
    """

    into: Tensor
    back: Tensor

    @classmethod
    def of(cls, module: nn.Module, dtype: torch.dtype, device: torch.device) -> Absorbed:
        """From the keys and values that the module makes of unit vectors, because families store the weights
        differently.

        Raises `PolicyUnsupported` where keys and values are no linear function of the latents, with the rotated part
        behind it as it is.
        """
        rank, rope = int(module.kv_lora_rank), int(module.qk_rope_head_dim)  # type: ignore[arg-type]
        units = torch.eye(rank + rope)
        samples = torch.linspace(-9, 9, _SAMPLES * (rank + rope)).sin().view(_SAMPLES, -1)
        latents, rotated = torch.split(torch.cat([units, samples]).to(device, dtype), [rank, rope], dim=1)
        keys, values = module.expand_kv(latents[None, None], rotated[None, None])  # type: ignore[operator]
        parts = keys[0, ..., :-rope], values[0]  # [q_heads, rank + rope + samples, nope or Dv]
        of_units = [part[:, :rank].contiguous() for part in parts]
        sampled = latents[-_SAMPLES:].float()
        linear = bool((keys[0, ..., -rope:] == rotated).all()) and all(
            not part[:, rank:-_SAMPLES].nan_to_num().any()
            and close(part[:, -_SAMPLES:].float(), sampled @ product.float(), _ROUNDING.get(dtype, 1e-4))
            for part, product in zip(parts, of_units, strict=True)
        )
        if not linear:
            raise PolicyUnsupported(
                f"{type(module).__name__} makes keys and values of its latents by more than a product of matrices, so "
                "kvshelf cannot attend to the latents themselves",
                param="model",
            )
        return cls(of_units[0].transpose(1, 2).contiguous(), of_units[1])

    def queries(self, queries: Tensor) -> Tensor:
        """Queries `[B, q_heads, T, nope + rope]` for keys `[latent, rotated]`: `[B, q_heads, T, rank + rope]`."""
        nope = self.into.shape[1]
        return torch.cat([torch.matmul(queries[..., :nope], self.into), queries[..., nope:]], dim=-1)

    def outputs(self, outputs: Tensor) -> Tensor:
        """Means of latents `[B, T, q_heads, rank]` as means of values, `[B, T, q_heads, Dv]`."""
        return torch.matmul(outputs.transpose(1, 2), self.back).transpose(1, 2)


def close(actual: Tensor, expected: Tensor, share: float) -> bool:
    """Whether numbers differ by no more than this share of the largest that is expected; also where weights are broken
    and nothing is a number, which is refused elsewhere."""
    difference, largest = torch.stack([(actual - expected).abs().max(), expected.abs().max()]).tolist()
    return not difference > share * largest


def absorbed_layers(model: PreTrainedModel, devices: Sequence[torch.device]) -> dict[int, Absorbed]:
    """The layers of a model that have latents. devices: of all layers. Raises as `Absorbed.of`."""
    modules = {int(module.layer_idx): module for module in latent_modules(model)}  # type: ignore[arg-type]
    with torch.no_grad():
        return {layer: Absorbed.of(module, model.dtype, devices[layer]) for layer, module in modules.items()}


def latent_modules(model: nn.Module) -> list[nn.Module]:
    """The attention modules of a model that cache latents."""
    return [module for module in model.modules() if hasattr(module, "expand_kv")]


class _Attends(Protocol):  # `AttachedStates`
    def attend(self, queries: Tensor, rules: LogitRules) -> Tensor: ...
    def check_positions(self, position_ids: Tensor | None) -> None: ...


@dataclass(frozen=True, eq=False)
class LatentStates:
    """Latents `[B, 1, T, rank]` and rotated parts `[B, 1, T, rope]` of this call's tokens in one layer.

    past: the latents that these tokens see, as keys and values of one KV head, and how to attend to them; None for a
    pass over its own tokens alone, whose keys and values the module has expanded.
    """

    latents: Tensor
    rotated: Tensor
    past: tuple[_Attends, Absorbed] | None = None

    def attend(self, queries: Tensor, rules: LogitRules, position_ids: Tensor | None) -> Tensor | None:
        """Attention of queries `[B, q_heads, T, D]` over the past: `[B, T, q_heads, Dv]`. None without one."""
        if self.past is None:
            return None
        states, absorbed = self.past
        states.check_positions(position_ids)
        return absorbed.outputs(states.attend(absorbed.queries(queries), rules))


class Handover:
    """Carries each layer's latents from the cache to the attention function, past the module, which takes them for
    those of the whole sequence and expands them.

    A module may call any attention function with the expanded keys and values, and would get an answer without the
    document. So a cache takes no latents outside of a pass that was begun for kvshelf's attention, nor in a pass in
    which kvshelf's attention has not taken those of an earlier layer.
    """

    def __init__(self, layers: Collection[int]) -> None:
        self._layers = frozenset(layers)
        self._awaited: set[int] = set()
        self._carried: dict[int, LatentStates] = {}

    def begin(self) -> dict[str, Any]:
        """Begin a pass. Returns keywords for the model's attention function."""
        self._awaited, self._carried = set(self._layers), {}
        return {LATENTS: self} if self._layers else {}

    def end(self) -> None:
        self._awaited, self._carried = set(), {}

    def require_none(self) -> None:
        """Refuse a pass of another attention function, where any layer has latents."""
        if self._layers:
            raise _foreign_attention()

    def require_awaited(self, layer: int) -> None:
        """Refuse latents of this layer outside of a pass, and behind those of a layer that attention did not take."""
        if layer not in self._awaited or self._carried:
            raise _foreign_attention()

    def give(self, layer: int, states: LatentStates) -> None:
        """From the cache. Raises as `require_awaited`."""
        self.require_awaited(layer)
        self._awaited.remove(layer)
        self._carried[layer] = states

    def take(self, layer: int) -> LatentStates | None:
        """To the attention function; None for a layer without latents."""
        return self._carried.pop(layer, None)


def _foreign_attention() -> StateConflict:
    return StateConflict(
        "an attached cache of latents was given to a model that does not run kvshelf's attention; use it inside "
        "`with engine.attached(cache) as past:` with that engine's model"
    )
