"""kvshelf's own shape of answers: every field that applies, and no other."""

from __future__ import annotations

from kvshelf.api import ReadShares, Usage
from kvshelf.api.answers import Answer, Piece, Served
from kvshelf.api.queries import Linked, Remade
from kvshelf.api.shapes import Logprob
from kvshelf.service.dialects import own

USAGE = Usage(cache_read_tokens=9, read_tokens=7, prefill_tokens=3, completion_tokens=2)
TOKEN = Logprob(token="a", logprob=-1.0, bytes=[97], top_logprobs=[])
SERVED = Served("ans_1", ("kvs_1", "kvs_2"), ("kvs_1", "kvs_2"), "kvs_2", "full", 0.5, 1.5)
PLAIN = Answer("a", [1], "stop", USAGE, (0.25, 0.75), served=SERVED)
SAID = {"id", "object", "text", "finish_reason", "usage", "load_ms"}


def test_a_plain_answer_has_no_field_that_does_not_apply() -> None:
    assert own.wire(own.alone(PLAIN)).keys() == SAID | {"cache_id", "policy", "compression_ratio"}
    assert own.wire(own.together(PLAIN)).keys() == SAID | {"cache_ids", "sources", "exact"}
    assert own.wire(own.delta(Piece("a"))) == {"object": "answer.delta", "text": "a"}


def test_an_answer_has_all_that_applies() -> None:
    link = Linked(linked_from="F16", agreement=0.97)
    served = {"stored_cache_id": "kvs_3", "remade": (Remade(cache_id="kvs_1", reason="expired"),), "linked": link}
    answer = Answer(
        "a", [1], "stop", USAGE, (0.25, 0.75), (b"\x00\xff", b"\xff"), (TOKEN,), thought="Hm.", served=SERVED
    ).also(**served)
    alone, together = own.wire(own.alone(answer)), own.wire(own.together(answer))
    passages = [ReadShares.of("kvs_1", b"\x00\xff").model_dump(), ReadShares.of("kvs_2", b"\xff").model_dump()]
    for wire in (alone, together):
        assert (wire["passages"], wire["logprobs"]) == (passages, [TOKEN.model_dump()])
        assert (wire["id"], wire["load_ms"], wire["reasoning_content"]) == ("ans_1", 1.5, "Hm.")
    assert (alone["cache_id"], alone["policy"], alone["compression_ratio"]) == ("kvs_2", "full", 0.5)
    assert (alone["recomputed"], alone["stored_cache_id"]) == ("expired", "kvs_3")
    assert alone["linked"] == {"linked_from": "F16", "agreement": 0.97}
    assert together["recomputed"] == [{"cache_id": "kvs_1", "reason": "expired"}]
    assert [(source["cache_id"], source["share"]) for source in together["sources"]] == [
        ("kvs_1", 0.25),
        ("kvs_2", 0.75),
    ]


def test_a_piece_has_logprobs_where_they_were_asked_for_and_thoughts_have_no_text() -> None:
    assert own.wire(own.delta(Piece("", [])))["logprobs"] == []
    assert own.wire(own.delta(Piece("a", [TOKEN])))["logprobs"] == [TOKEN.model_dump()]
    assert own.wire(own.delta(Piece("Hm.", is_thought=True))) == {
        "object": "answer.delta",
        "text": "",
        "reasoning_content": "Hm.",
    }
