"""The grid of the quality bench: cells, rows, and the units of work that fill the table.

A *cell* is a kind of document (task, haystack, length). A *row* is a way to keep it (policy with parameters, share
removed, codec, attached or exported) and to read it (all, or what a selector chooses). A *unit* is one prefill: one
document of a cell under one policy and ratio, with all codecs that its cache is measured under.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from kvshelf.artifact.codecs import Codec
from kvshelf.errors import InvalidRequest
from kvshelf.methods import selectors
from kvshelf.methods.policies import POLICIES, build
from kvshelf.samples.suite import HAYSTACK_NAMES, TASK_NAMES, HaystackName, TaskName, fits
from kvshelf.terminal import json_or_text

BASELINE = "full"
"""The policy that keeps everything and shows what the model itself can do. Every cell has it."""

RATIOS = (0.5, 0.75, 0.875, 0.9375)
SHARES = (0.25, 0.125, 0.0625, 0.03125)
CODECS = ("none", "int8", "int4", "int2", "mixed", "klt")
FEATURED = ("full", "keydiff", "lagkv", "snapkv", "sage", "sablock", "ems", "kvzip", "kvcues", "expected_attention")
ENCODED = ("full", "keydiff", "lagkv", "ems", "kvzip", "kvcues")
EXPORTED = ("full", "keydiff")
VARIANTS = ("ems:merge=false", "ems:pos=pre", "ada:base=keydiff")
SELECT = ("quest:page=8", "fasa:chunks=12", *(name for name in selectors.names() if name != "policy:sage"))
"""FEATURED to SELECT: policies of the default size at further lengths, under codecs, exported, their variants, and the
selectors over a document of which all entries are stored."""


@dataclass(frozen=True, order=True)
class Cell:
    tokens: int
    task: TaskName
    haystack: HaystackName

    @property
    def label(self) -> str:
        return f"{self.task} {self.haystack} {length_label(self.tokens)}"


@dataclass(frozen=True)
class Variant:
    """A policy with the parameters that differ from its defaults."""

    policy: str
    params: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Variant:
        """`lagkv` or `lagkv:lag=64,sink=8`. Raises `InvalidRequest` for an unknown policy or parameter."""
        name, _, values = text.strip().partition(":")
        params = named_params(text, values, "policies")
        build(name, params)
        return cls(name, tuple(params.items()))

    @property
    def label(self) -> str:
        return self.policy + shown_params(self.params)

    @property
    def takes_budget(self) -> bool:
        return not build(self.policy, dict(self.params)).sizes_itself

    @property
    def takes_questions(self) -> bool:
        """Whether the policy looks at questions that are known at compression."""
        return build(self.policy, dict(self.params)).takes_questions


@dataclass(frozen=True)
class Reading:
    """A selector with parameters that are no defaults, and the share of a document that an answer's token may read."""

    method: str
    share: float
    params: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def parse(cls, text: str, share: float) -> Reading:
        """`quest`, `quest:page=16` or `policy:snapkv:window=8`. Raises `InvalidRequest`."""
        name, _, values = text.strip().rpartition(":") if "=" in text else (text.strip(), "", "")
        params = named_params(text, values, "select")
        selectors.build(name, params)
        return cls(name, share, tuple(params.items()))

    @property
    def label(self) -> str:
        return self.method + shown_params(self.params)


def named_params(text: str, values: str, param: str) -> dict[str, Any]:
    """Of `a=1,b=2`."""
    params: dict[str, Any] = {}
    for part in filter(None, values.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise InvalidRequest(f"{text!r}: {part!r} is not of the form name=value", param=param)
        params[key] = json_or_text(value)
    return params


def shown_params(params: Sequence[tuple[str, Any]]) -> str:
    shown = [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in params]
    return ":" + ",".join(shown) if shown else ""


@dataclass(frozen=True)
class Row:
    """A way to keep a document, and to read it: `select` None reads all. `exported`: answered by the model's own
    attention from `Engine.export`. budget: the entries kept per KV head, in place of the share removed, then 0."""

    variant: Variant
    removed: float
    codec: str = "none"
    exported: bool = False
    select: Reading | None = None
    budget: int | None = None

    @classmethod
    def parse(cls, text: str) -> Row:
        """`full`, `full/int4`, `keydiff@0.75`, `snapkv@128` or `lagkv:lag=64@0.5/int8`: a policy, the share that it
        removes (half, unless given) or the entries that it keeps per KV head, and a codec. Raises `InvalidRequest`."""
        way, _, codec = text.strip().partition("/")
        policy, at, removed = way.rpartition("@") if "@" in way else (way, "", "0.5")
        variant = Variant.parse(policy)
        if not variant.takes_budget:
            _require(not at, "ways", text, "without a share removed, as this policy keeps everything")
            return cls(variant, 0.0, str(Codec.parse(codec or "none")))
        if removed.isdecimal() and removed.isascii() and int(removed) >= 2:
            return cls(variant, 0.0, str(Codec.parse(codec or "none")), budget=int(removed))
        try:
            share = float(removed)
        except ValueError:
            share = -1.0
        rule = "with a share removed from 0 to below 1 behind the @, or entries kept, a whole number from 2"
        _require(0 <= share < 1, "ways", text, rule)
        return cls(variant, share, str(Codec.parse(codec or "none")))

    @property
    def label(self) -> str:
        """What `parse` reads, for a row that is read as a whole."""
        size = f"@{self.removed:g}" if self.budget is None else f"@{self.budget}"
        return (
            self.variant.label
            + (size if self.variant.takes_budget else "")
            + (f"/{self.codec}" if self.codec != "none" else "")
        )

    @property
    def kept(self) -> tuple[Variant, float, int | None]:
        """What rows of one compressed cache share."""
        return self.variant, self.removed, self.budget

    @property
    def sizes(self) -> dict[str, Any]:
        """The arguments of `Engine.prepare` that say how much is kept, with the policy."""
        policy = {"policy": self.variant.policy, "policy_params": dict(self.variant.params)}
        if not self.variant.takes_budget:
            return policy
        return policy | ({"compression_ratio": self.removed} if self.budget is None else {"budget_tokens": self.budget})

    @property
    def settings(self) -> dict[str, Any]:
        """What a result depends on beside the document: policy version, defaults and settings."""
        policy = build(self.variant.policy, dict(self.variant.params))
        settings = {
            "policy": policy.name,
            "version": policy.revision,
            "params": policy.parameters(),
            "removed": self.removed,
            "codec": self.codec,
            "exported": self.exported,
        }
        if self.select is not None:  # results of rows that read all stay found
            settings["select"] = asdict(self.select)
        if self.budget is not None:
            settings["budget"] = self.budget
        return settings

    def to_dict(self) -> dict[str, Any]:
        """JSON types, for a report."""
        row = {name: value for name, value in asdict(self).items() if name != "variant"}
        policy = {"policy": self.variant.policy, "policy_params": dict(self.variant.params)}
        return policy | row


PLAIN = Row(Variant(BASELINE), 0.0)
"""The full cache, without a codec and read as a whole."""


@dataclass(frozen=True)
class Unit:
    """One prefill of a document, and the rows measured from its caches."""

    rows: tuple[Row, ...]

    @property
    def about(self) -> dict[str, Any]:
        """What people read in the resume file, beside what a row says."""
        raise NotImplementedError


@dataclass(frozen=True)
class MadeUnit(Unit):
    """Of a made document: the one of this number in a cell. All rows are read from one compressed cache."""

    cell: Cell
    document: int

    @property
    def variant(self) -> Variant:
        return self.rows[0].variant

    @property
    def about(self) -> dict[str, Any]:
        return {"cell": self.cell.label, "document": self.document}


@dataclass(frozen=True)
class Block:
    """Every cell under every row, `documents` documents a cell. No `policies` means all policies and the `variants`."""

    tasks: tuple[TaskName, ...]
    haystacks: tuple[HaystackName, ...]
    lengths: tuple[int, ...]
    documents: int
    policies: tuple[str, ...] = ()
    ratios: tuple[float, ...] = RATIOS
    codecs: tuple[str, ...] = ("none",)
    variants: tuple[str, ...] = ()
    export: bool = False
    select: tuple[str, ...] = ()
    shares: tuple[float, ...] = SHARES
    budgets: tuple[int, ...] = ()

    def cells(self) -> list[Cell]:
        chosen = product(self.lengths, self.tasks, self.haystacks)
        return [Cell(tokens, task, haystack) for tokens, task, haystack in chosen if fits(task, haystack)]

    def rows(self, *, export: bool) -> list[Row]:
        """The baseline, then the policies in order; of each the exported row, and the rows of selectors under each
        codec."""
        variants = list(dict.fromkeys(map(Variant.parse, (BASELINE, *(self.policies or (*POLICIES, *self.variants))))))
        rows = []
        for variant in variants:
            codecs = self.codecs if variant.label != BASELINE else tuple(dict.fromkeys(("none", *self.codecs)))
            sizes = [(removed, None) for removed in self.ratios] + [(0.0, budget) for budget in self.budgets]
            for removed, budget in sizes if variant.takes_budget else [(0.0, None)]:
                for codec in codecs:
                    readings = (Reading.parse(text, share) for text in self.select for share in self.shares)
                    rows += [Row(variant, removed, codec, False, select, budget) for select in (None, *readings)]
                if export or self.export:
                    rows.append(Row(variant, removed, exported=True, budget=budget))
        return rows


@dataclass(frozen=True)
class Grid:
    """Blocks that may overlap; a unit of two blocks is measured once."""

    blocks: tuple[Block, ...]
    questions: int = 4
    seed: int = 0
    export: bool = False

    def cells(self) -> list[Cell]:
        return list(dict.fromkeys(cell for block in self.blocks for cell in block.cells()))

    def rows(self) -> list[Row]:
        """All rows, those of one policy and ratio together."""
        rows = dict.fromkeys(row for block in self.blocks for row in block.rows(export=self.export))
        order = {variant: i for i, variant in enumerate(dict.fromkeys(row.variant for row in rows))}
        return sorted(rows, key=lambda row: (order[row.variant], row.removed, row.budget or 0))

    def units(self) -> list[MadeUnit]:
        """Document by document through all cells: a run that is stopped has a little of everything."""
        planned: dict[tuple[Any, ...], dict[Row, None]] = {}
        for document in range(max((block.documents for block in self.blocks), default=0)):
            for block in (block for block in self.blocks if document < block.documents):
                for cell, row in product(block.cells(), block.rows(export=self.export)):
                    planned.setdefault((document, cell, *row.kept), {})[row] = None
        return [MadeUnit(tuple(rows), cell, document) for (document, cell, *_), rows in planned.items()]


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What replaces the values of a size; what is empty or None replaces nothing.

    Given tasks or haystacks replace all cells by their product, measured under the rows of the first block.
    """

    tasks: Sequence[TaskName] = ()
    haystacks: Sequence[HaystackName] = ()
    lengths: Sequence[int] = ()
    documents: int | None = None
    policies: Sequence[str] = ()
    ratios: Sequence[float] = ()
    budgets: Sequence[int] = ()
    codecs: Sequence[str] = ()
    select: Sequence[str] = ()
    shares: Sequence[float] = ()

    def block(self, block: Block) -> Block:
        """Raises `InvalidRequest` for an unknown codec."""
        values = {name: tuple(value) if isinstance(value, Sequence) else value for name, value in vars(self).items()}
        values["codecs"] = tuple(str(Codec.parse(codec)) for codec in self.codecs)
        chosen: dict[str, Any] = {name: value for name, value in values.items() if value}
        if self.budgets:
            chosen["ratios"] = tuple(self.ratios)
        return replace(block, **chosen)

    def require(self) -> None:
        """Raises `InvalidRequest` for what is unknown or out of range; policies and selectors say it themselves."""
        for task in self.tasks:
            _require(task in TASK_NAMES, "tasks", task, f"one of {', '.join(TASK_NAMES)}")
        for haystack in self.haystacks:
            _require(haystack in HAYSTACK_NAMES, "haystacks", haystack, f"one of {', '.join(HAYSTACK_NAMES)}")
        for tokens in self.lengths:
            _require(tokens >= 1, "lengths", tokens, "a number of tokens from 1")
        for removed in self.ratios:
            _require(0 <= removed < 1, "ratios", removed, "a fraction removed, from 0 to below 1")
        for share in self.shares:
            _require(0 < share < 1, "shares", share, "a fraction read, above 0 and below 1")
        _require(self.documents is None or self.documents >= 1, "documents", self.documents, "an integer from 1")


def make_grid(size: str, changes: Changes | None = None, *, export: bool = False, seed: int = 0) -> Grid:
    """The grid of a size, changed. Raises `InvalidRequest` for anything unknown or out of range, before any work."""
    if size not in SIZES:
        raise InvalidRequest(f"unknown size {size!r}; one of {', '.join(SIZES)}", param="size")
    changes, blocks = changes or Changes(), SIZES[size]
    changes.require()
    if changes.tasks or changes.haystacks:
        blocks = blocks[:1]
    grid = Grid(tuple(map(changes.block, blocks)), seed=seed, export=export)
    if not grid.cells():
        raise InvalidRequest("no cell is left: the task cwe stands in the haystack dense only", param="haystacks")
    grid.rows()  # parses every policy
    return grid


def make_rows(ways: Sequence[str]) -> list[Row]:
    """The rows of ways (see `Row.parse`), those of one policy and share together, after the full cache."""
    rows = dict.fromkeys([PLAIN, *map(Row.parse, ways)])
    groups = list(dict.fromkeys(row.kept for row in rows))
    return sorted(rows, key=lambda row: groups.index(row.kept))


def length_label(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else f"{tokens}"


def _require(legal: bool, param: str, value: object, rule: str) -> None:
    if not legal:
        raise InvalidRequest(f"--{param} has {value!r}; it must be {rule}", param=param)


_SURE = (
    Block(("multikey",), HAYSTACK_NAMES, (2048,), 20),
    Block(("digits32",), ("dense",), (2048,), 20),
    Block(("digits64",), ("prose",), (2048,), 20),
)
"""Documents that the bundled model answers well."""

SIZES: dict[str, tuple[Block, ...]] = {
    # Two minutes on two cores.
    "small": (Block(("multikey",), HAYSTACK_NAMES, (1024,), 4, ratios=(0.5, 0.875)),),
    "core": _SURE,
    # Within an hour on two cores with the bundled model: all policies in cells that it answers well, then some policies
    # with codecs, at other lengths, and in cells that it cannot answer.
    "default": (
        *(replace(block, variants=VARIANTS) for block in _SURE),
        *(replace(block, policies=ENCODED, codecs=CODECS) for block in _SURE),
        *(replace(block, policies=EXPORTED, export=True) for block in _SURE),
        *(replace(block, policies=("full",), codecs=("int4",), select=SELECT) for block in _SURE),
        Block(("multikey",), ("prose", "dense"), (1024, 4096), 10, FEATURED, (0.5, 0.875)),
        Block(("multikey",), ("prose",), (8192,), 10, FEATURED, (0.5, 0.875)),
        Block(("multivalue", "multiquery", "vt"), ("prose",), (2048,), 10, FEATURED, (0.5, 0.875)),
        Block(("cwe",), ("dense",), (2048,), 10, FEATURED, (0.5, 0.875)),
    ),
    "large": (Block(TASK_NAMES, HAYSTACK_NAMES, (1024, 2048, 4096, 8192), 10, codecs=CODECS, variants=VARIANTS),),
}
