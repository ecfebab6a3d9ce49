"""What a replica plans for a model that is spread over cards that are not there, and what each of them then holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from kvshelf.artifact.records import entries_of
from kvshelf.engine.engine import Engine
from kvshelf.errors import DocumentTooLong, OutOfMemory
from kvshelf.model import loading
from kvshelf.model.devices import Placement
from kvshelf.model.layers import layer_kinds
from kvshelf.service.process.preflight import memory_plan
from kvshelf.service.settings import Settings
from kvshelf.store.url import StoreConfig
from kvshelf.workers.cluster.deployment import ReplicaConfig, _engine
from kvshelf.workers.replica.create.plan import MemoryPlan
from kvshelf.workers.replica.create.spec import Levels
from kvshelf.workers.replica.create.spread import SpreadPlan, plan_of_name
from kvshelf_bench.models.small import small_model
from tests.engine.elsewhere import ONE, devices
from tests.engine.test_spread import spread

pytest.importorskip("accelerate")

CARDS = [torch.device("cuda", number) for number in range(2)]
LIMITS: dict[str, Any] = {"attached": 8 << 20, "suffixes": 4 << 20, "answers": 4}
PLENTY = 1 << 30

Planned = Callable[..., SpreadPlan]


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Planned:
    """The plan of a model over cards of so many bytes."""

    def plan(*totals: int, model: str = "kvshelf-tiny", **limits: Any) -> SpreadPlan:
        def total(device: Any) -> int:
            return totals[device if isinstance(device, int) else device.index]

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(totals))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (total(device), total(device)))
        monkeypatch.setattr(
            torch.cuda,
            "get_device_properties",
            lambda device: SimpleNamespace(name="no card", major=9, minor=0, total_memory=total(device)),
        )
        made = plan_of_name(model, "t", device="spread", dtype="float32", **(LIMITS | limits))
        assert isinstance(made, SpreadPlan)
        return made

    return plan


def test_each_card_has_a_plan_of_its_weights_and_its_layers_share(planned: Planned, tiny: Engine) -> None:
    plan = planned(PLENTY, PLENTY)
    plan.require()
    assert [card.device for card in plan.cards] == ["cuda:0", "cuda:1"]
    whole = sum(weight.nbytes for weight in (*tiny.model.parameters(), *tiny.model.buffers()))
    assert sum(card.weights for card in plan.cards) == pytest.approx(whole, rel=1e-3)
    for card in plan.cards:
        assert (card.share, card.shape.layers, card.recorded) == (0.5, 2, 0)
        assert (card.attached, card.suffixes) == (4 << 20, 2 << 20)
        assert card.there == PLENTY
    assert str(plan).count("t on cuda:") == 2


def test_the_least_of_the_cards_decides(planned: Planned) -> None:
    plan = planned(PLENTY, 48 << 20)
    assert plan.longest == plan.cards[1].longest < plan.cards[0].longest
    assert f"has {plan.longest:,} tokens" in str(plan)


def test_layers_leave_a_card_that_has_no_room_for_what_belongs_to_them(planned: Planned) -> None:
    """The first card has room for half of all weights, but not for half of all caches beside them: it gets none."""
    assert [card.device for card in planned(60 << 20, PLENTY).cards] == ["cuda:0", "cuda:1"]
    plan = planned(30 << 20, PLENTY, attached=40 << 20)
    plan.require()
    assert [(card.device, card.shape.layers) for card in plan.cards] == [("cuda:1", 4)]
    assert 0 < plan.most[0] < 3 << 20


@pytest.mark.parametrize("attached", [50, 100])
@pytest.mark.parametrize("cards", [(900,), (900, 900)])
def test_weights_without_room_go_to_the_host_which_takes_no_layers(
    planned: Planned, tmp_path: Path, cards: tuple[int, ...], attached: int
) -> None:
    """A model of 2.2 GB in float32, of which the host gets the rest, whatever is to be beside it on each card."""
    sizes = {"hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 96, "num_attention_heads": 16}
    LlamaConfig(**sizes, num_key_value_heads=4, vocab_size=8000).save_pretrained(tmp_path)
    plan = planned(*(card << 20 for card in cards), model=str(tmp_path), attached=attached << 20)
    plan.require()
    assert sum(card.share for card in plan.cards) == 1
    assert 0 < sum(card.weights for card in plan.cards) < plan.whole.weights


def test_the_host_takes_what_is_free_there(planned: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "transformers.integrations.accelerate.get_max_memory", lambda limits=None: limits or {"cpu": 12345}
    )
    assert planned(PLENTY).most["cpu"] == 12345


def test_a_card_without_layers_decodes_nothing(planned: Planned) -> None:
    whole, kinds = planned(PLENTY).whole, layer_kinds(LlamaConfig(num_hidden_layers=4))
    assert whole.on(CARDS[0], 1, kinds[:2], 4).decoding > 0
    assert whole.on(CARDS[0], 1, [], 4).decoding == 0


@pytest.mark.parametrize("cards", [(PLENTY, 10 << 20), (10 << 20, 10 << 20), (20 << 20,)])
def test_what_fits_on_no_cards_is_refused_by_name(planned: Planned, cards: tuple[int, ...]) -> None:
    """And not computed on the CPU, where accelerate would put it."""
    with pytest.raises(
        OutOfMemory, match=r"'t' does not fit on cuda:\d: it needs .*more GPUs|KVSHELF_GPU_MEMORY"
    ) as no:
        planned(*cards, attached=PLENTY).require()
    assert (no.value.code, no.value.status) == ("out_of_memory", 507)
    assert no.value.details["needed_bytes"] > no.value.details["there_bytes"]


@pytest.fixture(scope="module")
def halves() -> Iterator[Engine]:
    """With its first two layers on one device and the others on another."""
    with devices():
        yield Engine(spread(small_model("llama"), ONE, torch.device(ONE.type, 1)), name="m")


def test_a_loaded_model_s_plan_is_what_lies_on_each_device(halves: Engine) -> None:
    plan = placed(halves)
    cache = halves.compress(list(range(2, 150)), policy="full")
    weights, held = dict.fromkeys(plan, 0), dict.fromkeys(plan, 0)
    for tensor in (*halves.model.parameters(), *halves.model.buffers()):
        weights[str(tensor.device)] += tensor.nbytes
    for layer in cache.layers:
        entries = entries_of(layer)
        assert entries is not None
        held[str(entries.keys.device)] += entries.nbytes  # type: ignore[union-attr]
    for device, card in plan.items():
        assert card.weights == weights[device]
        assert card.shape.held_bytes(148, 148) == pytest.approx(held[device], rel=0.05)


def placed(engine: Engine) -> dict[str, MemoryPlan]:
    whole = MemoryPlan.of(engine.model, engine.name, ONE)
    plan = SpreadPlan(whole, (), {}).loaded(engine)
    return {card.device: card for card in plan.cards}


def test_a_document_that_one_card_has_no_room_for_is_refused(halves: Engine) -> None:
    first, second = placed(halves).values()
    job = halves.prepare([n % 100 for n in range(300)], policy="full")
    work = Levels((halves.compressor.level(job),), False)
    whole = MemoryPlan.of(halves.model, halves.name, ONE)

    def limited(tokens: int) -> SpreadPlan:
        return SpreadPlan(whole, (first, room_for(second, tokens)), {})

    limited(300).require_room(halves, work)
    with pytest.raises(DocumentTooLong, match=rf"300 tokens needs .* on {second.device}.*\(more GPUs, or larger"):
        limited(299).require_room(halves, work)


def room_for(card: MemoryPlan, tokens: int) -> MemoryPlan:
    return replace(card, there=card.beside + card.weights + card.prefill_bytes(tokens))


def test_where_layers_keep_different_numbers_those_of_a_card_may_have_the_most(halves: Engine) -> None:
    card = placed(halves)[str(ONE)]
    needed = []
    for policy in ("keydiff", "cake"):
        job = halves.prepare([n % 100 for n in range(500)], policy=policy, compression_ratio=0.75)
        with pytest.raises(DocumentTooLong) as refused:
            room_for(card, 10).require_room(halves, Levels((halves.compressor.level(job),), False))
        needed.append(refused.value.details["needed_bytes"])
    assert needed[1] - needed[0] >= card.shape.held_bytes(500, 125)


def test_offloaded_weights_are_counted_where_they_are_copied_to() -> None:
    """The largest of them: each module's are there while it runs."""
    with devices():
        model = spread(small_model("llama"), ONE, "cpu")
        placement = Placement.of(model)
        lying = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta)
        largest = max(tensor.nbytes for tensor in model.parameters() if tensor.is_meta)
    assert placement.layers == (ONE,) * 4
    assert placement.weights == {ONE: lying + largest}
    assert not placement.alone


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_cards_a_spread_model_has_the_plan_of_the_cpu() -> None:
    assert memory_plan(Settings(device="spread"), "kvshelf-tiny").device == "cpu"  # type: ignore[union-attr]


def test_a_plan_has_a_row_for_each_card(planned: Planned) -> None:
    """As `doctor` prints them."""
    rows = str(planned(PLENTY, PLENTY)).splitlines()
    assert [row[:11] for row in rows] == ["t on cuda:0", "t on cuda:1"]


def test_weights_go_no_further_than_they_are_told() -> None:
    model, _ = loading.load("kvshelf-tiny", device="spread", dtype="float32", most={"cpu": PLENTY})
    assert Placement.of(model).layers == (torch.device("cpu"),) * 4


def test_a_replica_s_engine_has_the_placement_of_its_plan(planned: Planned, tmp_path: Path) -> None:
    """And is laid out as by `Engine.load` where no hooks are."""
    plan = replace(planned(PLENTY), most={"cpu": PLENTY})
    config = ReplicaConfig("kvshelf-tiny", StoreConfig(f"disk://{tmp_path}"), device="spread", dtype="float32")
    engine = _engine(config, plan)
    expected = Engine.load("kvshelf-tiny", device="cpu", dtype="float32")
    assert engine.name == expected.name
    assert list(map(type, engine.model.modules())) == list(map(type, expected.model.modules()))
    assert plan.loaded(engine).cards[0].device == "cpu"
