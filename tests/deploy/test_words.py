"""Every command, option and setting that a file of deploy/ names exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer
from ray.scripts.scripts import cli as ray

from kvshelf.cli import app
from kvshelf.service.settings import OTHER_VARIABLES, PREFIX, Settings
from tests.deploy.files import DEPLOY, every_file

# A command as it stands in a shell line, in a list of YAML, or in a unit: its words until the line or the list ends.
WORDS = r"((?:[ ,\[]+\S+)*)"
KVSHELF = re.compile(
    rf"(?<![\w/.:-])(?:/opt/kvshelf/bin/)?kvshelf (?!kvshelf|on\b)([a-z][a-z-]*)\b{WORDS}"
)  # not in prose, nor a folder
RAY = re.compile(rf"(?<![\w/.-])ray (start|stop|health-check|up)\b{WORDS}")
OPTION = re.compile(r"(?<=[\s,\[])--[a-z][a-z-]*")


def shell_lines(path: Path) -> str:
    """The text with continued lines joined, and YAML's lists of words written as commands."""
    text = re.sub(r"\\\n\s*#?", " ", path.read_text())
    return re.sub(r"\n\s*- (?=\S)", " ", text) if path.name.startswith("compose") else text


def options(command: Any) -> set[str]:
    return {name for parameter in command.params for name in parameter.opts}


def subcommand(group: Any, *names: str) -> Any:
    """A command of click, or of the click that typer carries with it."""
    for name in names:
        assert name in group.commands, f"there is no command {name!r}"
        group = group.commands[name]
    return group


@pytest.mark.parametrize("path", every_file(), ids=lambda path: str(path.relative_to(DEPLOY)))
def test_commands_and_settings_exist(path: Path) -> None:
    text = shell_lines(path)
    ours = typer.main.get_command(app)
    for name, rest in KVSHELF.findall(text):
        names = [name, *rest.split()[:1]] if hasattr(subcommand(ours, name), "commands") else [name]
        command = subcommand(ours, *names)
        assert set(OPTION.findall(rest)) <= options(command), f"kvshelf {name}{rest}"
    for name, rest in RAY.findall(text):
        assert set(OPTION.findall(rest)) <= options(subcommand(ray, name)), f"ray {name}{rest}"
    known = {PREFIX + field.upper() for field in Settings.model_fields} | OTHER_VARIABLES
    assert set(re.findall(rf"\b{PREFIX}[A-Z_]+\b", text)) <= known


def test_the_words_are_found_where_they_stand() -> None:
    found = {(path.name, name) for path in every_file() for name, _ in KVSHELF.findall(shell_lines(path))}
    assert {("kvshelf.service", "serve"), ("front-end.sh", "serve"), ("compose.yaml", "keys")} <= found
    assert ("compose.vllm.yaml", "vllm-proxy") in found
    assert {("ray-cluster.yaml", "serve"), ("values.yaml", "keys")} <= found
    head = [rest for name, rest in RAY.findall(shell_lines(DEPLOY / "compose.yaml")) if name == "start"]
    assert any("--object-store-memory" in rest and "--head" in rest for rest in head)
