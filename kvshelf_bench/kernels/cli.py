"""`kvshelf bench kernels` and `kvshelf bench column-sums`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from kvshelf._extras import needs_extra
from kvshelf.terminal import progress_bar
from kvshelf_bench.options import Device, Dtype, Reporting, Threads, numbers, publish

if TYPE_CHECKING:
    from kvshelf_bench.kernels.kernels import Ceilings, KernelTime
    from kvshelf_bench.kernels.products import ProductTime

_LENGTHS = {"cuda": [8192, 32768], "cpu": [512, 2048]}
_ROUNDS = {"cuda": 20, "cpu": 5}


def kernels(
    *,
    device: Device = "auto",
    dtype: Dtype = "auto",
    threads: Threads = 1,
    lengths: Annotated[
        str, typer.Option(help="Tokens, comma-separated.  [default: 8192,32768; on a CPU 512,2048]")
    ] = "",
    rounds: Annotated[int, typer.Option(min=0, help="Calls; 0: 20 on a GPU, 5 on a CPU.")] = 0,
    products: Annotated[
        str,
        typer.Option(help="On a CPU, products with the weights of smollm2-135m, qwen2.5-0.5b, llama-3.1-8b, or none."),
    ] = "smollm2-135m",
    reporting: Reporting,
) -> None:
    """Every kernel on one layer of Llama-3.1-8B, beside the bandwidth and the matrix rate of this device.

    dtype auto is bfloat16 on a GPU and float32 on a CPU. No model is loaded. In fp32 on a CPU with compiled kernels
    follow products with the weights of a model, beside torch's and oneDNN's.
    """
    with needs_extra("serve", "the bench"):
        import torch

        from kvshelf.model.devices import chosen_dtype
        from kvshelf.model.loading import chosen_device
        from kvshelf_bench.kernels.kernels import ceilings, kernel_times
        from kvshelf_bench.kernels.products import product_times
        from kvshelf_bench.measure import load_warning, machine, use_threads

    use_threads(threads)
    target = chosen_device(device)
    state = chosen_dtype(dtype, auto=torch.bfloat16 if target.type == "cuda" else torch.float32)
    where = machine()
    limits = ceilings(target, state)
    rows = []
    at = numbers(lengths) if lengths else _LENGTHS[target.type]
    with progress_bar() as progress:
        for tokens in progress.track(at, description="kernels"):
            rows.append(list(kernel_times(target, state, tokens, rounds or _ROUNDS[target.type], limits)))
    report: dict[str, Any] = {"bench": "kernels", "dtype": str(state).removeprefix("torch."), "machine": where}
    report["copy_bytes_per_s"], report["matmul_flops"] = limits.copy_bytes_per_s, limits.matmul_flops
    report["rows"] = [row for of_length in rows for row in of_length]
    tables = [_table(of_length, report["dtype"], limits) for of_length in rows]
    if target.type == "cpu" and state == torch.float32 and products != "none":
        times = list(product_times(products, rounds or _ROUNDS["cpu"], limits))
        report["products"] = times
        tables += [_products_table(products, times, where["cpu_kernels"])] if times else []
    publish(report, tables, reporting, notes=load_warning(where))


def _table(rows: list[KernelTime], dtype: str, limits: Ceilings) -> Table:
    table = Table("operation", "time", "GB/s", "TFLOP/s", "limit", "of limit", "of prefill", "extra memory")
    table.title = (
        f"one layer of Llama-3.1-8B, {rows[0].tokens} tokens, {dtype}; ceilings {limits.copy_bytes_per_s / 1e9:,.0f} "
        f"GB/s copied, {limits.matmul_flops / 1e12:,.2f} TFLOP/s"
    )
    for row in rows:
        seconds = row.seconds.median
        table.add_row(
            row.name if row.slower is None else f"  {row.name}: {row.slower:.1f}x",
            f"{seconds * 1e3:,.3f} ms",
            f"{row.nbytes / seconds / 1e9:,.1f}",
            f"{row.flops / seconds / 1e12:,.3f}",
            row.limit,
            f"{row.share:.0%}",
            f"{row.of_prefill:.2%}",
            "" if row.extra_bytes is None else f"{row.extra_bytes / 1e6:,.1f} MB",
        )
    return table


def _products_table(model: str, rows: list[ProductTime], form: str) -> Table:
    table = Table("weight", "rows", "", "torch", "oneDNN", "kvshelf", "as it lies", "of oneDNN", "read", "of limit")
    for narrow in ("bf16", "int8"):
        table.add_column(narrow)
    table.title = f"products with the weights of {model}, fp32, {form}; one row in GB/s of weights, more in GFLOP/s"
    for row in rows:
        amount = row.outputs * row.inputs * (4 if row.rows == 1 else 2 * row.rows) / 1e9
        table.add_row(
            f"{row.outputs} x {row.inputs}",
            str(row.rows),
            "GB/s" if row.rows == 1 else "GFLOP/s",
            *(f"{amount / seconds:,.1f}" for seconds in (row.torch, row.onednn, row.ours, row.plain)),
            f"{row.onednn / row.ours:.2f}",
            f"{row.outputs * row.inputs * 4 / row.read_s / 1e9:,.1f} GB/s",
            f"{row.of_limit:.0%}",
            *(f"{row.ours / seconds:.2f} times" for seconds in (row.bf16, row.int8)),
        )
    return table


def column_sums(
    *,
    tokens: Annotated[int, typer.Option(min=16, help="Tokens of the sequence.")] = 8192,
    rounds: Annotated[int, typer.Option(min=1, help="Repeats; medians are printed.")] = 5,
    threads: Threads = 1,
    reporting: Reporting,
) -> None:
    """Exact attention column sums beside plain attention and two other ways to the same sums, on the CPU.

    One layer of 8 query and 2 KV heads of 128 channels.
    """
    import torch

    from kvshelf_bench.kernels.kernels import column_sum_times
    from kvshelf_bench.measure import machine, use_threads

    use_threads(threads)
    table = Table("dtype", "plain attention", "column sums", "second flash call", "naive")
    table.title = f"attention column sums of {tokens} tokens, CPU time beside plain causal attention"
    rows = []
    for dtype in ("float32", "bfloat16"):
        times = column_sum_times(tokens, getattr(torch, dtype), rounds)
        attention, *others = (times[name] for name in ("attention", "column_sums", "second_attention", "naive"))
        shown = [f"{seconds:.3f} s, {seconds / attention:.2f}x" for seconds in others]
        table.add_row(dtype, f"{attention:.3f} s", *shown)
        rows.append({"dtype": dtype, **times})
    report = {"bench": "column-sums", "tokens": tokens, "rounds": rounds, "machine": machine(), "rows": rows}
    publish(report, [table], reporting)
