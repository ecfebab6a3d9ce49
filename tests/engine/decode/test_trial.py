"""A grammar is judged by the processor time of its process, and by no clock."""

from __future__ import annotations

import signal
import subprocess
import threading
from contextlib import suppress
from typing import Any

import pytest

from kvshelf.engine.decode.grammar import Grammar
from kvshelf.engine.decode.trial import HANG_S, Trials
from kvshelf.errors import DeadlineExceeded

GRAMMAR = Grammar.of({"choices": ["red", "green"]})


def compile_at_last(trials: Trials) -> None:
    """On a busy machine the start of a process may take longer than the test's limit."""
    while True:
        with suppress(DeadlineExceeded):
            return trials.require_compiled(GRAMMAR)


@pytest.mark.parametrize("hang_s", [2.0, HANG_S], ids=["stopped", "ended by the system"])
def test_a_process_without_a_processor_says_nothing_of_the_grammar(
    tiny, monkeypatch: pytest.MonkeyPatch, hang_s: float
) -> None:
    started, start = [], subprocess.Popen

    def recorded(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(start(*args, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", recorded)
    trials = Trials(tiny.text.decoder().to_str(), hang_s=hang_s)
    compile_at_last(trials)
    process = started[-1]
    process.send_signal(signal.SIGSTOP)
    end = threading.Timer(0.5, process.kill)
    if hang_s == HANG_S:
        end.start()
    with pytest.raises(DeadlineExceeded, match=r"used less than 2 s of a processor after [\d.]+ s.*try again later"):
        trials.require_compiled(GRAMMAR)
    end.cancel()
    compile_at_last(trials)
    assert started[-1] is not process
    del trials
