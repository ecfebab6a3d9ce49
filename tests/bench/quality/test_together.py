"""`kvshelf bench together`: documents that are made, and those of a dataset."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvshelf.errors import InvalidRequest
from kvshelf_bench.quality.options import Sets
from kvshelf_bench.quality.together import measure_together


@pytest.mark.slow
def test_routes_stand_beside_all_documents_and_the_one_that_knows(tiny):
    row = measure_together(tiny, 3, Sets(tokens=300, sets=1, questions=6))
    assert (row.documents, row.questions) == (3, 6)
    assert row.alone >= 5
    assert row.joined is not None
    assert [one.route for one in row.routed] == ["likelihood", "attention"]
    attention = row.routed[1]
    assert attention.exact >= 5
    assert attention.right_first >= 5
    assert 0 < attention.first_token.median < 1


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    rows = [
        {
            "context": f"The {thing} is kept in room {room}. " * 20,
            "question": [f"Where is the {thing}?"],
            "answers": [f"{room}"],
        }
        for thing, room in (("crane", 11), ("ledger", 12), ("lamp", 13))
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_documents_of_a_dataset_are_asked_its_questions(tiny, dataset):
    row = measure_together(tiny, 2, Sets(dataset=dataset, sets=2, questions=9))
    assert row.questions == 4


def test_a_dataset_with_fewer_documents_is_refused(tiny, dataset):
    with pytest.raises(InvalidRequest, match="--documents is 4, and the dataset has 3"):
        measure_together(tiny, 4, Sets(dataset=dataset))
