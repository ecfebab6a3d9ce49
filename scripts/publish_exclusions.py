"""Write docs/internals/exclusions.md from the table of `kvshelf.engine.exclusions`:
`python -m scripts.publish_exclusions`. A test compares them."""

from __future__ import annotations

import re
from pathlib import Path

from kvshelf.engine.exclusions import EXCLUSIONS, Feature

PAGE = Path(__file__).resolve().parent.parent / "docs" / "internals" / "exclusions.md"

_HEAD = """# What excludes what

Written by `python -m scripts.publish_exclusions` from the table of `kvshelf/engine/exclusions.py`, which is asked
before any work. Features in no row go together: `tests/engine/test_exclusions.py` makes every pair on small models, and
finds each as it stands here. Of several rows that a request meets, the first is its error.

Not in this table is what one value may be (a codec's parameters, a budget, a rule of `protect`), which is checked where
the value is read, and whether a model can be loaded at all ([model types](model-types.md)). A selector also refuses
entries that it cannot read in place, as it meets them: keys without some channels or without their rotation, merged
tokens, no index (`select infllm`), and heads with other numbers of entries (`select by a policy`).

## Models

The numbers are those of the rows below.
"""


def text() -> str:
    """The page."""
    return "\n".join([_HEAD, *_matrix(), "", "## Refusals", "", *_rows(), ""])


def _matrix() -> list[str]:
    """What is asked for, by what the model has."""
    features = [feature for exclusion in EXCLUSIONS for feature in exclusion.features]
    models = [feature for feature in dict.fromkeys(features) if feature.of_model]
    of_requests = [feature for feature in dict.fromkeys(features) if not feature.of_model]
    met = [feature for feature in of_requests if any(_numbers(feature, model) for model in models)]
    lines = [f"| | {' | '.join(model.name for model in models)} |", "| --- |" + " --- |" * len(models)]
    return lines + [f"| {one.name} | {' | '.join(_numbers(one, model) for model in models)} |" for one in met]


def _numbers(feature: Feature, model: Feature) -> str:
    rows = enumerate(EXCLUSIONS, 1)
    return ", ".join(str(number) for number, row in rows if {feature, model} <= {*row.features})


def _rows() -> list[str]:
    lines = ["| | together | field | message |", "| --- | --- | --- | --- |"]
    for number, row in enumerate(EXCLUSIONS, 1):
        together = " + ".join(feature.name for feature in row.features)
        lines.append(f"| {number} | {together} | `{row.param}` | {_shown(row.message)} |")
    return lines


def _shown(message: str) -> str:
    """A message with words in place of what a request has there."""
    return re.sub(r"\{(?:c\.)?([\w.]+?)(?:\.name)?(?:!r)?\}", lambda match: f"*{_word(match[1])}*", message)


def _word(path: str) -> str:
    return "number" if path == "facts.ranks.size" else path.rpartition(".")[2].replace("_", " ")


if __name__ == "__main__":
    PAGE.write_text(text())
