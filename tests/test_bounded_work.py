"""What reads a text from outside takes time in proportion to its length, and reads JSON in one way."""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Callable
from typing import Any, Final

import pytest

from tests.patterns import ROOT, Used, hard_texts, used_patterns

LENGTHS: Final = (20, 512, 16_384)
"""Of the texts. The first is enough for a pattern whose time doubles with each letter. In proportion, the last takes 32
times as long as the one before; if every place of it is a beginning, 1,024 times."""

MUCH_S: Final = 0.01
"""The slowest pattern that is linear takes a tenth of it for the longer text."""


KNOWN_BY_A_RUN: Final = {
    ("kvshelf/api/openai.py", "strict.CONVERSATION"): "one class of characters, 64 of them at most",
    ("kvshelf/model/split.py", "pattern"): "the operator's plan of a model",
    ("kvshelf/model/tokens.py", "'|'.join(map(re.escape, longest_first))"): "the words of a tokenizer's marks",
    ("kvshelf/service/settings.py", "pattern"): "the operator's settings; two short patterns",
    ("kvshelf/samples/suite.py", "pattern"): "the words of a benchmark's own questions",
    ("kvshelf/corpus/input/files.py", repr("[*\\[]") + " if url else " + repr("[*?\\[]")): "one of two characters",
    ("kvshelf/corpus/input/files.py", "glob_translate(pattern or '**')"): "the file pattern of who runs the command",
}
"""Patterns that no test can read in the source, each with whose they are."""


def time_of(call: Callable[[], Any]) -> float:
    started = time.thread_time()
    call()
    return time.thread_time() - started


def found_by(used: Used, method: str) -> Callable[[Any], Any]:
    assert used.pattern is not None
    search = getattr(used.pattern, method)
    if method in ("sub", "subn"):
        nothing = b"" if isinstance(used.pattern.pattern, bytes) else ""
        return lambda text: search(nothing, text)
    return (lambda text: list(search(text))) if method == "finditer" else search


def slow_text(used: Used) -> str:
    """A text that takes the pattern long, "" if none is found."""
    assert used.pattern is not None
    for method in sorted(used.methods):
        search = found_by(used, method)
        for before, piece, after in hard_texts(used.pattern):
            for length in LENGTHS:
                text = before + piece * (length // len(piece)) + after
                times = [time_of(lambda: search(text))]  # noqa: B023  it is called at once
                while min(times) > MUCH_S and len(times) < 3 and sum(times) < 1:
                    times.append(time_of(lambda: search(text)))  # noqa: B023
                if min(times) > MUCH_S:
                    return (
                        f"{method} of {before!r} + {piece!r} * {length // len(piece)} + {after!r}: {min(times):.3f} s"
                    )
    return ""


@pytest.mark.slow
def test_no_pattern_takes_longer_than_in_proportion_to_its_text() -> None:
    slow = []
    unknown = set()
    count = 0
    for used in used_patterns():
        if used.pattern is None:
            unknown.add((used.module, used.source))
            continue
        count += 1
        if text := slow_text(used):
            slow.append(f"{used.module}:{used.line} {used.source}: {text}")
    assert not slow, "\n".join(slow)
    assert unknown == KNOWN_BY_A_RUN.keys()
    assert count > 60


def test_the_search_for_slow_texts_finds_those_that_were_there() -> None:
    """The first silenced a front end for half a minute, with 120 kB."""
    for source, method in (
        (rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', "sub"),
        (r"(?:(?<=://)|(?<=^//))(?!/).*@", "sub"),
        (r"(?s).*^kvshelf\.errors\.(\w+): (.+?)\s*\Z", "search"),
        (r"(a+)+$", "search"),
    ):
        assert slow_text(Used("", 0, "", re.compile(source), frozenset({method}))), source


READERS: Final = {
    "kvshelf/api/strict.py": "`parse_request`, `parse_json`, arguments of calls: after the bounds of `JsonBounds`",
    "kvshelf/_extras.py": "a file of this installation",
    "kvshelf/api/tools.py": "arguments of a call that `CalledFunction` has checked, for a chat template",
    "kvshelf_bench": "our own workers, journals and files",
    "kvshelf/cli/_forms.py": "a file that the caller names",
    "kvshelf/cli/checks/certify.py": "files that the caller names",
    "kvshelf/cli/checks/isolation.py": "what the check itself sends",
    "kvshelf/cli/demo.py": "the package's own questions",
    "kvshelf/cli/models.py": "the RoPE of models that the command has loaded",
    "kvshelf/cli/output": "what the command itself writes",
    "kvshelf/cli/removal/erase.py": "a receipt that the caller names",
    "kvshelf/client": "the answers of the service that the caller chose",
    "kvshelf/corpus/plan.py": "the package's own measurements",
    "kvshelf/corpus/run": "journals and values of our own processes",
    "kvshelf/integrations/vllm/asking.py": "the answers of vLLM",
    "kvshelf/service/access/keyfile.py": "the operator's file, at most 1 MiB",
    "kvshelf/service/dialects/messages.py": "a call that the model wrote: `CalledFunction` has checked it",
    "kvshelf/service/jobs/batch_files.py": "lines and ids, from our own process",
    "kvshelf/service/process/preflight.py": "the configuration in a model's folder",
    "kvshelf/service/routes/growth.py": "a source that the store kept, checked when it came",
    "kvshelf/store": "records, manifests and headers of the store; sizes are checked before",
    "kvshelf/artifact": "headers of blobs and of files of transforms; sizes are checked before",
    "kvshelf/terminal.py": "an option of a command",
    "kvshelf/engine/decode/trial.py": "what its own child has written",
    "kvshelf/engine/decode/grammar.py": "a grammar that `Grammar` has written",
    "kvshelf/training/gates": "headers of files of the operator",
    "kvshelf/training/journal.py": "what the search itself has written",
    "kvshelf/training/transform_search.py": "what the search itself has written",
    "kvshelf/engine/files": "what the export itself has written, in files that the caller names",
    "kvshelf/integrations/engine_weights.py": "a configuration of weights that the caller names",
    "kvshelf/engine/tools/calls.py": "what the model wrote: in calls of tools",
    "kvshelf/engine/tools/harmony.py": "what the model wrote: in calls of tools",
    "kvshelf/engine/tools/pythonic.py": "what the model wrote: in calls of tools",
    "kvshelf/model": "configurations of models, and calibrations",
    "kvshelf/methods/info.py": "the package's own tables",
    "kvshelf/methods/policies": "headers of gates",
    "kvshelf/workers/replica/conversations.py": "a source that the store kept, checked when it came",
    "kvshelf/workers/replica/create/recreation.py": "a source that the store kept, checked when it came",
    "kvshelf/workers/replica/inspect.py": "a kept source, or that of an export after `JsonBounds`",
}
"""Every place that reads JSON, or a folder of them, with what it reads and what bounds it. What a caller sends is read
by the first one alone."""

JSON_CALLS: Final = {"from_json", "model_validate_json", "validate_json", "raw_decode"}


def json_readers() -> set[str]:
    return {
        str(file.relative_to(ROOT))
        for file in ROOT.glob("kvshelf*/**/*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute)
        and (node.attr in JSON_CALLS or ast.unparse(node) in ("json.loads", "json.load"))
    }


def test_json_of_callers_is_read_in_one_place() -> None:
    found = json_readers()
    unlisted = {file for file in found if not any(file == known or file.startswith(known + "/") for known in READERS)}
    assert not unlisted, "JSON from outside is read by parse_request or parse_json of api/strict.py; list what is not"
    unused = {known for known in READERS if not any(file == known or file.startswith(known + "/") for file in found)}
    assert not unused
