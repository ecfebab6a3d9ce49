"""A grammar is judged by the processor time of its process, and by no clock."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from kvshelf.engine.decode import trial
from kvshelf.engine.decode.grammar import Grammar
from kvshelf.engine.decode.trial import Trials
from kvshelf.errors import DeadlineExceeded

GRAMMAR = Grammar.of({"choices": ["red", "green"]})


@pytest.fixture
def trials(tiny) -> Iterator[Trials]:
    """With a process that has compiled a grammar, and waits."""
    trials = Trials(tiny.text.decoder().to_str())
    trials.require_compiled(GRAMMAR)
    yield trials
    trials.close()


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "ended by the system"])
def test_a_process_without_a_processor_says_nothing_of_the_grammar(
    trials: Trials, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setattr(trial, "_HANG_S", 0.5)
    process = trials._idle.queue[0]
    write = trial._write

    def end_and_write(*given) -> None:
        os.kill(process.pid, number)
        write(*given)

    monkeypatch.setattr(trial, "_write", end_and_write)
    with pytest.raises(DeadlineExceeded, match=r"used less than 2 s of a processor after 0\.5 s.*try again later"):
        trials.require_compiled(GRAMMAR)
    monkeypatch.undo()
    trials.require_compiled(GRAMMAR)
    assert trials._idle.queue[0] is not process
