"""Copies through pinned memory on streams of their own, on a card that is not there: what arrives, and behind what."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import pytest
import torch

from kvshelf.kernels import staging
from kvshelf.kernels.staging import OfEachCard, arriving, beside, carried, events_of, leaving, received
from kvshelf.kernels.transfer import download, upload
from scripts.card import CARD, Card

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def card(monkeypatch):
    """With buffers of 4 KiB, so that tensors take many of them."""
    monkeypatch.setattr(staging, "BUFFER_BYTES", 4096)
    with Card() as card:
        yield card


def tensors(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(3, 700, 5, generator=generator),
        torch.randn(11, generator=generator).to(torch.bfloat16),
        torch.randint(0, 255, (4096,), generator=generator, dtype=torch.uint8),
        torch.empty(0, 4),
        torch.tensor(7, dtype=torch.int32),
        torch.rand(99, generator=generator) > 0.5,
        torch.randn(40, 60, generator=generator).T,
        torch.randn(40, 60, generator=generator)[:, 7],
    ]


def require_equal(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(one, other)


def test_what_is_sent_and_fetched_is_the_same():
    own = tensors()
    there, event = arriving(CARD).send(own)
    assert {tensor.device for tensor in there} == {CARD}
    received(there, event)
    require_equal([tensor.cpu() for tensor in there], own)
    require_equal(leaving(CARD).fetch(there, events_of([CARD])[CARD]), own)


def test_sending_waits_for_no_work_of_the_card():
    rows = torch.ones(5, device=CARD)
    copied = (rows + 1).to("cpu", non_blocking=True)
    received(*arriving(CARD).send(tensors()))
    assert copied.tolist() == [0] * 5, "nobody has waited for it"


def test_who_reads_before_the_event_is_refused():
    there, event = arriving(CARD).send([torch.ones(3)])
    with pytest.raises(RuntimeError, match="before the event"):
        there[0] + 1
    received(there, event)
    assert (there[0] + 1).tolist() == [2, 2, 2]


def test_fetching_waits_for_nothing_later_than_the_event():
    rows = torch.arange(4000.0, device=CARD)
    made = events_of([CARD])
    later = (rows + 1).to("cpu", non_blocking=True)
    require_equal(carried([rows], CPU, made), [torch.arange(4000.0)])
    assert not later.any()


def test_fetching_before_the_tensors_are_made_is_refused():
    early = events_of([CARD])
    rows = torch.ones(3, device=CARD) * 2
    with pytest.raises(RuntimeError, match="before the event"):
        carried([rows], CPU, early)


def test_carried_takes_tensors_of_several_devices():
    own = tensors()
    mixed = [tensor.to(CARD) if index % 2 else tensor for index, tensor in enumerate(own)]
    require_equal(carried(mixed, CPU, events_of([CARD])), own)
    require_equal([tensor.cpu() for tensor in carried(mixed, CARD, {})], own)
    assert carried([], CARD, {}) == []
    assert carried(own, CPU, {})[0] is own[0]


def test_threads_take_turns():
    def there_and_back(seed: int) -> list[torch.Tensor]:
        return carried(carried(tensors(seed), CARD, {}), CPU, events_of([CARD]))

    with ThreadPoolExecutor(4) as threads:
        for seed, back in enumerate(threads.map(there_and_back, range(12))):
            require_equal(back, tensors(seed))


def test_a_copy_that_fails_leaves_the_buffers_to_others():
    """The card runs out of memory in the middle of one."""
    own, empty = tensors(), torch.empty
    calls = iter(range(100))

    def scarce(*args, **kwargs):
        if next(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return empty(*args, **kwargs)

    way = arriving(CARD)
    with patch.object(torch, "empty", scarce), pytest.raises(torch.OutOfMemoryError):
        way.send(own)
    there = carried(own, CARD, {})
    require_equal(carried(there, CPU, events_of([CARD])), own)


def test_without_memory_to_pin_copies_are_waited_for_and_one_warning_says_so(card, caplog):
    empty = torch.empty

    def unpinned(*args, pin_memory=False, **kwargs):
        if pin_memory:
            raise RuntimeError("CUDA error: OS call failed or operation not supported on this OS\nCUDA kernel errors")
        return empty(*args, **kwargs)

    with patch.object(torch, "empty", unpinned):
        there = carried(tensors(), CARD, {})
        require_equal(carried(there, CPU, events_of([CARD])), tensors())
        require_equal(upload(tensors()[:1], CARD)[0].cpu(), tensors()[0])
        require_equal(download(there), tensors())
        assert card.waits.total() > 4 * len(there)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert caplog.messages[0].endswith(
        "slower for it: CUDA error: OS call failed or operation not supported on this OS"
    )


def test_threads_that_come_at_once_pin_one_object_of_a_card():
    made = []

    def slow(device: torch.device) -> object:
        time.sleep(0.05)
        made.append(device)
        return object()

    of_card = OfEachCard(slow)
    with ThreadPoolExecutor(4) as threads:
        owned = list(threads.map(of_card, [CARD, CPU, CARD, CARD]))
    assert sorted(map(str, made)) == ["cpu", "cuda:1"]
    assert owned[0] is owned[2] is owned[3] is not owned[1]


def test_work_beside_is_done_when_its_block_ends():
    with beside(CARD) as lend:
        doubled = torch.ones(3).to(CARD) * 2
        lend([doubled, torch.ones(1)])
    assert (doubled + 1).tolist() == [3, 3, 3]
    with beside(CPU) as lend:
        lend([torch.ones(1)])
