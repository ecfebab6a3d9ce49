"""`kvshelf bench needle`."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kvshelf.errors import InvalidRequest
from kvshelf_bench.cli import app
from kvshelf_bench.quality.dataset.needle import Cells, Needle, make_documents

NEEDLE = Needle("The code of the lamp is 4821.", "What is the code of the lamp?", "4821")
HAY = " ".join(f"Sentence {number} says nothing." for number in range(300))


def test_the_needle_stands_at_its_depth_between_sentences(tiny):
    cells = Cells([256, 512], [0, 50, 100], documents=2)
    documents = make_documents(cells, tiny.text, HAY, NEEDLE)
    assert len({document.id for document in documents}) == len(documents) == 12
    for document, (tokens, depth) in zip(documents, cells.places * 2, strict=True):
        assert 0.9 * tokens < tiny.text.count_tokens(document.context) <= tokens
        before, _, behind = document.context.partition(NEEDLE.sentence)
        assert len(before) / len(before + behind) == pytest.approx(depth / 100, abs=0.05)
        assert not before or depth == 100 or before.endswith("nothing. ")
        assert document.questions[0].answers == ("4821",)
    assert documents[0].context != documents[6].context, "the second begins elsewhere in the haystack"
    facts = make_documents(Cells([256], [50], documents=2), tiny.text, None, None)
    assert facts[0].questions != facts[1].questions
    with pytest.raises(InvalidRequest, match="fewer than 9000"):
        make_documents(Cells([9000], [50]), tiny.text, HAY, NEEDLE)
    with pytest.raises(InvalidRequest, match="no room for the needle"):
        make_documents(Cells([8], [50]), tiny.text, HAY, NEEDLE)


def test_the_command_draws_a_grid_for_each_way(tmp_path):
    report, picture = tmp_path / "report.json", tmp_path / "map.png"
    options = ["--lengths", "256,384", "--depths", "0,100", "--resume", str(tmp_path / "journal.jsonl")]
    options += ["--output", str(report), "--picture", str(picture), "--processes", "1", "--ways", "streaming_llm@32"]
    result = CliRunner().invoke(app, ["needle", *options])
    assert result.exit_code == 0, result.output
    full, blind = json.loads(report.read_text())["ways"]
    assert full["score"] == 1
    assert [one["scores"] for one in blind["outcomes"]] == [[0], [1], [0], [1]], "the window keeps the end alone"
    lines = [line.split() for line in result.stdout.splitlines()]
    at = lines.index(["streaming_llm@32"])
    assert lines[at + 1] == ["tokens,", "depth", "0", "%", "100", "%"]
    assert lines[at + 2 : at + 4] == [["256", "0", "100"], ["384", "0", "100"]]
    assert picture.read_bytes()[:4] == b"\x89PNG"
    for arguments in (["--needle", "a"], ["--haystack", str(tmp_path / "none")], ["--picture", "map.txt"]):
        assert isinstance(CliRunner().invoke(app, ["needle", *arguments]).exception, InvalidRequest), arguments
