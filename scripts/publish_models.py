"""Write what `kvshelf bench models` found into docs/internals/model-types.md.

    kvshelf bench models --output report.json
    python scripts/publish_models.py report.json

The page keeps everything outside its two marks. A test compares the table between them with the models themselves.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "internals" / "model-types.md"
BEGIN, END = "<!-- from here on written by scripts/publish_models.py -->", "<!-- up to here -->"
SAID = {"exact": "taken", "refused": "refused", "not built": "not tried"}


def main() -> None:
    PAGE.write_text(page(PAGE.read_text(), json.loads(Path(sys.argv[1]).read_text())))


def page(text: str, report: dict[str, Any]) -> str:
    """The page with its generated part replaced."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n\n" + table(report) + "\n\n" + END + after


def table(report: dict[str, Any]) -> str:
    """The types of each outcome and reason, in the order of `SAID`; the reason that most types have first. Raises
    `ValueError` for a report of mistakes: they are mended before anything is published."""
    outcomes, rows = report["outcomes"], dict[tuple[str, str], list[str]]()
    if wrong := [outcome["model_type"] for outcome in outcomes if outcome["what"] not in SAID]:
        raise ValueError(f"these types are neither exact nor refused: {', '.join(wrong)}")
    for outcome in outcomes:
        rows.setdefault((outcome["what"], outcome["why"]), []).append(outcome["model_type"])
    order = sorted(rows, key=lambda row: (list(SAID).index(row[0]), -len(rows[row]), row[1]))
    counts = ", ".join(
        f"{sum(outcome['what'] == what for outcome in outcomes)} {label}" for what, label in SAID.items()
    )
    lines = [
        f"With transformers {report['machine']['transformers']}: {counts}.",
        "",
        "| | why | types |",
        "|---|---|---|",
    ]
    for what, why in order:
        types = ", ".join(f"`{model_type}`" for model_type in sorted(rows[what, why]))
        lines.append(f"| {SAID[what]} | {why} | {types} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
