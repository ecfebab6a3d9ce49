"""How much smaller a cache is is said against the model's 16-bit cache: an fp32 cache would double every factor."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvshelf.api import ByteCounts
from kvshelf.cli.batch import describe_end
from kvshelf.cli.output import common as _common
from kvshelf.cli.output.progress import describe_numbers
from kvshelf.corpus.run.progress import Progress, RunState, Summary

FORMAT = Path(__file__).resolve().parents[4] / "kvshelf" / "service" / "page" / "format.js"

FP32 = {"full": 8_000_000, "full_16bit": 4_000_000, "stored": 1_000_000}
BF16 = FP32 | {"full": 4_000_000}
OF_FP32 = {f"bytes_{name}": value for name, value in FP32.items()}


def test_a_size_is_told_against_16_bits_and_in_wider_numbers_beside() -> None:
    told = ByteCounts(**BF16).describe(_common.megabytes)
    assert told == "1.00 MB, 25.0% of 4.00 MB uncompressed in 16 bits"
    assert ByteCounts(**FP32).describe(_common.megabytes) == f"{told}; 8.00 MB in the model's dtype"
    assert ByteCounts(full=0, full_16bit=0, stored=0).share == 0


SIZES = {14_376: "0.014 MB", 99_999: "0.1 MB", 100_000: "0.10 MB", 1_210_856: "1.21 MB", 0: "0 MB"}


def test_small_sizes_have_two_digits() -> None:
    assert {size: _common.megabytes(size) for size in SIZES} == SIZES


def test_the_end_of_a_batch_tells_it() -> None:
    told = describe_end(Summary(RunState.COMPLETED, done=1, **OF_FP32))  # type: ignore[arg-type]
    assert "1.00 MB, 25.0% of 4.00 MB uncompressed in 16 bits; 8.00 MB in the model's dtype; " in told


def test_the_progress_of_a_batch_tells_it() -> None:
    told = describe_numbers(Progress(RunState.RUNNING, done=1, **OF_FP32))  # type: ignore[arg-type]
    assert "1.00 MB stored (25.0% of 16 bits)" in told


@pytest.mark.skipif(shutil.which("node") is None, reason="the page's module is run by node")
def test_the_page_tells_it() -> None:
    def run(call: str) -> str:
        script = f"{FORMAT.read_text()}\nconsole.log({call});"
        node = ["node", "--input-type=module"]
        return subprocess.run(node, input=script, capture_output=True, text=True, check=True, timeout=60).stdout.strip()

    def told(counts: dict[str, Any]) -> str:
        return run(f"size({json.dumps(counts)})")

    assert run(f"JSON.stringify({json.dumps([*SIZES])}.map(megabytes))") == json.dumps(
        [*SIZES.values()], separators=(",", ":")
    )

    assert told(BF16) == "1.00 MB, 25 % of 4.00 MB in 16 bits"
    assert told(FP32) == "1.00 MB, 25 % of 4.00 MB in 16 bits; 8.00 MB in the model's dtype"
