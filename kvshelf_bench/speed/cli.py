"""`kvshelf bench speed`."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from kvshelf._extras import needs_extra
from kvshelf.terminal import progress_bar
from kvshelf_bench.options import Device, Dtype, Json, Model, Output, Threads, Weights, choices, numbers, publish, split

if TYPE_CHECKING:
    from kvshelf.store.base import Store

PARTS = ("compression", "codecs", "first-token", "decode", "select", "cold", "suffix", "serving", "ranks")
_DEFAULT_PARTS = PARTS[:4]  # all but long documents and answers, vLLM, which few have installed, and several processes

_COMPRESSION_LENGTHS = (2048, 4096, 8192)
_CODECS_LENGTHS = (8192,)
_SELECT_LENGTHS = (32768,)
_SELECT_ROWS = (1, 16)
_SHELF_LENGTHS = (2048, 4096, 8192, 16320)  # the last leaves room for the question in a model of 16,384 positions


def speed(
    model: Model = "kvshelf-tiny",
    device: Device = "auto",
    dtype: Dtype = "auto",
    weights: Weights = "plain",
    threads: Threads = 1,
    parts: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(_DEFAULT_PARTS),
    lengths: Annotated[
        str,
        typer.Option(
            help="Tokens per document.  [default: 2k to 8k, codecs 8k, from the shelf to 16k, serving 2,048 and 8,000, "
            "others 32k, as far as the model takes them]",
        ),
    ] = "",
    policies: Annotated[str, typer.Option(help="To compress with.  [default: all of one pass]")] = "",
    removed: Annotated[float, typer.Option(help="Fraction that those remove.")] = 0.75,
    questions: Annotated[str, typer.Option(help="Asked at once, comma-separated.")] = "1,8,32,128",
    ways: Annotated[
        str, typer.Option(help="Of the documents of the part decode: such as keydiff,snapkv@1024.  [default: full]")
    ] = "",
    answer_tokens: Annotated[int, typer.Option(min=2, help="Of each answer in the part decode.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds; medians are printed.")] = 5,
    kvpress_python: Annotated[
        str | None,
        typer.Option(help="Interpreter with kvpress.  [default: this one, if it has it]"),
    ] = None,
    vllm_python: Annotated[
        str | None, typer.Option(help="Interpreter with vLLM, for the part serving.  [default: this one, if it has it]")
    ] = None,
    llama_python: Annotated[
        str | None,
        typer.Option(
            help="Interpreter with llama-cpp-python, for the part serving.  [default: this one, if it has it]"
        ),
    ] = None,
    budget: Annotated[float, typer.Option(min=1, help="Seconds that the part serving may take.")] = 270.0,
    ranks: Annotated[int, typer.Option(min=2, help="Processes that share the model, for the part ranks.")] = 2,
    stores: Annotated[
        list[str] | None, typer.Option("--store", help="URL of one more store to answer from; may be repeated.")
    ] = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Compression beside its prefill, codecs, first tokens beside prefilling again, many questions beside one by one.

    --model random:8 is a Llama of 8 layers of random weights. Seconds are CPU time of this process, on a GPU wall time.
    """
    with needs_extra("serve", "the bench"):
        import torch

        from kvshelf.methods.suffixes.registry import SUFFIX_POLICIES
        from kvshelf_bench.measure import load_warning, machine
        from kvshelf_bench.quality.grid import Row
        from kvshelf_bench.speed import tables as show
        from kvshelf_bench.speed.codecs import codec_costs
        from kvshelf_bench.speed.cold import colds
        from kvshelf_bench.speed.compression import ONE_PASS, compression_costs
        from kvshelf_bench.speed.decode import DEFAULT, DOCUMENT_TOKENS, decodings
        from kvshelf_bench.speed.first_token import first_tokens
        from kvshelf_bench.speed.peers.peer import open_kvpress
        from kvshelf_bench.speed.ranks import sharings
        from kvshelf_bench.speed.selecting import SELECTORS, selectings
        from kvshelf_bench.speed.serving import LENGTHS, serving
        from kvshelf_bench.speed.subject import fitting, load_subject
        from kvshelf_bench.speed.suffixes import bounded_answers

    chosen = choices(parts, PARTS, "--parts")
    at = numbers(lengths) if lengths else None
    compared = [name.strip() for name in policies.split(",")] if policies else list(ONE_PASS)
    asked = numbers(questions, "--questions")
    where, tables, notes = machine(), list[Table](), list[str]()
    report: dict[str, Any] = {"bench": "speed", "model": model, "weights": weights, "rounds": rounds}
    with load_subject(model, device, dtype, threads, weights) as subject, progress_bar() as progress:
        report |= {"dtype": subject.dtype, "machine": where | {"threads": torch.get_num_threads()}}
        if "compression" in chosen:
            with open_kvpress(kvpress_python, subject, threads) as peer:
                steps = progress.track(
                    fitting(subject, at, _COMPRESSION_LENGTHS, "compression", notes), description="compression"
                )
                costs = [compression_costs(subject, peer, tokens, rounds, compared, removed) for tokens in steps]
                report["kvpress"] = peer.versions if peer is not None else None
            report["compression"] = costs
            tables += map(show.compression_table, costs)
        if "codecs" in chosen:
            with _opened([]) as homes:
                steps = progress.track(fitting(subject, at, _CODECS_LENGTHS, "codecs", notes), description="codecs")
                encoded = [codec_costs(subject, homes["disk"], tokens, rounds) for tokens in steps]
            report["codecs"] = encoded
            tables += map(show.codecs_table, encoded)
        if "first-token" in chosen:
            with _opened(stores or []) as homes:
                steps = progress.track(
                    fitting(subject, at, _SHELF_LENGTHS, "first token", notes), description="first token"
                )
                firsts = [first_tokens(subject, homes, tokens, rounds) for tokens in steps]
            report["first_token"] = firsts
            tables += map(show.first_token_table, firsts)
        if "decode" in chosen:
            of_lengths = fitting(subject, at, (DOCUMENT_TOKENS,), "decode", notes)
            kept = [Row.parse(way) for way in split(ways)] or [DEFAULT]
            bar = progress.add_task("decoding", total=len(asked) * len(of_lengths) * len(kept))
            found = decodings(
                subject, asked, rounds, lambda: progress.advance(bar),
                rows=kept, lengths=of_lengths, new_tokens=answer_tokens,
            )  # fmt: skip
            report["decode"] = found
            tables.append(show.decode_table(found))
        if "select" in chosen:
            of_lengths = fitting(subject, at, _SELECT_LENGTHS, "select", notes)
            bar = progress.add_task("selecting", total=len(of_lengths) * len(SELECTORS) * len(_SELECT_ROWS))
            selected = selectings(subject, of_lengths, _SELECT_ROWS, rounds, lambda: progress.advance(bar))
            report["select"] = selected
            tables.append(show.selecting_table(selected))
        if "cold" in chosen:
            with _opened(stores or []) as homes:
                of_lengths = fitting(subject, at, _SELECT_LENGTHS, "cold", notes)
                bar = progress.add_task("reading", total=len(of_lengths) * (len(homes) + 1))
                report["cold"] = read = colds(subject, homes, of_lengths, rounds, lambda: progress.advance(bar))
            tables.append(show.cold_table(read))
        if "suffix" in chosen:
            bar = progress.add_task("answering", total=1 + len(SUFFIX_POLICIES))
            report["suffix"] = bounded = bounded_answers(subject, progress=lambda: progress.advance(bar))
            tables.append(show.suffix_table(bounded))
        if "serving" in chosen:
            of_lengths = fitting(subject, at, LENGTHS, "serving", notes)
            bar = progress.add_task("serving", total=None)
            served = serving(
                subject,
                of_lengths,
                rounds,
                budget,
                {"vLLM": vllm_python, "llama.cpp": llama_python},
                threads,
                tell=lambda row: progress.console.print(show.serving_line(row), soft_wrap=True, highlight=False),
                turn=lambda said: progress.update(bar, description=said),
            )
            progress.remove_task(bar)
            report["serving"] = served
            notes += served.missing
            tables.append(show.serving_table(served))
        if "ranks" in chosen:
            of_lengths = fitting(subject, at, _COMPRESSION_LENGTHS, "ranks", notes)
            report["ranks"] = shared = sharings(subject, ranks, threads, of_lengths, rounds)
            tables.append(show.sharing_table(shared))
    said = [f"not measured: {each}" for each in notes] + [load_warning(where)]
    publish(report, tables, output, as_json, notes="\n".join(filter(None, said)))


@contextmanager
def _opened(urls: list[str]) -> Iterator[dict[str, Store]]:
    """A disk store in a temporary folder, and each of `urls` by its kind: `redis`, the next one `redis-2`, `objects`.

    Never under its URL, which may have a password in it.
    """
    from kvshelf.store.url import open_store

    with tempfile.TemporaryDirectory(prefix="kvshelf-bench-") as folder, ExitStack() as open_stores:
        homes: dict[str, Store] = {}
        named = Counter[str]()
        for url in (f"disk://{folder}/shelf", *urls):
            kind = "objects" if "blobs=" in url else url.partition(":")[0]
            named[kind] += 1
            name = kind if named[kind] == 1 else f"{kind}-{named[kind]}"
            homes[name] = open_stores.enter_context(open_store(url))
        yield homes
