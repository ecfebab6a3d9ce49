"""uninstall: lists what kvshelf has left on this machine, and removes it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal
from urllib.parse import unquote, urlsplit

import typer

import kvshelf
from kvshelf.cli import _options
from kvshelf.cli.output import common, say
from kvshelf.errors import InvalidRequest

What = Literal[
    "home",
    "tier",
    "server",
    "Ray",
    "kernels",
    "calibrations",
    "models",
    "completion",
    "keys",
    "settings",
    "unit",
    "shared",
]

_UNITS: Final = (
    "/etc/systemd/system",
    "/usr/lib/systemd/system",
    "/usr/local/lib/systemd/system",
    "~/.config/systemd/user",
)
_KEY_FILES: Final = ("KVSHELF_ENCRYPTION_KEY_FILE", "KVSHELF_API_KEY_FILE", "KVSHELF_ERASURE_KEY_FILE")
_IN_A_HOME: Final = ("shelf.sqlite3", "shelf.sqlite3-wal", "shelf.sqlite3-shm", "blobs", "quarantine", "tier")
_COMPLETIONS: Final = ("~/.bash_completions/kvshelf.sh", "~/.zfunc/_kvshelf", "~/.config/fish/completions/kvshelf.fish")
_KERNELS: Final = Path(kvshelf.__file__).parent / "kernels"
_SHARED: Final = "other programs may use it; remove it yourself"


@dataclass(frozen=True)
class Remainder:
    """One thing that is left. remedy: what a person must do, where this command removes nothing."""

    what: What
    place: str
    nbytes: int = 0
    remedy: str = ""


def uninstall(
    store: _options.Store = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what is left, and remove nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Remove it without asking.")] = False,
) -> None:
    """List everything that kvshelf has left on this machine, and remove it after a question.

    That is: the homes and tiers of KVSHELF_STORE, of --store and of systemd units, and the default one; Ray's folder
    with its sockets and logs; compiled kernels, calibrations, models of GGUF files and shell completions. What has a
    remark stays: servers and buckets, key files, units of systemd and their settings, and what other programs may use.
    Stop the services first.
    """
    remnants = list(dict.fromkeys(remainders(os.environ, store)))
    _show(remnants)
    removable = [remainder for remainder in remnants if not remainder.remedy]
    if dry_run or not removable:
        return
    if running := running_in([remainder.place for remainder in removable]):
        raise InvalidRequest(f"kvshelf runs (process {', '.join(running)}); stop it first", param="--yes")
    if not yes and not (sys.stdin.isatty() and typer.confirm("Remove all that has no remark?")):
        raise InvalidRequest("nothing was removed; repeat it with --yes", param="--yes")
    for remainder in removable:
        _remove(remainder)
        say("removed", remainder.place)
    common.notes.print("What is left is the package: pip uninstall kvshelf")


def _show(remnants: list[Remainder]) -> None:
    rows = [
        [remainder.what, remainder.place, common.megabytes(remainder.nbytes), remainder.remedy]
        for remainder in remnants
    ]
    if rows:
        common.print_table(common.table(["WHAT", "PLACE", "SIZE", ""], rows, numbers=[2]))
    else:
        common.notes.print("kvshelf has left nothing that it can find")


def remainders(environment: Mapping[str, str], store: str | None) -> Iterator[Remainder]:
    """What is left, as the settings of this environment and of systemd's units say."""
    units = list(_units())
    every = [environment, *(settings for _, settings in units)]
    data = Path(environment.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "kvshelf"
    for folder in ("calibrations", "gates", "served"):
        yield from _existing("calibrations", str(data / folder))
    caches = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    yield from _existing("models", str(caches / "kvshelf"))
    for url in (f"disk://{data}", store, *(settings.get("KVSHELF_STORE") for settings in every)):
        if url:
            yield from _of_store(url)
    yield from _of_ray(environment)
    for name in _KEY_FILES:
        for settings in every:
            yield from _existing(
                "keys", settings.get(name), "a backup or another machine may need it; remove it yourself"
            )
    for script in _COMPLETIONS:
        yield from _existing("completion", script)
    for library in sorted(_KERNELS.glob("*.so")):
        yield from _existing("kernels", str(library))
    for unit, settings in units:
        yield from _existing("settings", settings.get("KVSHELF_ENV_FILE"), "remove it with its unit")
        yield Remainder("unit", str(unit), _size(unit), f"systemctl disable --now {unit.stem}, then remove it")
    hub = environment.get("HF_HOME") or "~/.cache/huggingface"
    for cache in (hub, environment.get("TRITON_CACHE_DIR") or "~/.triton"):
        yield from _existing("shared", cache, _SHARED)


def _of_store(url: str) -> Iterator[Remainder]:
    """The folders of a store, and what of it lies elsewhere."""
    from kvshelf.store.private import without_secret

    *tiers, home = re.split(r"\+(?=[a-z-]+:)", url)
    for part in (*tiers, home):
        place, _, query = part.partition("?")
        kind: What = "home" if part is home else "tier"
        if urlsplit(place).scheme == "disk":
            folder = Path(unquote(urlsplit(place).path))
            parts = [folder / name for name in _IN_A_HOME if (folder / name).exists()]
            if parts:
                yield Remainder(kind, str(folder), sum(map(_size, parts)))
        elif urlsplit(place).scheme != "ram":
            yield Remainder(
                "server", without_secret(place), 0, "delete its keys there, or: kvshelf erase --tenant, for each"
            )
        if "blobs=" in query:
            bucket = re.sub(r"^.*\bblobs=([^&]*).*$", r"\1", query)
            yield Remainder("server", without_secret(unquote(bucket)), 0, "delete the objects under this prefix there")


def _of_ray(environment: Mapping[str, str]) -> Iterator[Remainder]:
    yield from _existing("Ray", str(Path(tempfile.gettempdir()) / f"kvshelf-{os.getuid()}"))
    if (folder := environment.get("RAY_TMPDIR")) is not None:
        yield from _existing("Ray", str(Path(folder) / "ray"), _SHARED)


def _existing(what: What, place: str | None, remedy: str = "") -> Iterator[Remainder]:
    path = None if not place else Path(place).expanduser()
    if path is not None and path.exists():
        yield Remainder(what, str(path), _size(path), remedy)


def running_in(places: Sequence[str]) -> list[str]:
    """The processes of this user that run kvshelf, or whose command names one of the places, as Ray's do."""
    names: list[str] = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = [os.fsdecode(word) for word in (process / "cmdline").read_bytes().split(b"\0")]
            serves = {"serve", "batch"} & set(words) and any(Path(word).name == "kvshelf" for word in words[:4])
            uses = any(f"{place}/" in word for place in places for word in words)
            if (serves or uses) and process.stat().st_uid == os.getuid():
                names.append(process.name)
    return names


def _units() -> Iterator[tuple[Path, dict[str, str]]]:
    """The units of systemd that start kvshelf, with the settings that they give it."""
    for folder in _UNITS:
        for unit in sorted(Path(folder).expanduser().glob("*.service")):
            try:
                text = unit.read_text()
            except (OSError, UnicodeDecodeError):
                continue
            if re.search(r"^ExecStart=.*\bkvshelf\b", text, re.MULTILINE):
                yield unit, _settings_of(text)


def _settings_of(unit: str) -> dict[str, str]:
    settings: dict[str, str] = {}
    for line in re.findall(r"^Environment=(.*)$", unit, re.MULTILINE):
        settings |= dict(setting.split("=", 1) for setting in shlex.split(line) if "=" in setting)
    files = re.findall(r"^EnvironmentFile=-?(.*)$", unit, re.MULTILINE)
    files += re.findall(r"^ExecStart=.*--env-file[ =](\S+)", unit, re.MULTILINE)
    for file in files:
        settings["KVSHELF_ENV_FILE"] = file
        with_text = Path(file)
        if os.access(with_text, os.R_OK):
            assignments = re.findall(r"^[ \t]*(\w+)=(.*)$", with_text.read_text(errors="replace"), re.MULTILINE)
            settings |= {name: value.strip().strip("\"'") for name, value in assignments}
    if match := re.search(r"^ExecStart=.*--store[ =](\S+)", unit, re.MULTILINE):
        settings["KVSHELF_STORE"] = match[1]
    return settings


def _size(path: Path) -> int:
    """Bytes of a file, or of all in a folder that can be read."""
    if not path.is_dir():
        return path.lstat().st_size
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):  # it went meanwhile
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


def _remove(remainder: Remainder) -> None:
    """Remove a thing; of a home its own parts alone, and the folder if nothing else is in it."""
    place = Path(remainder.place)
    of_home = remainder.what in ("home", "tier")
    try:
        for path in [place / name for name in _IN_A_HOME] if of_home else [place]:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        if of_home and not any(place.iterdir()):
            place.rmdir()
    except OSError as error:
        raise InvalidRequest(f"cannot remove {error.filename or place}: {error.strerror}") from error
