"""The bench commands, at sizes that take seconds."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest
import torch
import transformers
from typer.testing import CliRunner

from kvshelf.errors import InvalidRequest
from kvshelf.kernels.dispatch import cpu_form
from kvshelf.kernels.rates import cost
from kvshelf.model.loading import chosen_device
from kvshelf_bench.cli import app
from kvshelf_bench.measure import Spread, interleaved, load_warning, machine, ratios, wilson
from kvshelf_bench.options import Reporting, publish
from kvshelf_bench.quality.retrieval import measure_cell


def test_every_round_runs_every_variant_and_the_first_does_not_count():
    calls = []

    def variant(name):
        calls.append(name)
        return float(len(calls))

    results = interleaved({"a": lambda: variant("a"), "b": lambda: variant("b")}, rounds=3)
    assert calls == ["a", "b"] * 4
    assert results == {"a": [3.0, 5.0, 7.0], "b": [4.0, 6.0, 8.0]}


def test_ratios_are_taken_within_a_round():
    assert ratios([1.0, 10.0, 4.0], [1.0, 5.0, 1.0]) == Spread(2.0, 1.0, 4.0)


@pytest.mark.parametrize(
    ("hits", "trials", "low", "high"), [(0, 10, 0.0, 0.2775), (200, 200, 0.9812, 1.0), (5, 10, 0.2366, 0.7634)]
)
def test_the_interval_is_wilsons(hits, trials, low, high):
    """Reference values from the closed formula, worked out by hand."""
    assert wilson(hits, trials) == pytest.approx((low, high), abs=1e-3)


def test_the_machine_is_named():
    where = machine()
    assert where["processor"]
    assert where["cores"] >= 1
    assert where["cpu_kernels"] == cpu_form()
    assert where["transformers"] == transformers.__version__


def test_a_machine_with_more_work_than_cores_is_warned_of():
    assert load_warning({"load": 2.0, "cores": 2}) == ""
    assert "2.1 on 2 cores" in load_warning({"load": 2.1, "cores": 2})


def test_process_time_does_not_count_waiting():
    spent = cost(lambda: time.sleep(0.1), torch.device("cpu"))
    assert spent.wall_s >= 0.1
    assert spent.seconds < 0.05


@pytest.mark.parametrize("name", ["tpu:x", "cuda:"])
def test_a_device_that_torch_does_not_know_is_refused(name):
    with pytest.raises(InvalidRequest, match="unknown device"):
        chosen_device(name)


def test_retrieval_measures_the_policy_and_not_only_the_model(tiny):
    """Keeping 2 % of a document cannot answer what the whole cache can; chance has one in 10^3 per answer."""
    options = {"documents": 12, "compress": {"policy": "full"}}
    full = measure_cell(tiny, "needle", "filler", 512, **options)
    options["compress"] = {"policy": "streaming_llm", "compression_ratio": 0.98}
    blind = measure_cell(tiny, "needle", "filler", 512, **options)
    assert full.share >= 0.75
    assert blind.share <= 0.25


def test_retrieval_command(tmp_path):
    report = tmp_path / "report.json"
    arguments = ["--documents", "2", "--lengths", "300", "--tasks", "needle", "--output", str(report)]
    result = CliRunner().invoke(app, ["retrieval", *arguments])
    assert result.exit_code == 0, result.output
    cells = json.loads(report.read_text())["cells"]
    assert [(cell["haystack"], cell["documents"]) for cell in cells] == [("filler", 2), ("prose", 2)]


@pytest.mark.slow
def test_search_command(tmp_path):
    report = tmp_path / "report.json"
    result = CliRunner().invoke(app, ["search", "--documents", "20", "--output", str(report)])
    assert result.exit_code == 0, result.output
    summaries, first_layer, bm25 = json.loads(report.read_text())["ways"]
    assert summaries["at_1"] >= 0.75
    assert summaries["at_5"] >= 0.95
    assert summaries["at_1"] >= first_layer["at_1"]
    assert bm25["at_5"] >= 0.75, "the peer works, too"
    assert (bm25["nbytes"], bm25["share"]) == (0, 0)
    assert first_layer["nbytes"] < summaries["nbytes"] < 8000
    assert summaries["share"] < 0.05


@pytest.mark.parametrize("arguments", [["--tasks", "chess"], ["--lengths", "long"], ["--haystacks", "hay"]])
def test_bad_choices_are_refused(arguments):
    assert CliRunner().invoke(app, ["retrieval", *arguments]).exit_code == 2


COMMANDS = [command.name or command.callback.__name__.replace("_", "-") for command in app.registered_commands]


@pytest.mark.parametrize("output", [".", "nowhere/report.json", "x" * 300])
@pytest.mark.parametrize("command", COMMANDS)
def test_an_output_that_cannot_be_written_is_refused_before_any_work(tmp_path, command, output):
    result = CliRunner().invoke(app, [command, "--output", str(tmp_path / output)])
    assert isinstance(result.exception, InvalidRequest), result.output
    assert "--output" in str(result.exception)
    assert not list(tmp_path.iterdir())


def test_an_output_that_is_there_may_be_written_again(tmp_path):
    report = tmp_path / "report.json"
    report.write_text("of the last time")
    test_retrieval_command(tmp_path)


def test_what_was_measured_is_printed_when_its_folder_is_gone(tmp_path, capsys):
    with pytest.raises(InvalidRequest, match="--output"):
        publish({"found": 1}, [], Reporting(tmp_path / "gone" / "report.json", as_json=True))
    assert json.loads(capsys.readouterr().out) == {"found": 1}


def test_what_was_measured_is_written_when_nobody_reads_it(tmp_path):
    report = tmp_path / "report.json"
    program = (
        "import sys; from pathlib import Path; from kvshelf_bench.options import Reporting, publish; "
        "sys.stdin.read(); publish({'found': 1}, [], Reporting(Path(sys.argv[1]), True))"
    )
    command = [sys.executable, "-c", program, str(report)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:
        process.stdout.close()
        process.stdin.close()
        assert b"BrokenPipeError" in process.stderr.read()
    assert json.loads(report.read_text()) == {"found": 1}
