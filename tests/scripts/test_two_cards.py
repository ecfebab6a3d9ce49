"""A model whose layers are on two cards that are not there: kernels, streams and copies of each, and answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvshelf.engine.engine import Engine
from kvshelf.kernels.staging import arriving, carried, events_of, leaving
from kvshelf.model import loading
from scripts.card import CARD, FIRST_CARD, Card
from tests.amounts import few

hooks = pytest.importorskip("accelerate.hooks")

CPU = torch.device("cpu")
TEXT = "The access code of the amber falcon is 482913. The tide turns and the boats wait."


def test_cards_have_streams_and_buffers_of_their_own_and_do_not_mix():
    with Card():
        here, there = torch.ones(3, device=CARD), torch.ones(3, device=FIRST_CARD)
        with pytest.raises(RuntimeError, match="tensors of cuda:0 and cuda:1"):
            here + there
        assert (here + there.to(CARD)).tolist() == [2, 2, 2]
        assert arriving(CARD) is not arriving(FIRST_CARD)
        assert arriving(FIRST_CARD).stream is not torch.cuda.current_stream(FIRST_CARD)
        moved = carried([here * 2, there * 3], CPU, events_of([CARD, FIRST_CARD]))
        assert [tensor.tolist() for tensor in moved] == [[2] * 3, [3] * 3]
        assert leaving(CARD).stream is not leaving(FIRST_CARD).stream


@pytest.fixture(scope="module")
def engines():
    """Of the same model on the CPU, and with its last two layers on another card, by accelerate's hooks."""
    here = Engine(*loading.load("kvshelf-tiny", device="cpu", dtype="float32"), name="kvshelf-tiny")
    model, tokenizer = loading.load("kvshelf-tiny", device="cpu", dtype="float32")
    with Card() as card:
        card.put(model)
        decoder: Any = model.base_model
        parts = [(layer, FIRST_CARD if index > 1 else CARD) for index, layer in enumerate(decoder.layers)]
        for part, device in [*parts, (decoder.norm, CARD)]:
            card.put(part, device)
            hook = hooks.AlignDevicesHook(device, skip_keys=model._skip_keys_device_placement)
            part._hf_hook, forward = hook, part.forward
            part.forward = _aligned(hook, part, forward)
        yield here, Engine(model, tokenizer, name="kvshelf-tiny")


def _aligned(hook: Any, module: Any, forward: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return forward(*args, **kwargs)

    return run


@pytest.mark.parametrize(("policy", "codec"), few(1, [("keydiff", "none"), ("ada", "int8"), ("keydiff", "klt")]))
def test_layers_on_two_cards_keep_and_answer_as_on_the_cpu(engines, policy, codec):
    here, there = engines
    assert there.passes.devices.layers == (CARD, CARD, FIRST_CARD, FIRST_CARD)
    ours, expected = (engine.compress(TEXT, policy=policy, compression_ratio=0.5) for engine in (there, here))
    assert [layer.keys.device for layer in ours.layers] == [CARD, CARD, FIRST_CARD, FIRST_CARD]
    for mine, other in zip(ours.layers, expected.layers, strict=True):
        assert [head.tolist() for head in mine.positions] == [head.tolist() for head in other.positions]
    answer = here.answer(here.encoded(expected, codec), "What is the code?", max_new_tokens=4)
    for stored in (there.encoded(ours, codec), here.encoded(expected, codec)):
        assert there.answer(stored, "What is the code?", max_new_tokens=4).token_ids == answer.token_ids
