"""What packing kept rows and quantizing them cost on the CPU, beside the same out of torch's operations taken plainly.

python -m kvshelf.bench.kernels.rows
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kvshelf.bench.measure import Spread, cost, interleaved, machine, ratios
from kvshelf.kernels.quantize import dequantize_channels, dequantize_tokens, quantize_channels, quantize_tokens
from kvshelf.kernels.select import pack
from kvshelf.kernels.select.eager import rows_at

_BITS, _GROUP = 4, 32

Forms = Mapping[str, Callable[[], object]]
"""The same operation as "ours", "plain" and as a "copy" of what is returned."""


@dataclass(frozen=True)
class RowTimes:
    """One operation on one kind of rows. `ours_ms`: process time, the median over the rounds. `gain`: the plain form's
    time over ours within a round. `floor`: ours over the least there is to do, a copy into new memory of what is
    returned."""

    operation: str
    ours_ms: float
    gain: Spread
    floor: Spread


def time_rows(rounds: int = 9, mib: int = 64) -> list[RowTimes]:
    """Time everything, with torch's current number of threads: packing 2,048 of 8,192 entries of 2 heads, and
    quantizing `mib` MiB of rows of 128 channels."""
    return [
        _timed(name, forms, rounds)
        for dtype in (torch.float32, torch.bfloat16)
        for name, forms in (*_packing(dtype), *_quantizing(dtype, mib))
    ]


def _timed(name: str, forms: Forms, rounds: int) -> RowTimes:
    device = torch.device("cpu")
    costs = interleaved({form: partial(cost, run, device) for form, run in forms.items()}, rounds)
    seconds = {form: [one.seconds for one in found] for form, found in costs.items()}
    ours = seconds["ours"]
    return RowTimes(name, 1000 * Spread.of(ours).median, ratios(seconds["plain"], ours), ratios(ours, seconds["copy"]))


def _packing(dtype: torch.dtype, heads: int = 2, tokens: int = 8192, kept: int = 2048) -> Iterator[tuple[str, Forms]]:
    """Ten times in a row: the gather of one tensor's rows, from positions, and the packing of both, for which ours
    starts from the mask and the plain form is given its positions for nothing."""
    best = torch.rand(heads, tokens, generator=_generator(0)).topk(kept, dim=1).indices
    mask = torch.zeros(heads, tokens, dtype=torch.bool).scatter_(1, best, True)
    index = best.sort(dim=1).values
    for dim in (64, 128):
        for layout in ("token-major", "head-major"):
            keys, values = (_states(heads, tokens, dim, layout, seed).to(dtype) for seed in range(2))
            rows = torch.zeros(heads * kept, dim, dtype=dtype)
            gathering: Forms = {
                "ours": partial(rows_at, keys, torch.arange(heads).repeat_interleave(kept), index.flatten()),
                "plain": partial(_gathered, (keys,), index),
                "copy": partial(_cloned, (rows,)),
            }
            packing: Forms = {
                "ours": partial(pack, keys, values, mask, [kept] * heads),
                "plain": partial(_gathered, (keys, values), index),
                "copy": partial(_cloned, (rows, rows)),
            }
            for name, forms in (("gather", gathering), ("pack", packing)):
                repeated = {form: partial(_repeated, run, 10) for form, run in forms.items()}
                yield f"10 x {name} {str(dtype).removeprefix('torch.')} {layout} D={dim}", repeated


def _quantizing(dtype: torch.dtype, mib: int) -> Iterator[tuple[str, Forms]]:
    x = torch.randn((mib << 20) // (128 * dtype.itemsize), 128, generator=_generator(0)).to(dtype)
    named = str(dtype).removeprefix("torch.")
    for dim, quantize, dequantize in (
        (1, quantize_tokens, dequantize_tokens),
        (2, quantize_channels, dequantize_channels),
    ):
        stored = quantize(x, _BITS, _GROUP)
        axis = "tokens" if dim == 1 else "channels"
        yield (
            f"quantize int4 {named} {axis}",
            {
                "ours": partial(quantize, x, _BITS, _GROUP),
                "plain": partial(plain_quantize, x, dim),
                "copy": partial(_cloned, stored),
            },
        )
        yield (
            f"dequantize int4 {named} {axis}",
            {
                "ours": partial(dequantize, *stored, _BITS, _GROUP, 128, dtype),
                "plain": partial(plain_dequantize, *stored, dim, dtype),
                "copy": partial(_cloned, (x,)),
            },
        )


def gather_expanded(states: Tensor, index: Tensor) -> Tensor:
    """Rows `[heads, kept]` int64 of states `[heads, N, D]`, by an index that names every channel."""
    return states.gather(1, index.unsqueeze(-1).expand(-1, -1, states.shape[-1])).contiguous()


def plain_quantize(x: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """int4 codes of rows `[R, C]` in groups of 32 rows (`dim` 1) or channels (2), everything in one go and scales
    rounded to nearest: what one writes first. R and C must be multiples of the group."""
    groups = _grouped(x.float(), dim)
    low, high = groups.amin(dim, keepdim=True), groups.amax(dim, keepdim=True)
    scale = ((high - low) / 15).clamp_min(1e-8)
    codes = ((groups - low) / scale).round().clamp(0, 15).to(torch.uint8).view(x.shape)
    packed = codes[:, 0::2] | (codes[:, 1::2] << 4)
    return packed, scale.squeeze(dim).to(torch.bfloat16), low.squeeze(dim).to(torch.bfloat16)


def plain_dequantize(packed: Tensor, scales: Tensor, zeros: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Undoes `plain_quantize`."""
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)
    rows = _grouped(codes.float(), dim) * scales.float().unsqueeze(dim) + zeros.float().unsqueeze(dim)
    return rows.view(codes.shape).to(dtype)


def _grouped(x: Tensor, dim: int) -> Tensor:
    rows, channels = x.shape
    return x.view(-1, _GROUP, channels) if dim == 1 else x.view(rows, -1, _GROUP)


def _states(heads: int, tokens: int, dim: int, layout: str, seed: int) -> Tensor:
    """`[heads, tokens, dim]`: contiguous, or as models hand it over."""
    if layout == "head-major":
        return torch.randn(heads, tokens, dim, generator=_generator(seed))
    return torch.randn(tokens, heads, dim, generator=_generator(seed)).transpose(0, 1)


def _gathered(states: Sequence[Tensor], index: Tensor) -> list[Tensor]:
    return [gather_expanded(each, index) for each in states]


def _cloned(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors]


def _repeated(run: Callable[[], object], times: int) -> None:
    for _ in range(times):
        run()


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _main() -> None:
    torch.set_num_threads(1)
    print(machine())
    for row in time_rows():
        gain, floor = row.gain, row.floor
        print(
            f"{row.operation:40} {row.ours_ms:8.2f} ms  {gain.median:5.2f} times as fast ({gain.low:.2f} to "
            f"{gain.high:.2f})  {floor.median:5.2f} copies"
        )


if __name__ == "__main__":
    _main()
