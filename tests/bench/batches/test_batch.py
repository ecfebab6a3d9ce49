"""`kvshelf bench batch`: bare loops in their own processes, and refused options."""

from __future__ import annotations

import multiprocessing

import pytest
from typer.testing import CliRunner

from kvshelf.errors import InvalidRequest, WorkerCrashed
from kvshelf_bench.batches.batch import bare_loops
from kvshelf_bench.cli import app

GOOD, BAD = list(range(20, 220)), [10**9] * 200  # no model has such a token


def test_bare_loops_do_every_document(tiny_folder):
    found = bare_loops([GOOD] * 5, str(tiny_folder), 1)
    assert found.tokens == 1000
    assert found.wall_s > 0
    assert found.process_s > 0


@pytest.mark.faults
@pytest.mark.timeout(120)
@pytest.mark.parametrize("corpus", [[GOOD, BAD, GOOD, GOOD], [GOOD, GOOD, GOOD, BAD]], ids=["before", "in its loop"])
def test_a_loop_that_dies_ends_the_bench(tiny_folder, corpus, capfd):
    """A process that dies before the common start, and one in its loop: the other process ends too."""
    with pytest.raises(WorkerCrashed, match="exit code 1"):
        bare_loops(corpus, str(tiny_folder), 2)
    assert "Traceback" in capfd.readouterr().err, "the process says itself why"
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("replicas", ["0", "1,5", "-1", "2,0"])
def test_replicas_that_would_have_no_document_are_refused(replicas):
    result = CliRunner().invoke(app, ["batch", "--documents", "4", "--replicas", replicas])
    assert isinstance(result.exception, InvalidRequest), result.output
    assert "--replicas" in str(result.exception)
