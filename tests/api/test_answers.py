"""Answers as values: what travels between processes, and the ids beside the shares."""

from __future__ import annotations

import pickle

import pytest

from kvshelf.api import Source, Usage
from kvshelf.api.answers import Answer, Phase, Piece, Served, in_sequence, rounded
from kvshelf.api.queries import Remade
from kvshelf.api.shapes import Logprob

USAGE = Usage(cache_read_tokens=9, read_tokens=7, prefill_tokens=3, completion_tokens=2)


@pytest.mark.parametrize("logprobs", [None, [], [Logprob(token="a", logprob=-1.0, bytes=[97], top_logprobs=[])]])
def test_a_piece_is_its_text_and_keeps_its_fields_between_processes(logprobs: list[Logprob] | None) -> None:
    piece = pickle.loads(pickle.dumps(Piece("a", logprobs, is_thought=True)))
    assert (piece, piece.logprobs, piece.is_thought) == ("a", logprobs, True)
    assert "".join([Piece("a"), Piece("b")]) == "ab"
    assert (Piece("a").logprobs, Piece("a").is_thought) == (None, False)


def test_shares_name_the_caches_that_were_asked_and_nothing_else_changes_with_how_it_was_served() -> None:
    answer = Answer("a", [1], "stop", USAGE, (0.25, 0.75), served=Served(cache_ids=("kvs_1", "kvs_2")))
    assert answer.shares == [Source(cache_id="kvs_1", share=0.25), Source(cache_id="kvs_2", share=0.75)]
    remade = (Remade(cache_id="kvs_1", reason="expired"),)
    changed = answer.also(remade=remade)
    assert (changed.served.remade, changed.served.cache_ids) == (remade, ("kvs_1", "kvs_2"))
    assert changed.also(remade=()) == answer
    assert "served" not in repr(answer)  # of an engine's answer it says nothing


def test_phases_follow_each_other() -> None:
    phases = in_sequence(queue=0.5, prefill=2.0, store=0.25)
    assert phases == (Phase("queue", 0.0, 0.5), Phase("prefill", 0.5, 2.0), Phase("store", 2.5, 0.25))
    assert rounded(phases) == {"queue_s": 0.5, "prefill_s": 2.0, "store_s": 0.25}
    assert Served(phases=phases).first_token_s == 2.5
