"""What a replica holds of each card that its model is spread over (`device_map`). The least of them decides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Unpack

import torch

from kvshelf.model.devices import Placement
from kvshelf.model.layers import layer_kinds
from kvshelf.workers.replica.create.plan import MemoryPlan, PlanLimits, machine_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvshelf.engine.engine import Engine
    from kvshelf.workers.replica.create.auto import PolicyChoice
    from kvshelf.workers.replica.create.spec import Levels

_TRIES: Final = 4
"""At a placement that leaves room for what the layers of each card hold."""


@dataclass(frozen=True)
class SpreadPlan:
    """Has the methods of a `MemoryPlan`, each for all cards.

    whole: the plan of the model, were it on one card. cards: of each device where weights lie or layers compute; of
    the host only if they do. most: the bytes of weights that may lie on each card, by its number, and in the memory of
    the host ("cpu"), for `loading.load`: what is left of a card is for its layers' part of all else."""

    whole: MemoryPlan
    cards: tuple[MemoryPlan, ...]
    most: Mapping[int | str, int]

    @classmethod
    def of_name(cls, name: str, shown: str, *, dtype: str, **limits: Unpack[PlanLimits]) -> SpreadPlan:
        """Over all GPUs that this process sees, before any weight is read. shown: the model's name for callers. Raises
        `InvalidRequest` for a dtype that they lack."""
        from transformers.integrations.accelerate import get_max_memory

        from kvshelf.model.loading import outline

        model = outline(name, device="spread", dtype=dtype)
        whole = MemoryPlan.of(model, shown, torch.device("cuda", 0), **limits)
        most: dict[int | str, int] = {
            card: torch.cuda.mem_get_info(card)[0] for card in range(torch.cuda.device_count())
        }
        most["cpu"] = min(machine_bytes(), int(get_max_memory().get("cpu", 0)))  # none where it is the cards' own
        plan = cls.placed(whole, model, Placement.expected(model, most), most)
        for _ in range(_TRIES):
            if all(card.fits for card in plan.cards):
                break
            # Layers of weights in the host's memory are computed on a card all the same, which keeps their caches.
            offloaded = sum(card.weights for card in plan.cards) < whole.weights
            room: dict[int | str, int] = {
                torch.device(card.device).index: card.beside_others if offloaded else card.for_weights
                for card in plan.cards
            }
            most = {number: min(nbytes, room.get(number, nbytes)) for number, nbytes in most.items()}
            placement = Placement.expected(model, most)
            if all(device.type == "cpu" for device in placement.layers):
                break  # the refusal of the cards is better than a model that answers from the CPU
            plan = cls.placed(whole, model, placement, most)
        return plan

    @classmethod
    def placed(
        cls, whole: MemoryPlan, model: PreTrainedModel, placement: Placement, most: Mapping[int | str, int]
    ) -> SpreadPlan:
        """The plan of a model, with or without weights, that is placed so. Other arguments as the fields."""
        kinds, cards = layer_kinds(model.config), []
        for device in sorted({*placement.layers, *placement.weights}, key=str):
            here = [kind for kind, at in zip(kinds, placement.layers, strict=True) if at == device]
            if here or device.type != "cpu":
                card = whole.on(device, placement.weights.get(device, 0), here, len(kinds))
                cards.append(card if placement.alone else replace(card, recorded=0))
        return cls(whole, tuple(cards), most)

    def loaded(self, engine: Engine) -> SpreadPlan:
        """The same plan, with the weights of an engine as they are."""
        placement = Placement.of(engine.model)
        if (images := engine.facts.images) is not None:
            inputs = engine.passes.devices.inputs
            weights = {**placement.weights, inputs: placement.weights.get(inputs, 0) + images.nbytes}
            placement = replace(placement, weights=weights)
        return self.placed(self.whole, engine.model, placement, self.most)

    @property
    def longest(self) -> int:
        """As of a `MemoryPlan`: of the card where the least fits."""
        return min(card.longest for card in self.cards)

    def __str__(self) -> str:
        return "\n".join(map(str, self.cards))

    def require(self) -> None:
        for card in self.cards:
            card.require()

    def keep(self) -> None:
        for card in self.cards:
            card.keep()

    def require_room(self, engine: Engine, work: Levels | PolicyChoice) -> None:
        for card in self.cards:
            card.require_room(engine, work)

    def fitting(self, engine: Engine, choice: PolicyChoice) -> PolicyChoice:
        for card in self.cards:
            choice = card.fitting(engine, choice)
        return choice


def plan_of_name(
    name: str, shown: str, *, device: str, dtype: str, rounded: bool = False, **limits: Unpack[PlanLimits]
) -> MemoryPlan | SpreadPlan:
    """The plan of a model on its device, or on all GPUs that this process sees (device "spread"). Other arguments and
    errors as of `MemoryPlan.of_name`."""
    if device != "spread":
        return MemoryPlan.of_name(name, shown, device=device, dtype=dtype, rounded=rounded, **limits)
    if not torch.cuda.is_available():  # then it is on the CPU as a whole
        return MemoryPlan.of_name(name, shown, device="cpu", dtype=dtype, **limits)
    return SpreadPlan.of_name(name, shown, dtype=dtype, **limits)
