"""Write what `kvshelf bench quality` measured into the package and into docs/internals/policies.md.

    python scripts/publish_quality.py report.json     # the report written by --output, with or without selectors
    python scripts/publish_quality.py suffix.json     # that of `kvshelf bench speed --parts suffix`
    python scripts/publish_quality.py                 # the pages again, from the numbers in the package

The numbers of the package (kvshelf/model/bundled/kvshelf-tiny/quality.json) are what `kvshelf policies` prints.
With them it prints what the policies' classes say, which this script writes to
kvshelf/methods/policies/catalog.json, and what the
selectors' classes say to kvshelf/methods/selectors/catalog.json, and those of suffix policies to
kvshelf/methods/suffixes/catalog.json, so that no torch is needed to read them. The pages docs/internals/policies.md,
docs/internals/selectors.md, docs/internals/suffix.md and docs/internals/papers.md keep everything outside their two
marks; the text between them is generated from docstrings and these numbers. Tests compare all of them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvshelf.methods.info import MethodInfo
from kvshelf.methods.policies import registry as policies
from kvshelf.methods.selectors import registry as selectors
from kvshelf.methods.suffixes import registry as suffixes

ROOT = Path(__file__).parents[1]
NUMBERS = ROOT / "kvshelf" / "model" / "bundled" / "kvshelf-tiny" / "quality.json"
SUFFIX_NUMBERS = NUMBERS.parent / "suffix.json"
CATALOG = ROOT / "kvshelf" / "methods" / "policies" / "catalog.json"
SUFFIXES = ROOT / "kvshelf" / "methods" / "suffixes" / "catalog.json"
SELECTORS = ROOT / "kvshelf" / "methods" / "selectors" / "catalog.json"
PAGE = ROOT / "docs" / "internals" / "policies.md"
SUFFIXES_PAGE = ROOT / "docs" / "internals" / "suffix.md"
SELECTORS_PAGE = ROOT / "docs" / "internals" / "selectors.md"
PAPERS_PAGE = ROOT / "docs" / "internals" / "papers.md"
BEGIN, END = "<!-- from here on written by scripts/publish_quality.py -->", "<!-- up to here -->"
REMOVED = (0.5, 0.75, 0.875, 0.9375)
_SORTED_BY = 0.0625  # selectors, by what they measured where an answer reads this part


def main() -> None:
    if len(sys.argv) > 1:
        report = json.loads(Path(sys.argv[1]).read_text())
        if "suffix" in report:
            rows = {"model": report["model"], "machine": report["machine"], "rows": report["suffix"]}
            SUFFIX_NUMBERS.write_text(json.dumps(rows, indent=1) + "\n")
        else:
            NUMBERS.write_text(json.dumps(packaged(report), indent=1) + "\n")
    for file, text in written().items():
        file.write_text(text)


def written() -> dict[Path, str]:
    """The files that this script writes, from the classes and the packaged numbers."""
    return {
        CATALOG: classes(policies.infos()),
        SELECTORS: classes(selectors.infos()),
        SUFFIXES: classes(suffixes.infos()),
        PAGE: page(PAGE.read_text(), generated(policies.infos())),
        SELECTORS_PAGE: page(SELECTORS_PAGE.read_text(), of_selectors()),
        SUFFIXES_PAGE: page(SUFFIXES_PAGE.read_text(), of_suffix_policies()),
        PAPERS_PAGE: page(PAPERS_PAGE.read_text(), of_papers()),
    }


def classes(infos: Sequence[MethodInfo]) -> str:
    """What the classes of policies, selectors or suffix policies say, without what was measured; one per line."""
    listed = [{name: value for name, value in asdict(info).items() if name != "measured"} for info in infos]
    return "[\n" + ",\n".join(json.dumps(one) for one in listed) + "\n]\n"


def packaged(report: dict[str, Any]) -> dict[str, Any]:
    """The part of a report that the package ships: where it was measured, over which cells, and one line per row."""
    rows = [
        {name: row[name] for name in ("policy", "removed", "codec")}
        | {name: round(row["overall"][name], 5) for name in ("exact", "bytes_per_token", "compress_share")}
        for row in report["rows"]
        if row["overall"] is not None and not row["exported"] and not row["policy_params"] and row["select"] is None
    ]
    selected = [
        {"select": row["select"]["method"], "share": row["select"]["share"], "codec": row["codec"]}
        | {"params": dict(row["select"]["params"])}
        | {name: round(row["overall"][name], 5) for name in ("exact", "read_share", "bytes_per_token")}
        for row in report["rows"]
        if row["overall"] is not None and row["select"] is not None
    ]
    cells = [cell["name"] for cell in report["cells"] if cell["common"]]
    return {"model": report["model"], "machine": report["machine"], "cells": cells, "rows": rows, "selected": selected}


def page(text: str, between: str) -> str:
    """The page with its generated part replaced."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n\n" + between + "\n" + END + after


def generated(policies: list[MethodInfo]) -> str:
    return "\n".join([glance(policies), codecs(policies), *(section(policy) for policy in policies)])


def glance(policies: list[MethodInfo]) -> str:
    """A table of all policies, best result first."""
    lines = [
        "## At a glance",
        "",
        "Exact answers in per cent by the share removed, and the most a policy adds to the time of a prefill.",
        "",
        "| policy | " + " | ".join(f"{100 * share:.4g} %" for share in REMOVED) + " | time |",
        "|---|" + "---|" * (len(REMOVED) + 1),
    ]
    for policy in sorted(
        policies, key=lambda policy: -max((row["exact"] for row in plain(policy).values()), default=0)
    ):
        rows = plain(policy)
        shares = REMOVED if policy.takes_budget else (0.0,) * len(REMOVED)
        if rows:
            cells = [f"{100 * rows[share]['exact']:.1f}" for share in shares]
            lines.append(f"| `{policy.name}` | " + " | ".join(cells) + f" | {100 * policy.compress_share:.0f} % |")
    return "\n".join([*lines, ""])


def codecs(policies: list[MethodInfo]) -> str:
    """The policies that were measured under every codec: exact answers, and bytes per document token."""
    names = ("none", "int8", "int4", "int2", "mixed", "klt")
    lines = [
        "## Codecs",
        "",
        "Exact answers, and bytes per document token. In 16 bits the full cache of kvshelf-tiny takes 2,048 bytes a "
        "token. It computes in fp32, so `none` takes twice that.",
        "",
        "| policy, removed | " + " | ".join(names) + " |",
        "|---|" + "---|" * len(names),
    ]
    for policy in policies:
        rows = {(row["removed"], row["codec"]): row for row in policy.measured}
        for removed in sorted({removed for removed, codec in rows if codec == names[-1]}):
            cells = [rows[removed, name] for name in names]
            shown = [f"{row['exact']:.1%}, {row['bytes_per_token']:.0f} B" for row in cells]
            lines.append(f"| `{policy.name}`, {100 * removed:.4g} % | " + " | ".join(shown) + " |")
    return "\n".join([*lines, ""])


def of_selectors() -> str:
    """A table of all selectors, best result first, and a section for each."""
    infos = [info for info in selectors.infos() if info.name != "policy:sage"]  # that is sage
    measured = [(row_label(row), row) for info in infos for row in info.measured]
    shares = sorted({row["share"] for _, row in measured}, reverse=True)
    lines = [
        "## At a glance",
        "",
        "Exact answers in per cent, by the part of a document's entries that a token of an answer may read.",
        "",
        "| selector | " + " | ".join(f"1/{round(1 / share)}" for share in shares) + " |",
        "|---|" + "---|" * len(shares),
    ]
    rows: dict[str, dict[float, float]] = {}
    for label, row in measured:
        rows.setdefault(label, {})[row["share"]] = row["exact"]
    for label, exact in sorted(rows.items(), key=lambda row: -row[1].get(_SORTED_BY, 0.0)):
        shown = [f"{100 * exact[share]:.1f}" if share in exact else "-" for share in shares]
        lines.append(f"| `{label}` | " + " | ".join(shown) + " |")
    for info in infos:
        if not info.name.startswith("policy:"):
            lines += ["", f"## `{info.name}`", "", info.summary, "", *(part + "\n" for part in info.details)]
            lines += [f"**Choose it** {info.advice}", ""]
            lines.append(f"Source: {info.source}. Parameters: {parameters(info)}.")
    return "\n".join([*lines, ""])


def of_suffix_policies() -> str:
    """A section for each suffix policy."""
    lines: list[str] = []
    for info in suffixes.infos():
        lines += [f"## `{info.name}`", "", info.summary, "", *(part + "\n" for part in info.details)]
        lines += [f"**Choose it** {info.advice}", "", f"Source: {info.source}. Parameters: {parameters(info)}.", ""]
    return "\n".join(lines)


def of_papers() -> str:
    """How much of its paper each method is."""
    kinds = (
        ("policy", PAGE, policies),
        ("selector", SELECTORS_PAGE, selectors),
        ("suffix policy", SUFFIXES_PAGE, suffixes),
    )
    lines = [
        "## Methods",
        "",
        "By what their docstrings begin with; a W is of the rule as a policy, a selector or a suffix policy applies it,"
        " where the tables above judge the whole paper. A suffix policy judges question and answer, and with `scope` "
        '"cache" the document\'s entries, too; what is stored stays.',
        "",
        "| | | paper | |",
        "|---|---|---|---|",
    ]
    for noun, file, registry in kinds:
        for info in registry.infos():
            if not info.name.startswith("policy:"):
                letter, why = extent(info)
                shown = f"{noun} [`{info.name}`]({file.name}#{info.name})"
                lines.append(f"| {shown} | {letter} | {info.source} | {why} |")
    return "\n".join([*lines, ""])


def extent(info: MethodInfo) -> tuple[str, str]:
    """W, P or R, as papers.md says them, or - for a method of kvshelf's own; and why."""
    for start, letter in (("In part, ", "P"), ("A reconstruction", "R")):
        if info.summary.startswith(start):
            return letter, info.summary.partition(":")[0].removeprefix(start).removeprefix(", ").strip()
    is_own = info.source == "the model itself" or "docs/internals" in info.source
    return ("-" if is_own else "W"), ""


def row_label(row: dict[str, Any]) -> str:
    """The selector of a measured row, with its parameters."""
    params = ",".join(f"{name}={value}" for name, value in row["params"].items())
    return row["select"] + (f":{params}" if params else "")


def plain(policy: MethodInfo) -> dict[float, dict[str, Any]]:
    """The rows of a policy without a codec, by the share removed."""
    return {row["removed"]: row for row in policy.measured if row["codec"] == "none"}


def section(policy: MethodInfo) -> str:
    """One policy: what it keeps, when to choose it, what it cost."""
    lines = [f"## `{policy.name}`", "", policy.summary, "", *(line for part in policy.details for line in (part, ""))]
    if policy.advice:
        lines += [f"**Choose it** {policy.advice}", ""]
    lines += [f"Source: {policy.source}. Parameters: {parameters(policy)}. Acts {acts(policy)}.", ""]
    return "\n".join([*lines, *measured(policy)])


def parameters(policy: MethodInfo) -> str:
    shown = [f"`{name}` = {json.dumps(about.default)} ({about.legal})" for name, about in policy.parameters.items()]
    return ", ".join(shown) or "none"


def acts(policy: MethodInfo) -> str:
    return {
        "during": "layer by layer",
        "cascade": "in cascade: all layers share one budget",
        "after": "when all layers are there: all share one budget",
    }[policy.phase]


def measured(policy: MethodInfo) -> list[str]:
    """The table of a policy: one row, a column for every share removed."""
    rows = plain(policy)
    if not rows:
        return []
    if not policy.takes_budget:
        (row,) = rows.values()
        return [f"Measured: {row['exact']:.1%} exact, {row['bytes_per_token']:.0f} bytes per document token.", ""]
    removed = [share for share in REMOVED if share in rows]
    cells = [f"{rows[s]['exact']:.1%} at {rows[s]['bytes_per_token']:.0f} bytes" for s in removed]
    return [
        "| removed | "
        + " | ".join(f"{100 * share:.4g} %" for share in removed)
        + f" | time at {100 * removed[0]:.4g} %, of the prefill |",
        "|---|" + "---|" * (len(removed) + 1),
        "| exact, bytes per token | " + " | ".join(cells) + f" | {rows[removed[0]]['compress_share']:.1%} |",
        "",
    ]


if __name__ == "__main__":
    main()
