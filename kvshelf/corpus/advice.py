"""Chooses policy, codec, selector, suffix policy and tier for a scenario, by measurements on kvshelf-tiny.

The scenarios are the workloads of a survey of KV cache optimization (arXiv 2603.20397, sections 5.1 to 5.7). A scenario
has rules that refuse some of the measured rows, and one figure that ranks the others; no row is chosen by its name.
Exact answers are those of the quality bench, bytes those of `kvshelf plan`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from kvshelf.api import Certificate
from kvshelf.errors import InvalidRequest
from kvshelf.methods.catalog import catalog
from kvshelf.methods.info import MethodInfo, packaged_rows, suffix_rows
from kvshelf.methods.policies.budgets import Budget
from kvshelf.workers.replica.create.sizes import Dimensions

PAID_AT_ONCE: Final = 0.25
"""Share of a prefill that a policy may add where few requests share its cost."""

HARDLY_PAID: Final = 0.1
"""The same where prefills are most of the work."""

_CASCADE: Final = 1.125
"""Share of the budget that layers hold before the last layer is there, where all layers share it. See
`Policy.phase`."""


@dataclass(frozen=True)
class Option:
    """One measured row, with its bytes under a model at a length. exact, compress_share: as measured. trained: whether
    the policy has gates. share, params: of the selector. stored_bytes: of the blob. held_bytes: in memory while it is
    asked; under codec klt, which is decoded first, those of plain rows. peak_bytes: most keys and values during the
    prefill. step_bytes: of the document, read at each token of an answer."""

    policy: str
    removed: float
    codec: str
    selector: str | None
    params: dict[str, Any]
    share: float | None
    exact: float
    compress_share: float
    trained: bool
    stored_bytes: int
    held_bytes: int
    peak_bytes: int
    step_bytes: int

    @property
    def name(self) -> str:
        return self.policy if self.selector is None else f"{self.policy} + {self.selector}"


class Rule(NamedTuple):
    """Refuses options. reason: why they do not serve."""

    refuses: Callable[[Option], bool]
    reason: str


_EVICTS: Final = Rule(
    lambda option: option.removed != 0, "evicts, and nobody knows what a chain of thought will come back to"
)
_READS_A_PART: Final = Rule(
    lambda option: option.selector is not None, "reads a part, which no other row of a batch shares"
)
_KEEPS_NO_TURN: Final = Rule(
    lambda option: option.selector is not None, "reads a part, and such an answer is not kept as a turn"
)
_PAID_LATE: Final = Rule(
    lambda option: option.compress_share > PAID_AT_ONCE, f"adds more than {PAID_AT_ONCE:.0%} to a prefill"
)
_PAID_DEARLY: Final = Rule(
    lambda option: option.compress_share > HARDLY_PAID, f"adds more than {HARDLY_PAID:.0%} to a prefill"
)
_TRAINED: Final = Rule(lambda option: option.trained, "takes gates that are trained for the model")


@dataclass(frozen=True)
class Scenario:
    """rules: in order. least: the figure of an `Option` that ranks the others, smallest first; `exact` ranks before it
    where `exact_first`. bounded: whether a suffix policy may drop entries of an answer. tier: of the cache, None: RAM
    if two of them fit, else disk."""

    about: str
    rules: tuple[Rule, ...]
    least: str
    why: str
    exact_first: bool = False
    bounded: bool = True
    tier: str | None = None

    def order(self, option: Option) -> tuple[float, float]:
        return (-option.exact if self.exact_first else 0.0), getattr(option, self.least)


SCENARIOS: Final = {
    "one-long": Scenario(
        "one long document, asked once", (_PAID_LATE,), "step_bytes", "a step reads the fewest bytes", tier="memory"
    ),
    "unmodified": Scenario(
        "a model as it is, without training", (_TRAINED,), "held_bytes", "most caches fit in memory"
    ),
    "throughput": Scenario(
        "many questions at once, on many documents", (_READS_A_PART,), "held_bytes", "most caches fit in memory"
    ),
    "edge": Scenario(
        "a small device of its own", (_PAID_LATE,), "stored_bytes", "the fewest bytes stored", tier="disk"
    ),
    "multi-turn": Scenario(
        "conversations whose turns are stored", (_KEEPS_NO_TURN,), "held_bytes", "most caches fit in memory",
        bounded=False,
    ),
    "prefill": Scenario(
        "long documents and short answers", (_PAID_DEARLY,), "peak_bytes", "a prefill holds the fewest bytes"
    ),
    "accuracy": Scenario(
        "long reasoning that must be right", (_EVICTS, _READS_A_PART), "held_bytes",
        "the most exact answers, then the fewest bytes in memory", exact_first=True, bounded=False,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class AdviceLine:
    """One piece of advice. suffix: the policy that bounds an answer; None: all of it stays. needed_bytes: of memory for
    keys and values, with the answer."""

    option: Option
    suffix: str | None
    tier: str
    needed_bytes: int
    reason: str


@dataclass(frozen=True)
class Advice:
    """lines: best first, of each policy and selector its best row. refused: the others, each with the reason."""

    lines: list[AdviceLine]
    refused: dict[str, str]


def options(shape: Dimensions, tokens: int, certificate: Certificate | None = None) -> Iterator[Option]:
    """Every row that was measured, with its bytes at this length: of kvshelf-tiny, or the ways of a certificate."""
    policies = {info.name: info for info in catalog()}
    rows = packaged_rows("rows")
    added = {row["policy"]: row["compress_share"] for row in rows if row["removed"] == 0}
    for row in rows if certificate is None else _certified_rows(certificate, rows):
        yield _option(shape, tokens, row, policies[row["policy"]])
    if certificate is not None:
        return
    for row in packaged_rows("selected"):
        policy = row["select"] if row["select"] in added else "full"  # one that makes the index that its selector reads
        choices = {"policy": policy, "removed": 0.0, "compress_share": added[policy]}
        yield _option(shape, tokens, row | choices, policies[policy])


def _certified_rows(certificate: Certificate, measured: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The ways of a certificate as measured rows. exact: the share of its questions, in all groups, that a way does not
    lose. `measured` has the costs of the policies."""
    costs = {row["policy"]: row["compress_share"] for row in measured}
    groups = certificate.groups.values()
    documents = sum(group.documents for group in groups)
    for place, way in enumerate(certificate.ways):
        lost = sum(group.ways[place].loss * group.documents for group in groups) / documents
        yield {
            "policy": way.policy,
            "removed": way.compression_ratio or 0.0,
            "codec": way.codec,
            "exact": 1 - lost,
            "compress_share": costs[way.policy],
        }


def _option(shape: Dimensions, tokens: int, row: dict[str, Any], policy: MethodInfo) -> Option:
    kept = tokens
    if policy.takes_budget:
        kept = Budget.resolve(tokens, compression_ratio=row["removed"], budget_tokens=None).tokens
    stored = shape.policy_bytes(tokens, kept, row["codec"], policy.stored_beside)
    full = shape.full_bytes(tokens)
    plain = round(full * (kept / tokens))
    held_kv_bytes = plain if row["codec"].startswith("klt") else stored
    peak = full / (shape.layers + len(shape.recent)) + plain * (_CASCADE if policy.phase == "cascade" else 1.0)
    return Option(
        policy=policy.name,
        removed=row["removed"],
        codec=row["codec"],
        selector=row.get("select"),
        params=row.get("params", {}),
        share=row.get("share"),
        exact=row["exact"],
        compress_share=row["compress_share"],
        trained="gates" in policy.parameters,
        stored_bytes=stored,
        held_bytes=held_kv_bytes,
        peak_bytes=full if policy.phase == "after" else min(full, round(peak)),
        step_bytes=round(held_kv_bytes * row.get("read_share", 1.0)),
    )


def advise(
    scenario: str,
    shape: Dimensions,
    tokens: int,
    memory_bytes: int,
    quality: float = 0.9,
    certificate: Certificate | None = None,
) -> Advice:
    """The rows that serve a scenario. memory_bytes: for keys and values, beside the model's weights. quality: the least
    share of the full cache's exact answers. certificate: whose questions count instead of those of kvshelf-tiny. Raises
    `InvalidRequest` for an unknown scenario, and if nothing serves it."""
    if scenario not in SCENARIOS:
        raise InvalidRequest(f"unknown scenario {scenario!r}; one of {', '.join(SCENARIOS)}", param="--scenario")
    chosen, candidates = SCENARIOS[scenario], list(options(shape, tokens, certificate))
    floor = quality * max(option.exact for option in candidates if option.name == "full")
    token_bytes = shape.full_bytes(2) - shape.full_bytes(1)
    best: dict[str, AdviceLine] = {}
    refused: dict[str, tuple[float, str]] = {}  # of each name the row that comes closest
    for option in sorted(candidates, key=chosen.order):
        line = _line(chosen, option, token_bytes, memory_bytes)
        reason = next((rule.reason for rule in chosen.rules if rule.refuses(option)), None)
        if reason is not None:
            closeness = 0.0
        elif option.exact < floor:
            closeness, reason = 1.0, f"less than {quality:.0%} of the full cache's exact answers"
        elif line.needed_bytes > memory_bytes:
            closeness, reason = 1 + memory_bytes / line.needed_bytes, f"needs {line.needed_bytes:,} bytes of memory"
        else:
            best.setdefault(option.name, line)
            continue
        refused[option.name] = max(refused.get(option.name, (-1.0, "")), (closeness, reason))
    if not best:
        nearest = max(refused, key=refused.__getitem__)
        raise InvalidRequest(
            f"nothing that was measured serves {scenario} on {tokens:,} tokens within {memory_bytes:,} bytes; the "
            f"nearest is {nearest}: {refused[nearest][1]}. Give more --memory, or a lower --quality than {quality:g}",
            param="--memory",
        )
    reasons = {name: reason for name, (_, reason) in refused.items() if name not in best}
    return Advice(sorted(best.values(), key=lambda line: chosen.order(line.option)), reasons)


def _line(scenario: Scenario, option: Option, token_bytes: int, memory_bytes: int) -> AdviceLine:
    """With all of an answer's suffix where there is room, else under the policy that changes the fewest choices.
    Answers are as long as those by which suffix policies were measured. token_bytes: of the keys and values of a token,
    uncompressed."""
    whole, *policies = suffix_rows()
    rows = [whole]
    if scenario.bounded:
        rows += sorted(policies, key=lambda row: (-row["behind"], row["token_s"]))
    needed = [max(option.peak_bytes, option.held_bytes + row["stored"] * token_bytes) for row in rows]
    at = next((place for place, nbytes in enumerate(needed) if nbytes <= memory_bytes), needed.index(min(needed)))
    fit = memory_bytes // max(1, option.held_bytes)
    tier = scenario.tier or ("ram" if fit >= 2 else "disk")
    reason = f"{scenario.why}: {getattr(option, scenario.least) / 1e6:,.1f} MB"
    reason += f"; {rows[at]['policy']} bounds answers, of which {whole['stored']:,} tokens do not fit" if at else ""
    return AdviceLine(option, rows[at]["policy"], tier, needed[at], reason)
