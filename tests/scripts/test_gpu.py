"""The script for a GPU, on a machine that has none: that it runs at all, and what becomes of parts that do not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zipfile
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvshelf.engine.engine import Engine
from kvshelf.kernels.rates import CPU
from kvshelf.training.probed_text import ProbedText
from scripts import gpu
from scripts.gpu_parts.answers import Result
from scripts.gpu_parts.part import OutOfTime, Part, mapped
from tests.engine.elsewhere import ONE, devices

ABSENT = (
    "accelerate", "fastapi", "httpx", "llguidance", "obstore", "opentelemetry", "prometheus_client",
    "pyarrow", "pydantic_settings", "ray", "redis", "structlog", "uvicorn",
)  # fmt: skip
"""What kvshelf's extra `serve` brings and a machine with a card need not have."""


def part_in(folder: Path, name: str = "decode", *, device: torch.device = CPU, seconds: float = 100) -> Part:
    return Part(name, device, True, folder / "rows.jsonl", folder, time.monotonic() + seconds)


def rows_in(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(2500)
def test_every_part_runs_in_small(tmp_path):
    """`TRITON_INTERPRET` is each part's own affair: only kernels that are checked are interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "scripts/gpu.py", "--toy", "--out", tmp_path], cwd=gpu.ROOT, env=environment,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    told = (tmp_path / "gpu.md").read_text()
    assert done.returncode == 0, told + (tmp_path / "gpu.log").read_text()[-3000:]
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert [part["name"] for part in report["parts"]] == [task.name for task in gpu.TASKS]
    assert {row["part"] for row in report["rows"]} == {task.name for task in gpu.TASKS}
    assert "Nothing." in told
    checks = [row for row in report["rows"] if row["goal"] == 0]
    assert len(checks) > 30
    assert "a decode step" in (tmp_path / "profile.txt").read_text()


@pytest.mark.slow
def test_nothing_is_imported_that_a_machine_with_a_card_need_not_have():
    """In a process of its own: this one has imported all of it."""
    modules = ", ".join(f"scripts.gpu_parts.{task.name}" for task in gpu.TASKS)
    code = f"import sys\nfor name in {ABSENT!r}: sys.modules[name] = None\nimport {modules}, scripts.gpu_parts.__main__"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=gpu.ROOT, capture_output=True, text=True, check=False,
        env=gpu.environment_of(None, ()),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]


def given(folder: Path) -> Namespace:
    return Namespace(device="cpu", toy=True, wheels=folder / "none", commit="c0ffee")


def test_a_part_that_hangs_is_killed_and_keeps_its_rows(tmp_path):
    part_in(tmp_path).row("measured before", 1.0)
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"part": "decode", "na')
    ended = gpu.ran(gpu.Task("decode", 60, "a goal"), tmp_path, None, 0.1, given(tmp_path))
    assert ended["state"] == "out of time"
    assert ended["seconds"] < 30
    report = {"toy": True, "machine": {"card": None, "sources": "s"}, "parts": [ended], "seconds": 1.0}
    gpu.write(tmp_path, report)
    told = (tmp_path / "gpu.md").read_text()
    assert "- decode: out of time" in told
    assert "measured before" in told
    assert "half a row" in told
    assert gpu.what_is_wrong(report)


def test_a_part_that_fails_says_why(tmp_path):
    ended = gpu.ran(gpu.Task("no_such_part", 60, "a goal"), tmp_path, None, 60, given(tmp_path))
    assert ended["state"] == "done"
    error, whole = rows_in(tmp_path)
    assert "ModuleNotFoundError" in error["error"]
    assert whole["name"] == "the whole part"


def test_an_error_is_a_row_and_the_next_piece_goes_on(tmp_path):
    part = part_in(tmp_path, seconds=5)
    with part.trying("first"):
        raise torch.OutOfMemoryError("no room")
    with part.trying("second"):
        part.require_s(60)
    part.row("third", 3.0, at_most=0)
    part.row("fourth", None, at_least=2.0)
    first, second, third, fourth = rows_in(tmp_path)
    assert first["error"] == "OutOfMemoryError: no room"
    assert second["error"].startswith("no time: ")
    assert third["met"] is False
    assert fourth["goal"] is None  # a card's, and this is a toy
    with pytest.raises(OutOfTime):
        part.require_s(60)


def test_goals_that_are_missed_come_first(tmp_path):
    part = part_in(tmp_path)
    object.__setattr__(part, "toy", False)
    part.row("near", 0.59, "of the limit", at_least=0.6, note="a | b")
    part.row("met", 1.005, "times", at_most=1.01)
    part.row("absent", None, at_least=2.0)
    ended = {"name": "decode", "goal": "g", "state": "done", "seconds": 1.0, "most_s": 2.0}
    gpu.write(tmp_path, {"toy": False, "machine": {"card": "H", "sources": "s"}, "parts": [ended], "seconds": 1.0})
    short = (tmp_path / "gpu.md").read_text().partition("## decode")[0]
    assert "| decode | near | 0.59 of the limit | at least 0.6 | 0.98 | a / b |" in short
    assert "| decode | absent | not measured | at least 2 |" in short
    assert "met" not in short.replace("not measured", "")


def test_wheels_of_another_python_are_left_alone(tmp_path):
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    wheels.mkdir()
    own = f"cp{sys.version_info.major}{sys.version_info.minor}"
    for name, tag in (
        ("mine", f"{own}-{own}-manylinux_2_17_x86_64"),
        ("other", "cp27-cp27-linux"),
        ("pure", "py3-none-any"),
        ("stable", "cp311-abi3-manylinux_2_28_x86_64"),
    ):
        with zipfile.ZipFile(wheels / f"{name}-1.0-{tag}.whl", "w") as archive:
            archive.writestr(f"{name}.py", "")
    assert gpu.unpacked(wheels, site) == site
    assert sorted(path.name for path in site.iterdir()) == ["mine.py", "pure.py", "stable.py"]
    assert gpu.unpacked(tmp_path / "nothing", site) is None


def test_positions_are_recorded_as_bits():
    kept = [[[0, 3, 599], []], [[5], [1, 2]]]
    assert Result.unpacked(json.loads(json.dumps(Result([[1, 2]], kept).packed()))) == Result([[1, 2]], kept)
    assert Result.unpacked(Result([[7]]).packed()) == Result([[7]])


def test_mapped_makes_other_tensors_of_whatever_holds_them():
    from kvshelf.kernels.quantize.rows import QuantizedRows

    rows = QuantizedRows.quantize(torch.randn(8, 16), [8], bits=4, group=8, axis="tokens")
    found = mapped([{"left": 1}, (rows, None)], torch.clone)
    assert found[1][0].codes is not rows.codes
    assert torch.equal(found[1][0].dequantize(), rows.dequantize())


def by_the_cpu(information):
    """`ProbedText.information` of a model with the same weights on the CPU."""

    def found(asked, engine):
        model = AutoModelForCausalLM.from_config(engine.model.config).eval()
        model.load_state_dict({name: weight.cpu() for name, weight in engine.model.state_dict().items()})
        return information(replace(asked, cache=asked.cache.to(CPU)), Engine(model, name=engine.name))

    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["prefill", "first_token", "decode", "klt"])
def test_parts_put_their_tensors_where_the_model_is(name, tmp_path):
    """On a device that is none: it computes on the CPU, and refuses tensors of two devices as a card does. It has no
    gradients: those of a search for transforms are taken on the CPU, and all else of it runs there."""
    from importlib import import_module

    from kvshelf.kernels import rates

    with devices(), pytest.MonkeyPatch.context() as patch:
        patch.setitem(rates.BUFFER_BYTES, ONE.type, 1 << 20)
        patch.setattr(ProbedText, "information", by_the_cpu(ProbedText.information))
        part = part_in(tmp_path, name, device=ONE, seconds=600)
        import_module(f"scripts.gpu_parts.{name}").measure(part)
    found = rows_in(tmp_path)
    assert found
    assert not [row for row in found if "error" in row or row["met"] is False]
