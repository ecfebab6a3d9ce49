"""docs/use/engines.md as it stands, also the block that needs vLLM (`py`, which tests/test_docs.py leaves alone)."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

from kvshelf.samples.tasks import write_document
from tests.test_docs import FACT, ROOT, blocks


def test_the_page_ends_with_the_answer(tmp_path: Path) -> None:
    page = ROOT / "docs" / "use" / "engines.md"
    of_vllm = [code for code in blocks(page, "py") if "slots/" not in code]  # those ask a llama-server
    code = "\n".join([*blocks(page, "python"), *of_vllm])
    report = write_document(random.Random(0), [FACT], "prose", 900, lambda text: len(text.split()))
    (tmp_path / "report.txt").write_text(report.text)
    done = subprocess.run(
        [sys.executable, "-c", code.replace("disk:///tmp/kvshelf-docs", f"disk://{tmp_path}/home")],
        cwd=tmp_path,
        env=os.environ
        | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "482913" in done.stdout.splitlines()[-1]
