"""One part in this process: `python -m scripts.gpu_parts NAME --out FOLDER --seconds S [--toy] [--device D]`."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from importlib import import_module
from pathlib import Path

import torch

from scripts.gpu_parts.part import Part


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--device", default="cuda:0")
    options = parser.parse_args()
    ends = time.monotonic() + options.seconds
    logging.basicConfig(level=logging.WARNING)
    device = torch.device(options.device)
    part = Part(options.name, device, options.toy, options.out / "rows.jsonl", options.out, ends)
    started = time.monotonic()
    with part.trying(f"the part {options.name}"):
        import_module(f"scripts.gpu_parts.{options.name}").measure(part)
    part.row("the whole part", time.monotonic() - started, "s")
    sys.stdout.flush()
    os._exit(0)  # what it has started and not ended is not waited for


if __name__ == "__main__":
    main()
