"""Steps in slots where a model's program runs them, as on a GPU, under Triton's interpreter."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch

from kvshelf.engine.decode.batch import DecodeBatch
from kvshelf.engine.decode.generation import Sampling
from kvshelf.engine.decode.slots.seating import PassOutcome, Replay
from kvshelf.engine.decode.slots.slots import Slots
from kvshelf.engine.engine import Engine
from tests.engine.forward.test_program import made

CPU = torch.device("cpu")


@pytest.mark.slow
def test_the_pass_of_a_program_sits_in_slots_and_waits_for_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The program is there before a pass is recorded: to make it asks for numbers, and loads kernels."""
    pytest.importorskip("triton")
    monkeypatch.setenv("KVSHELF_KERNELS", "triton")
    engine = Engine(made("llama", num_hidden_layers=1), name="m")
    document = engine.attach(engine.compress(list(range(20)), policy="keydiff"))
    recorded: list[bool] = []

    def recorder(forward: Callable[[], PassOutcome]) -> Replay:
        recorded.append("program" in vars(engine.passes))
        return forward

    def answered(slots: Slots | None) -> list[list[int]]:
        batch = DecodeBatch(engine.passes, slots)
        rows = [engine.start(document, [seed, 7, 90], Sampling(4)) for seed in range(2)]
        while not rows[0].finished:
            batch.step(rows)
        return [row.token_ids for row in rows]

    assert answered(Slots(CPU, recorder)) == answered(None)
    assert recorded == [True]
    assert engine.passes.program is not None
    assert not engine.passes.program.in_c
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
