"""What follows a row of a batch: it gets what it wants, and its errors are its row's alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvshelf.engine.decode.generation import Sampling
from kvshelf.engine.decode.hooks import RowHook, Wants


class Noting(RowHook):
    """Wants the states of the question and notes what happens, in order."""

    def __init__(self, broken=None):
        self.noted = []
        self.broken = broken

    def wants(self, row, *, answering):  # noqa: ARG002
        return Wants.NOTHING if answering else Wants.STATES

    def after(self, row, shown, *, answering):
        self.noted.append(("after", answering, shown.complete, len(shown.states), row.logical))
        if self.broken == "after":
            raise KeyError("after")

    def took(self, answer):
        self.noted.append(("took", len(answer)))
        if self.broken == "took":
            raise KeyError("took")

    def close(self, answer):
        return replace(answer, passages=(b"told",))


@pytest.fixture(scope="module")
def cache(llama):
    return llama.engine.compress(llama.ids[:120], policy="full")


def started(llama, cache, hook, tokens=3):
    row = llama.engine.start(cache, llama.ids[7:11], Sampling(tokens))
    row._hooks = (hook,)
    return row


def test_a_hook_sees_what_it_wants_in_order(llama, cache):
    hook, batch = Noting(), llama.engine.batch()
    row, layers = started(llama, cache, hook), len(llama.engine.kinds)
    while not row.finished:
        batch.step([row])
    assert hook.noted[0] == ("after", False, True, layers, 4)
    assert hook.noted[1:] == [("took", 1), ("after", True, True, 0, 5), ("took", 2), ("after", True, True, 0, 6)]
    assert row.answer().passages == (b"told",)


@pytest.mark.parametrize("broken", ["after", "took"])
def test_an_error_of_a_hook_ends_its_row_alone(llama, cache, broken):
    """Raised behind the pass, it would leave the other rows a token ahead of what their callers were told."""
    batch, other = llama.engine.batch(), llama.engine.start(cache, llama.ids[7:11], Sampling(3))
    row = started(llama, cache, Noting(broken))
    failed, text = batch.step([row, other])
    assert isinstance(failed, KeyError)
    assert text == ""
    batch.leave(row)
    while not other.finished:
        assert batch.step([other]) == [""]
    expected = llama.engine.answer(cache, llama.ids[7:11], max_new_tokens=3)
    assert other.answer().token_ids == expected.token_ids


def test_an_abandoned_step_shows_a_hook_nothing(llama, cache):
    hook, batch = Noting(), llama.engine.batch()
    row = started(llama, cache, hook)

    def give_up():
        raise InterruptedError

    with pytest.raises(InterruptedError):
        batch.step([row], give_up)
    assert hook.noted == []
    batch.step([row])
    assert hook.noted[0][:3] == ("after", False, True)
