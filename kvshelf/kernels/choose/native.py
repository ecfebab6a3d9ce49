"""The choice in C, a call for all heads: see `native.c`. Torch's own operations take 15 of 20 microseconds each."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvshelf.kernels.choose import Choice, Units, eager
from kvshelf.kernels.native import LANES, TYPES, WIDTHS, compiled


def choose(queries: Tensor, choice: Choice) -> None:
    if not takes(choice, queries.dtype):
        return eager.choose(queries, choice)
    queries = queries.contiguous()
    heads, (q_heads, dim) = len(choice.units[0].counts), queries.shape
    guesses = choice.basis is not None
    ranks = torch.empty(heads * most_units(choice) * (2 if guesses else 1), dtype=torch.int32)
    critical = torch.empty(heads, dtype=torch.int64)
    struct, _references = struct_of(choice, queries.dtype, (heads, q_heads // heads, dim))
    struct.queries, struct.ranks, struct.critical = queries.data_ptr(), ranks.data_ptr(), critical.data_ptr()
    compiled().kvshelf_choose(ctypes.byref(struct), torch.get_num_threads())
    return None


def takes(choice: Choice, dtype: torch.dtype) -> bool:
    """Whether C can make this choice, by queries of this dtype."""
    levels = [level for units in choice.units for level in (units, units.parents) if level is not None]
    return dtype in TYPES and all(
        table.dtype == units.low.dtype
        and table.dtype in TYPES
        and table.is_contiguous()
        and (choice.width <= WIDTHS[-1] if units.by_column else choice.width in WIDTHS)
        for units in levels
        for table in (units.low, units.span)
        if table is not None
    )


def most_units(choice: Choice) -> int:
    """Units of the head that has most, over all prefixes, and room for the parents of one; rounded up to whole
    vectors."""
    parents = [max(units.parents.counts) for units in choice.units if units.parents is not None]
    most = max(map(sum, zip(*(units.counts for units in choice.units), strict=True))) + max(parents, default=0)
    return -(-most // LANES) * LANES


class _Units(ctypes.Structure):
    """See `choose.h`, as for `ChoiceStruct`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("low", "span", "ends", "forced", "begin", "rows", "counts")),
        *((name, ctypes.c_int64) for name in ("most", "all", "by_column", "size", "type")),
        ("scale", ctypes.c_double), ("parents", ctypes.c_void_p), ("children", ctypes.c_int64),
    )  # fmt: skip


class ChoiceStruct(ctypes.Structure):
    _fields_ = (
        ("units", ctypes.c_void_p), ("num_units", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("queries", "columns", "ranks", "basis", "critical")),
        *(
            (name, ctypes.c_int64)
            for name in (
                "most_units", "kv_heads", "group", "dim", "width", "budget", "type", "mean", "cut",
            )
        ),
        *((name, ctypes.c_double) for name in ("linear", "relu", "alpha")),
    )  # fmt: skip


def struct_of(choice: Choice, dtype: torch.dtype, shape: tuple[int, int, int]) -> tuple[ChoiceStruct, object]:
    """The choice as C reads it, without the addresses of queries and ranks, and the objects that it points to. shape:
    KV heads, query heads of each, and channels of a query."""
    heads, group, dim = shape
    parts, references = (_Units * len(choice.units))(), []
    for part, units, chosen in zip(parts, choice.units, choice.chosen, strict=True):
        references.append(_fill(part, units, choice.force))
        part.rows, part.counts, part.most = chosen.rows.data_ptr(), chosen.counts.data_ptr(), chosen.rows.shape[1]
    struct = ChoiceStruct(
        units=ctypes.addressof(parts), num_units=len(parts), most_units=most_units(choice), kv_heads=heads, group=group,
        dim=dim, width=choice.width, budget=choice.budget, type=TYPES[dtype],
        mean=choice.group == "mean", cut=choice.cut, linear=choice.linear, relu=choice.relu, alpha=choice.alpha,
        columns=0 if choice.columns is None else choice.columns.data_ptr(),
        basis=0 if choice.basis is None else choice.basis.data_ptr(),
    )  # fmt: skip
    return struct, (parts, references, choice)


def _fill(part: _Units, units: Units, force: bool) -> object:
    """Fill in the fields of units, but for the rows and counts of the choice. Returns the objects that they point
    to."""
    forced = units.forced if force else torch.zeros_like(units.forced)
    begin = (ctypes.c_int64 * len(units.begins))(*units.begins)
    part.low, part.ends, part.forced = (table.data_ptr() for table in (units.low, units.ends, forced))
    part.span = 0 if units.span is None else units.span.data_ptr()
    part.begin, part.type, part.scale = ctypes.addressof(begin), TYPES[units.low.dtype], units.scale
    part.all, part.by_column = units.begins[-1], units.by_column
    part.size = units.free_size if force else units.size
    if units.parents is None:
        return begin, forced
    parents = _Units()
    references = _fill(parents, units.parents, force)
    part.parents, part.children = ctypes.addressof(parents), units.children
    return begin, forced, parents, references
