"""`kvshelf bench speed`."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from kvshelf._extras import needs_extra
from kvshelf.terminal import progress_bar
from kvshelf_bench.options import Reporting, WeightedLoading, choices, publish
from kvshelf_bench.speed.options import SpeedOptions


def speed(loading: WeightedLoading, options: SpeedOptions, reporting: Reporting) -> None:
    """Compression beside its prefill, codecs, first tokens beside prefilling again, many questions beside one by one.

    --model random:8 is a Llama of 8 layers of random weights. Seconds are CPU time of this process, on a GPU wall time.
    """
    with needs_extra("serve", "the bench"):
        import torch

        from kvshelf_bench.measure import load_warning, machine
        from kvshelf_bench.speed.parts import PARTS, Run
        from kvshelf_bench.speed.subject import load_subject

    chosen, lengths = choices(options.parts, tuple(PARTS), "--parts"), options.document_tokens()
    _ = options.question_counts(), options.new_tokens()  # refused before a model is loaded
    where, tables = machine(), list[Table]()
    report: dict[str, Any] = {"bench": "speed", "model": loading.model, "weights": loading.weights}
    report["rounds"] = options.rounds
    with load_subject(loading.engine_options()) as subject, progress_bar() as progress:
        report |= {"dtype": subject.dtype, "machine": where | {"threads": torch.get_num_threads()}}
        run = Run(subject, options, lengths, loading.threads, progress, report)
        for name, part in PARTS.items():
            if name in chosen:
                report[name.replace("-", "_")] = result = part.measure(run)
                tables += part.tables(result)
    notes = [f"not measured: {part}" for part in run.missing] + [load_warning(where)]
    publish(report, tables, reporting, notes="\n".join(filter(None, notes)))
