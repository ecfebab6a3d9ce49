"""Train the gates that ship with kvshelf-tiny, by `kvshelf train-gates`.

    python scripts/train_tiny_gates.py              # all of them
    python scripts/train_tiny_gates.py kvzip_gate   # one

They hold for these weights alone, so train them again whenever the model is trained. All together may have 600 KB: the
widths are small. On one machine the files come out the same to the bit; on another, within rounding.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

GATES: Final = (
    Path(__file__).resolve().parents[1] / "kvshelf" / "model" / "bundled" / "kvshelf-tiny" / "kvshelf" / "gates"
)
SETTINGS: Final = {
    "kvzip_gate": ("--steps", "600", "--width", "32"),
    "locret": ("--steps", "300", "--width", "16"),
    "trimkv": ("--steps", "300", "--width", "16"),
    "make_each_token_count": ("--steps", "300", "--width", "16"),
    "lookaheadkv": ("--steps", "300", "--width", "4"),
    "attention_gate": ("--steps", "200", "--width", "8"),
}
LARGEST: Final = 600 * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("policies", nargs="*", help="all by default")
    chosen = parser.parse_args().policies or list(SETTINGS)
    GATES.mkdir(exist_ok=True)
    for policy in chosen:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / f"{policy}.safetensors"
            command = ["train-gates", "--model", "kvshelf-tiny", "--family", policy, "--device", "cpu"]
            subprocess.run(
                [sys.executable, "-m", "kvshelf", *command, *SETTINGS[policy], "--out", str(file)], check=True
            )
            (GATES / file.name).write_bytes(file.read_bytes())
    total = sum(path.stat().st_size for path in GATES.glob("*.safetensors"))
    if total > LARGEST:
        sys.exit(f"the gates have {total:,} bytes, and {LARGEST:,} may be shipped")


if __name__ == "__main__":
    main()
