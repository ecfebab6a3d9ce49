"""What the commands write: harmless to a terminal, whatever others put into their texts, and always written."""

from __future__ import annotations

import ast
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvshelf.cli import output
from kvshelf.cli.output import HarmlessConsole, harmless, say, say_json
from kvshelf.cli.output import common as _common
from tests.amounts import few, in_turn

CLI = Path(_common.__file__).parent
HOSTILE = "a\x1b[31m\x1b]0;title\x07b\x9b2Jc\rd\x08e\u202ef\x00\x7f\u2028g\ud800h"
HARMFUL = set("\x1b\x07\x9b\r\x08\u202e\x00\x7f\u2028\ud800")


class Stdout(io.TextIOWrapper):
    def __init__(self, encoding: str = "utf-8") -> None:
        super().__init__(io.BytesIO(), encoding=encoding, write_through=True)

    def text(self) -> str:
        buffer = self.buffer
        assert isinstance(buffer, io.BytesIO)
        return buffer.getvalue().decode(self.encoding)


def written_to(monkeypatch: pytest.MonkeyPatch, encoding: str = "utf-8") -> Stdout:
    stream = Stdout(encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    return stream


def test_lines_and_their_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    stdout = written_to(monkeypatch)
    say("tab\tand", "line\nbreak, größe, 日本")
    say(HOSTILE, Path("caf\udce9.txt"))
    first, second, third = stdout.text().splitlines()
    assert (first, second) == ("tab\tand line", "break, größe, 日本")
    assert third == r"a\x1b[31m\x1b]0;title\x07b\x9b2Jc\rd\x08e\u202ef\x00\x7f\u2028g\ud800h caf\xe9.txt"


def test_json_is_the_same_value_and_as_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    stdout = written_to(monkeypatch)
    value = {"name": HOSTILE, "größe": [1.5, None, True]}
    say_json(value)
    assert json.loads(stdout.text()) == value
    assert not HARMFUL & set(stdout.text())
    assert "größe" in stdout.text()


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_what_stdout_cannot_encode_is_escaped(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = written_to(monkeypatch, encoding)
    output.prepare()
    say("größe 日本 \U0001f600")
    say_json({"größe": "日本 \U0001f600"})
    line, obj = stream.text().splitlines()
    assert line.endswith(r"\u65e5\u672c \U0001f600")
    assert json.loads(obj) == {"größe": "日本 \U0001f600"}


def test_a_console_colours_and_its_texts_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = io.StringIO()
    console = HarmlessConsole(file=stream, force_terminal=True, markup=False, highlight=False, width=200)
    console.print(HOSTILE.replace("\ud800", ""), style="red")
    made = _common.table(["NAME"], [[HOSTILE.replace("\ud800", "")]])
    console.print(made)
    console.print("[bold]kept", f"in {HOSTILE[:5]}")
    said = stream.getvalue()
    assert said.startswith("\x1b[31m"), "the style"
    assert "\x1b[0m" in said
    for harm in ("\x1b]0;", "\x9b", "\x07", "\x08", "\u202e", "a\x1b[31m"):
        assert harm not in said
    assert "[bold]kept" in said


@pytest.mark.parametrize("char", [chr(code) for code in range(0xA0) if not chr(code).isprintable()])
def test_every_control_character(char: str) -> None:
    shown = harmless(f"a{char}b")
    assert (shown == f"a{char}b") == (char in "\t\n\xa0")


def test_a_name_with_a_line_break_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    stdout = written_to(monkeypatch)
    _common.print_table(_common.table(("ID", "NAME"), [("kvs_1", "a\nkvs_2  b\tc")]))
    assert stdout.text().splitlines()[1:] == [r"kvs_1  a\nkvs_2  b\tc"]


def test_a_closed_standard_input_is_empty() -> None:
    command = [sys.executable, "-m", "kvshelf", "put", "-"]
    done = subprocess.run(["sh", "-c", '"$@" <&-', "sh", *command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "standard input is empty" in done.stderr
    assert "Traceback" not in done.stderr


def test_every_command_writes_through_one_module() -> None:
    for path in CLI.rglob("*.py"):
        if path.parent.name == "output":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            called = node.func if isinstance(node, ast.Call) else None
            name = getattr(called, "id", getattr(called, "attr", ""))
            own = isinstance(called, ast.Name)
            assert not (own and name in ("print", "Console")), f"{path.name}:{node.lineno}"  # type: ignore[attr-defined]


_TALK = """
import sys
from kvshelf.cli import app, main
from kvshelf.cli.output import say

@app.command("talk")
def talk(count: int) -> None:
    for _ in range(count):
        say("größe 日本", end=" ")

main()
"""


@in_turn({"encoding": ["ascii", "cp1252", "utf-8"], "locale": ["C", "POSIX"]})
def test_no_traceback_whatever_stdout_is(locale: str, encoding: str) -> None:
    environment = {"LC_ALL": locale, "PYTHONIOENCODING": encoding, "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", _TALK, "talk", "2"]
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout


@pytest.mark.parametrize("place", few(1, ["a closed pipe", "/dev/full", "nothing"]))
def test_no_traceback_where_stdout_takes_nothing(place: str) -> None:
    environment = {"PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", _TALK, "talk", "100000"]
    if place == "a closed pipe":
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
            assert child.stdout is not None
            assert child.stderr is not None
            child.stdout.read(100)
            child.stdout.close()
            said = child.stderr.read()
        code = child.returncode
    elif place == "/dev/full":
        with open("/dev/full", "wb") as full:
            done = subprocess.run(command, env=environment, stdout=full, stderr=subprocess.PIPE, check=False)
        code, said = done.returncode, done.stderr
        assert b"No space left" in said
    else:
        shell = ["sh", "-c", 'exec "$@" >&-', "sh", *command[:-1], "2"]
        done = subprocess.run(shell, env=environment, stderr=subprocess.PIPE, check=False)
        code, said = done.returncode, done.stderr
    assert b"Traceback" not in said
    assert b"Exception" not in said
    assert (code == 0) == (place == "nothing")
