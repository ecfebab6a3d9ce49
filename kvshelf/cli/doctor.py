"""doctor: check that everything kvshelf needs is installed and works."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import kvshelf
from kvshelf._extras import install_command, needs_extra
from kvshelf.cli import _options
from kvshelf.cli.checks import stores
from kvshelf.cli.checks.model import BUNDLED, Finding, findings
from kvshelf.cli.output import common, say, say_json
from kvshelf.errors import InvalidRequest, KvshelfError, MissingExtra, NoWorker

if TYPE_CHECKING:
    from kvshelf.cli.checks.isolation import LookupProbe

_WITH_PROGRESS = ("scrub", "reseal")
"""Checks that show their own progress bar."""

Check = tuple[str, Callable[[], str]]


@dataclass(frozen=True)
class _Shelf:
    store: _options.Store = None
    encryption_key_file: _options.KeyFile = None
    scrub: Annotated[bool, typer.Option("--scrub", help="Read every cache of --store and set corrupt ones aside.")] = (
        False
    )
    reseal: Annotated[
        bool, typer.Option("--reseal", help="Seal every cache of --store with the first key of the key file.")
    ] = False

    def checks(self) -> Iterator[Check]:
        if (url := self.store) is None:
            return
        yield "store", lambda: stores.look_over(url, self.encryption_key_file)
        if self.reseal:
            yield "reseal", lambda: stores.reseal(url, self.encryption_key_file)
        if self.scrub:
            yield "scrub", lambda: stores.scrub(url, self.encryption_key_file)


@dataclass(frozen=True)
class _Isolation:
    """Two tenants of a service that must see nothing of each other."""

    isolation: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Only prove that the tenants of two keys see nothing of each other there."),
    ] = None
    key: Annotated[
        list[str] | None, typer.Option(help="With --isolation: the key of a tenant; give two, or name two files.")
    ] = None
    pairs: Annotated[int, typer.Option(min=20, help="With --isolation: look-ups of each kind to time.")] = 400


def doctor(
    shelf: _Shelf,
    tenants: _Isolation,
    model: Annotated[str, typer.Option(help="Model to load and ask.")] = BUNDLED,
    device: _options.Device = "auto",
    dtype: _options.Dtype = "auto",
    url: _options.Url = None,
    as_json: _options.AsJson = False,
) -> None:
    """Check versions, device and model; with --store a store, with --url a service. Exits with 1 if a check fails.

    The model is tried: a document is put on a shelf of its own and asked, and asked again by a new process. Then
    follows what of kvshelf this model can have: its chat template, tools, thinking, policies, gates and so on.

    With --isolation nothing else is checked: two keys of a running service, one tenant each, must get equal answers in
    equal times for what the other one has and for what nobody has. It takes some minutes, and removes what it made.
    """
    if tenants.isolation is not None:
        _isolated(tenants.isolation, tenants.key or [], tenants.pairs, as_json=as_json)
        return
    if shelf.store is None and (shelf.scrub or shelf.reseal):
        raise InvalidRequest("--scrub and --reseal need a store; give its URL as --store", param="--store")
    checks = [*_checks(model, device, dtype), *shelf.checks()]
    if url is not None:
        checks.append(("service", lambda: _service(url)))
    failed = False
    for finding in _findings(checks, model, device, dtype):
        failed = failed or not finding.ok
        if as_json:
            say_json({"check": finding.check, "ok": finding.ok, "finding": finding.message})
        else:
            say(f"{'ok  ' if finding.ok else 'FAIL'}  {finding.check:<13} {finding.message}")
    raise typer.Exit(1 if failed else 0)


def _findings(checks: Sequence[Check], model: str, device: str, dtype: str) -> Iterator[Finding]:
    """A model whose memory cannot be planned, or is not there, is not tried: that takes a process and many seconds."""
    startable = True
    for finding in _run(checks):
        startable = startable and (finding.ok or finding.check != "memory")
        yield finding
    if startable:
        yield from _tried(model, device, dtype)
    else:
        yield Finding("model", False, f"{model} was not tried: memory says why")


def _checks(model: str, device: str, dtype: str) -> Iterator[Check]:
    yield "kvshelf", lambda: f"{kvshelf.__version__} on Python {platform.python_version()}, {platform.machine()}"
    for package in ("torch", "transformers", "ray", "fastapi"):
        yield package, lambda package=package: _installed(package)  # type: ignore[misc]
    yield "device", _device
    yield "intensity", lambda: _intensity(device, dtype)
    yield "kernels", _kernels
    yield "memory", lambda: _memory(model, device, dtype)


def _run(checks: Sequence[Check]) -> Iterator[Finding]:
    for name, check in checks:
        with nullcontext() if name in _WITH_PROGRESS else common.notes.status(f"checking {name} ..."):
            finding = _attempt(name, check)
            yield from (
                [finding._replace(message=line) for line in finding.message.splitlines()] if finding.ok else [finding]
            )


def _attempt(name: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(name, True, check())
    except KvshelfError as error:
        return Finding(name, False, error.message)
    except Exception as error:
        # A broken installation can raise anything; the remaining checks are still useful.
        return Finding(name, False, f"{type(error).__name__}: {error}")


def _tried(name: str, device: str, dtype: str) -> Iterator[Finding]:
    """What `checks.model` finds, and last what ended it."""
    with common.notes.status(f"trying {name} ..."):
        features = findings(name, device, dtype)
        try:
            with needs_extra("serve", purpose="a model"):
                yield from features
        except KvshelfError as error:
            yield Finding("model", False, error.message)
        except Exception as error:  # as of the other checks
            yield Finding("model", False, f"{type(error).__name__}: {error}")


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError as error:
        raise MissingExtra(f"{package} is not installed; run: {install_command('serve')}") from error


def _device() -> str:
    with needs_extra("serve", purpose="the device"):
        import torch
    if not torch.cuda.is_available():
        return f"cpu, {torch.get_num_threads()} threads"
    names = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return ", ".join(f"{gpu.name} with {gpu.total_memory / 2**30:.0f} GiB" for gpu in names)


def _intensity(device: str, dtype: str) -> str:
    """Measures what `KVSHELF_OPERATIONAL_INTENSITY` may say."""
    with needs_extra("serve", purpose="the device"):
        import torch

        from kvshelf.engine.decode.equivalents import intensity_of
        from kvshelf.kernels.rates import matmul_rate, read_bandwidth
        from kvshelf.model.devices import chosen_dtype
        from kvshelf.model.loading import chosen_device
    where = chosen_device("auto" if device == "spread" else device)
    numbers = chosen_dtype(dtype, auto=torch.float32 if where.type == "cpu" else torch.bfloat16)
    flops, bandwidth = matmul_rate(where, numbers), read_bandwidth(where)
    known = intensity_of(where)
    listed = "unknown" if known is None else f"{known:.0f}"
    return (
        f"{flops / bandwidth:.0f} FLOP a byte in {str(numbers).removeprefix('torch.')} ({flops / 1e9:,.0f} GFLOP and "
        f"{bandwidth / 1e9:,.1f} GB a second of its time), {listed} in the table"
    )


def _memory(model: str, device: str, dtype: str) -> str:
    """The plan of a replica under the settings of this environment, with the device and the dtype that are named; a
    line for each card that the model is spread over."""
    with needs_extra("serve", purpose="the memory"):
        from kvshelf.service.process.preflight import memory_plan
        from kvshelf.service.settings import load_settings
    named: dict[str, Any] = {name: value for name, value in (("device", device), ("dtype", dtype)) if value != "auto"}
    plan = memory_plan(load_settings(**named), model)
    if plan is None:
        return "no plan: several processes share the model, or another engine holds it"
    plan.require()
    return str(plan)


def _kernels() -> str:
    with needs_extra("serve", purpose="the kernels"):
        import torch

        from kvshelf.kernels.dispatch import cpu_form, gpu_form
        from kvshelf.kernels.native import LEVEL, architecture, capability
    if torch.cuda.is_available() and gpu_form() == "eager":
        return "on a GPU: eager, torch operations, which are slower; for Triton's kernels run: pip install triton"
    form, level = cpu_form(), os.environ.get(LEVEL)
    if os.environ.get("KVSHELF_KERNELS"):
        return f"on a CPU: {form}, set by KVSHELF_KERNELS"
    if form != "eager":
        return f"on a CPU: {form}, compiled from C" + (f", the level set by {LEVEL}" if level else "")
    if level and architecture() is None:
        return (
            f"on a CPU: eager, torch operations; {LEVEL} is {level}, which cannot run where torch finds {capability()}"
        )
    if architecture() is None:
        return "on a CPU: eager, torch operations; compiled kernels do not support this processor"
    return (
        "on a CPU: eager, torch operations. Compiled kernels are faster: install a C compiler (GCC 11 or newer, or "
        "Clang) and run: python -m kvshelf.kernels.compiling"
    )


def _isolated(url: str, keys: Sequence[str], pairs: int, *, as_json: bool) -> None:
    from kvshelf.cli.checks import isolation

    if len(keys) != 2:
        raise InvalidRequest("--isolation takes two keys of two tenants: --key A --key B", param="--key")
    with common.notes.status("") as status:
        probes = isolation.prove(url, [_key(text) for text in keys], pairs=pairs, show=status.update)
    if as_json:
        for probe in probes:
            say_json(asdict(probe) | {"leaks": probe.leaks})
    else:
        rows = [_probe(probe) for probe in probes]
        common.print_table(common.table(["", "WHAT", "OF", "TIME", "AUC", "DIFFERENCES"], rows, numbers=[3]))
        leaks = sum(probe.leaks for probe in probes)
        summary = (
            f"{leaks} of {len(probes)} probes tell the tenants apart" if leaks else "nothing of each other is seen"
        )
        common.notes.print(f"{summary}: {pairs} pairs of look-ups, AUC at most {isolation.MOST_AUC}")
    raise typer.Exit(1 if any(probe.leaks for probe in probes) else 0)


def _key(text: str) -> str:
    """A key, or the content of the file that has one: arguments show in the list of processes."""
    try:
        return text if text.startswith("kvsk_") else Path(text).read_text().strip()
    except (OSError, UnicodeError) as error:
        raise InvalidRequest(f"--key {text!r} is no key and no file that has one", param="--key") from error


def _probe(probe: LookupProbe) -> tuple[str, ...]:
    aucs = ", ".join(f"{value:.3f}" for value in probe.aucs) or "-"
    took = f"{probe.ms:.2f} ms" if probe.aucs else "-"
    return (
        "FAIL" if probe.leaks else "ok",
        probe.what,
        probe.owner,
        took,
        aucs,
        "; ".join(probe.differences) or "none",
    )


def _service(url: str) -> str:
    from kvshelf.client import Client

    with Client(url) as client:
        ready = client.ready()
    broken = [f"{part.name}: {part.reason}" for part in ready.parts if not part.ready]
    if broken:
        raise NoWorker(f"{url} is degraded: {'; '.join(broken)}")
    return f"{url} is ready: {', '.join(part.name for part in ready.parts)}"
