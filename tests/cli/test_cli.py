"""The command line without a service: what is refused, what it prints where, and its exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

import kvshelf
from kvshelf.cli import app, main
from kvshelf.client import DEFAULT_URL
from kvshelf.methods.catalog import catalog
from kvshelf.methods.method import SELECTOR
from kvshelf.model.source import bundled_folder
from kvshelf.training.key_search import BLOCK, SINK
from tests.amounts import few

ROOT = Path(__file__).resolve().parents[2]
NOBODY = "http://127.0.0.1:9"
"""The discard port: nothing listens there."""


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("KVSHELF_")]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are repeated as ever, but at once: nobody begins to listen meanwhile."""
    monkeypatch.setattr("kvshelf.client.Retries.pause_s", lambda *_: 0.0)


def run(*args: str, **options: str) -> Result:
    return CliRunner().invoke(app, list(args), **options)


def test_the_entry_points_are_the_same_program() -> None:
    for command in ([sys.executable, "-m", "kvshelf"], [str(Path(sys.executable).parent / "kvshelf")]):
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60)
        assert done.stdout == f"kvshelf {kvshelf.__version__}\n"


@pytest.mark.parametrize(
    "command",
    [
        "serve",
        "put",
        "ask",
        "ls",
        "show",
        "update",
        "rm",
        "export",
        "import",
        "policies",
        "calibrate",
        "doctor",
        "bench",
    ],
)
def test_every_command_explains_itself(command: str) -> None:
    shown = run(command, "--help")
    assert shown.exit_code == 0
    assert command in run("--help").stdout


def test_help_documents_the_exit_codes() -> None:
    text = " ".join(run("--help").stdout.split())
    for meaning in ("0 done", "1 failed", "2 refused", "3 not on the shelf", "4 the service cannot be reached", "5 "):
        assert meaning in text
    documented = (ROOT / "docs" / "use" / "operate.md").read_text()
    for code in (0, 1, 2, 3, 4, 5, 6, 130):
        assert f"{code} " in text
        assert f"| {code} |" in documented


@pytest.mark.slow
def test_doctor_measures_the_intensity_of_the_device() -> None:
    checks = map(json.loads, run("doctor", "--json", "--device", "cpu", "--model", "./no-model").stdout.splitlines())
    (check,) = (check for check in checks if check["check"] == "intensity")
    assert check["ok"]
    found = re.match(r"(\d+) FLOP a byte in float32 \(([\d,]+) GFLOP and ([\d.,]+) GB a second", check["finding"])
    assert found, check
    flop, gflop, gb = (float(number.replace(",", "")) for number in found.groups())
    assert flop == pytest.approx(gflop / gb, abs=1.5)
    assert 1 < flop < 1000


def test_ctrl_c_ends_a_command_with_130() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvshelf.client.Client.__init__", lambda *_: interrupted())
        for args in (("ls",), ("put", __file__), ("rm", "a"), ("import", __file__), ("export", "a", "--output", "b")):
            done = run(*args)
            assert (done.exit_code, done.output) == (130, "")


@pytest.mark.slow
def test_the_shell_completes_commands_and_options(tmp_path: Path) -> None:
    def said(*args: str, **variables: str) -> str:
        command = [sys.executable, "-m", "kvshelf", *args]
        environment = os.environ | {"HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
        done = subprocess.run(command, env=environment | variables, capture_output=True, text=True, timeout=60)
        return done.stdout

    def completed(*words: str) -> list[str]:
        asked = {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
        return said(**asked, _KVSHELF_COMPLETE="complete_bash").split()

    assert completed("kvshelf", "sh") == ["show"]
    assert completed("kvshelf", "ask", "--max") == ["--max-tokens"]
    shown = said("--show-completion", "bash")
    assert "_KVSHELF_COMPLETE=complete_bash" in shown
    assert "completion installed in" in said("--install-completion", "bash")
    (installed,) = tmp_path.glob("**/kvshelf.sh")
    assert installed.read_text().split() == shown.split()


@pytest.mark.parametrize(
    "args",
    [
        ("ls",),
        ("put", __file__),
        ("ask", "kvs_1", "hello"),
        ("show", "kvs_1"),
        ("update", "kvs_1", "--next-use", "20s"),
        ("rm", "kvs_1"),
        ("policies",),
        ("export", "kvs_1", "--output", "out"),
        ("import", __file__),
    ],
)
def test_without_a_service_the_exit_code_is_4(args: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSHELF_URL", NOBODY)
    done = run(*args)
    assert done.exit_code == 4
    assert done.stdout == ""
    assert "Start one with `kvshelf serve`" in done.stderr
    assert NOBODY in done.stderr


def test_with_json_an_error_is_an_object_on_stdout() -> None:
    done = run("ls", "--url", NOBODY, "--json")
    assert done.exit_code == 4
    assert json.loads(done.stdout)["error"]["code"] == "connection_failed"
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("put", "no-such-file.txt"), "no-such-file.txt"),
        (("put", __file__, "--param", "window"), "--param"),
        (("put", __file__, "--label", "=x"), "--label"),
        (("put", __file__, "--ttl", "soon"), "--ttl"),
        (("put", __file__, "--compression-ratio", "1.0"), "compression_ratio"),
        (("put", __file__, "--compression-ratio", "0.5", "--budget-tokens", "9"), "budget_tokens"),
        (("put", __file__, "--codec", "zip"), "codec"),
        (("ask", "kvs_" + "1" * 40, "hello", "--temperature", "-1"), "temperature"),
        (("ask", "", "hello"), "not an id"),
        (("ls", "--columns", "id,agee"), "did you mean 'age'?"),
        (("ls", "--columns", "id", "--wide"), "--wide"),
        (("import", "no-such-file.kvshelf"), "no-such-file.kvshelf"),
        (("import", __file__, "--ttl", "soon"), "--ttl"),
        (("import", __file__, "--label", "x"), "--label"),
        (("import", __file__, "--store", "disk:relative"), "disk:relative"),
        (("doctor", "--scrub"), "--store"),
        (("doctor", "--reseal"), "--store"),
        (("ls", "--url", "ftp://x"), "ftp://x"),
        (("ls", "--limit", "0"), "--limit"),
        (("ls", "--colour"), "--colour"),
        (("ask", "kvs_1", "Why?", "--workflow", "report"), "--workflow"),
        (("ask", "kvs_1", "Why?", "--workflow", "report:"), "ID:STEP"),
        (("nonsense",), "nonsense"),
        (("list",), "Did you mean 'ls'?"),
        (("serve", "--port", "70000"), "port"),
        (("serve", "--dtype", "float8"), "float8"),
        (("serve", "--device", "gpu0"), "gpu0"),
        (("serve", "--host", "0.0.0.0", "--print-config"), "host"),
    ],
)
def test_bad_input_is_refused_with_exit_code_2(args: tuple[str, ...], named: str) -> None:
    # No service runs, so that a request that was sent would end with exit code 4.
    done = run(*args)
    assert done.exit_code == 2, done.output
    assert named in done.stderr
    assert done.stdout == ""


def test_an_error_that_a_command_lets_through_is_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the entry point, which is what reports it. Here: a process imports torch for seconds."""
    folder = str(tmp_path / "no-model")
    monkeypatch.setattr(sys, "argv", ["kvshelf", "bench", "speed", "--model", folder])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"kvshelf: the model folder '{folder}' does not exist\n"


def test_a_bad_file_does_not_stop_the_others() -> None:
    done = run("put", "no-such-file.txt", __file__, "--url", NOBODY)
    assert "no-such-file.txt" in done.stderr
    assert NOBODY in done.stderr
    assert done.exit_code == 2


def test_selectors_are_those_of_this_version() -> None:
    shown, as_json = run("selectors"), run("selectors", "--json")
    ids = [json.loads(line)["id"] for line in as_json.stdout.splitlines()]
    assert ids == [info.name for info in catalog(SELECTOR)]
    assert all(name in shown.stdout for name in ids)
    assert "page" in run("selectors", "quest").stdout
    refused = run("selectors", "nothing")
    assert refused.exit_code == 2
    assert "unknown selector 'nothing'" in refused.stderr


def test_what_a_suffix_policy_chooses_among_is_one_of_two_and_needs_the_policy() -> None:
    alone = run("ask", "kvs_1", "Who?", "--suffix-scope", "cache", "--url", NOBODY)
    assert "need a suffix policy" in " ".join(alone.stderr.split())
    other = run("ask", "kvs_1", "Who?", "--suffix", "h2o", "--suffix-scope", "all", "--url", NOBODY)
    assert "'suffix'" in other.stderr
    assert (alone.exit_code, other.exit_code) == (2, 2)


def test_a_scope_that_nobody_gave_is_not_sent() -> None:
    """Services of earlier versions do not know the field, and refuse it."""
    bodies: list[dict[str, dict[str, object]]] = []

    class Refuses(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_error(400)

    with HTTPServer(("127.0.0.1", 0), Refuses) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for more in ((), ("--suffix-scope", "cache")):
            url = f"http://127.0.0.1:{server.server_port}"
            run("ask", "kvs_" + 40 * "1", "Who?", "--suffix", "h2o", *more, "--url", url)
        server.shutdown()
    assert [body["suffix"].get("scope") for body in bodies] == [None, "cache"]
    assert "scope" not in bodies[0]["suffix"]


@pytest.mark.slow
def test_policies_are_those_of_this_version() -> None:
    shown, as_json = run("policies"), run("policies", "--json")
    found = {json.loads(line)["id"]: json.loads(line) for line in as_json.stdout.splitlines()}
    assert list(found) == [info.name for info in catalog()]
    for info in catalog():
        assert info.name in shown.stdout
        assert found[info.name]["parameters"].keys() == info.parameters.keys()
        one = run("policies", info.name).stdout
        assert all(name in one for name in info.parameters)
    assert "nothing" in run("policies", "nothing").stderr


LIGHT = """
import sys

class Missing:
    \"\"\"What `pip install kvshelf` without extras does not bring.\"\"\"
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
from kvshelf.cli import app
app()
"""


@pytest.fixture(scope="module")
def light() -> str:
    """A program that is the command line as if only the light dependencies were installed."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    brought = {re.split(r"[\[<>=;, ]", line, maxsplit=1)[0] for line in extras["serve"] + extras["dev"]}
    of_distributions = packages_distributions().items()
    names = {name for name, owners in of_distributions if brought & {owner.lower() for owner in owners}}
    assert {"torch", "transformers", "numpy", "msgpack", "blake3", "redis", "pyarrow"} <= names
    return LIGHT.format(names=names)


@pytest.mark.parametrize(
    ("command", "said"),
    few(
        3,
        [
            (["policies"], "kvzip"),
            (["policies", "kvzip"], "PARAMETER"),
            (["suffixes"], "lagkv"),
            (["plan", "--policy", "kvzip"], "tokens a second, each GPU"),
            (["plan", "--model", "qwen3-8b", "--codec", "klt", "--gpus", "8", "--simulate"], "A RUN ON PAPER"),
            (["plan", "--home", "objects", "--simulate"], "PUT requests to S3"),
            (["advise", "--scenario", "edge", "--tokens", "32000", "--memory", "8e9"], "SELECTOR"),
        ],
    ),
    ids=lambda value: str(value)[:40],
)
def test_without_torch(light: str, command: list[str], said: str) -> None:
    done = subprocess.run([sys.executable, "-c", light, *command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout


def test_a_plan_of_a_model_that_must_be_read_says_what_it_needs(light: str) -> None:
    command = [sys.executable, "-c", light, "plan", "--model", "kvshelf-tiny"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "kvshelf plan --model kvshelf-tiny needs 'torch', which is not installed" in done.stderr


def test_mcp_without_its_extra_says_what_to_install(light: str) -> None:
    done = subprocess.run([sys.executable, "-c", light, "mcp"], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert re.search(r"kvshelf mcp needs 'mcp', which is not installed; run: pip install .*\[mcp\]", done.stderr)


def test_print_config_shows_options_over_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSHELF_PORT", "1111")
    monkeypatch.setenv("KVSHELF_REPLICAS", "3")
    done = run("serve", "--port", "2222", "--model", "a", "--model", "b", "--print-config")
    shown = json.loads(done.stdout)
    assert (shown["port"], shown["replicas"], shown["models"]) == (2222, 3, ["a", "b"])


def test_the_default_store_can_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    url = json.loads(run("serve", "--print-config").stdout)["store"]
    with kvshelf.open_store(url) as store:
        assert store.check() == []
    assert [folder.name for folder in tmp_path.iterdir()] == ["kvshelf"]


def test_the_clients_look_where_the_service_listens() -> None:
    settings = json.loads(run("serve", "--print-config").stdout)
    assert f"http://{settings['host']}:{settings['port']}" == DEFAULT_URL
    assert DEFAULT_URL in run("ls", "--help").stdout


def test_an_unknown_setting_refuses_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSHELF_PROT", "1111")
    done = run("serve", "--print-config")
    assert done.exit_code == 2
    assert "KVSHELF_PROT" in done.stderr


def test_short_ids_are_as_long_as_they_must_be() -> None:
    from kvshelf.cli._references import shortened

    near = ["kvs_" + "a" * 20 + digit + "0" * 19 for digit in "012"]
    assert shortened(near[:1]) == shortened(near[:1] * 2)[:1] == ["kvs_aaaaaaaa"]
    assert shortened(near) == [id[:25] for id in near]
    assert shortened([]) == []


@pytest.mark.parametrize(
    ("time_s", "text"), [(-1, "0s"), (59.9, "59s"), (60, "1m"), (7199, "1h"), (86400, "1d"), (864000, "10d")]
)
def test_durations_are_shown_in_one_unit(time_s: float, text: str) -> None:
    from kvshelf.cli.output.common import duration

    assert duration(time_s) == text


@pytest.mark.parametrize(("text", "value"), [("90", 90), ("90s", 90), ("1.5m", 90), ("2h", 7200), ("7d", 604800)])
def test_durations(text: str, value: float) -> None:
    from kvshelf.cli.output.common import seconds

    assert seconds(text) == value


def test_parameters_are_json_where_they_can_be() -> None:
    from kvshelf.cli.output.common import parameters

    given = parameters(["window=64", "beta=0.5", "normalize=rows", "on=true", "text=a=b"])
    assert given == {"window": 64, "beta": 0.5, "normalize": "rows", "on": True, "text": "a=b"}


@pytest.mark.slow
def test_calibrate_writes_where_engines_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of fewer texts than a user gets: the test below finds the chunks of all."""
    from kvshelf.engine.engine import Engine

    monkeypatch.setattr("kvshelf.cli.calibrate.TEXTS", 2)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    made = run("calibrate", "--model", "kvshelf-tiny", "--documents", "2", "--tokens", "260", "--device", "cpu")
    assert made.exit_code == 0, made.output
    engine = Engine.load("kvshelf-tiny", device="cpu")
    path = tmp_path / "kvshelf" / "calibrations" / f"{engine.identity.weights}.json"
    assert str(path) in made.stdout.replace("\n", "")
    job = engine.prepare("One two three. " * 40, policy="compresskv")
    assert job.document.calibration is not None
    assert job.document.calibration.origin.documents == 2
    printed = run(
        "calibrate", "--model", "kvshelf-tiny", "--documents", "2", "--tokens", "260", "--device", "cpu",
        "--output", str(tmp_path / "elsewhere"),
    )  # fmt: skip
    assert printed.exit_code == 0, printed.output
    assert (tmp_path / "elsewhere" / "kvshelf" / "compresskv.json").read_text() == path.read_text()
    made_again = (tmp_path / "elsewhere" / "kvshelf" / "klt.safetensors").read_bytes()
    assert engine.coders.own.transforms.data == made_again == path.with_suffix(".klt.safetensors").read_bytes()
    chunks = (tmp_path / "elsewhere" / "kvshelf" / "fasa.json").read_bytes()
    assert chunks == path.with_suffix(".fasa.json").read_bytes()
    skews = (tmp_path / "elsewhere" / "kvshelf" / "infinigen.safetensors").read_bytes()
    assert skews == path.with_suffix(".infinigen.safetensors").read_bytes()


@pytest.mark.slow
def test_train_gates_makes_what_an_engine_then_finds(tmp_path, monkeypatch):
    from kvshelf.engine.engine import Engine

    monkeypatch.setenv("KVSHELF_GATES", str(tmp_path))
    options = "--model", "kvshelf-tiny", "--length", "512", "--width", "4", "--device", "cpu"
    made = run("train-gates", *options, "--family", "importance", "--target", "kvzip", "--steps", "2")
    assert made.exit_code == 0, made.output
    engine = Engine.load("kvshelf-tiny", device="cpu")
    path = tmp_path / f"{engine.identity.weights}.kvzip_gate.safetensors"
    assert str(path) in made.stdout.replace("\n", "")
    gates = engine.prepare("One two three. " * 40, policy="kvzip_gate").document.gates
    assert gates.header.training.steps == 2
    line = json.loads(path.with_suffix(".journal.jsonl").read_text())
    assert line == {"step": 2, "loss": gates.header.training.loss, "held_out": gates.header.training.held_out}
    refused = run("train-gates", *options, "--family", "kvzip_gate", "--steps", "2", "--resume")
    assert refused.exit_code == 2
    assert "train without --resume" in refused.output.replace("\n", " ")
    unknown = run("train-gates", *options, "--family", "ngc")
    assert unknown.exit_code == 2
    assert "no policy has gates of 'ngc'" in unknown.output.replace("\n", " ")


@pytest.mark.slow
def test_the_bundled_chunks_are_those_that_are_found(tmp_path: Path) -> None:
    made = run("calibrate", "--model", "kvshelf-tiny", "--only", "chunks", "--device", "cpu", "--output", str(tmp_path))
    assert made.exit_code == 0, made.output
    bundled = Path(bundled_folder("kvshelf-tiny")) / "kvshelf" / "fasa.json"
    found, packaged = (json.loads(path.read_text()) for path in (tmp_path / "kvshelf" / "fasa.json", bundled))
    # Rounding is another one on another kind of CPU, and may exchange two keys that a query finds alike.
    agreement = [torch.tensor(each.pop("agreement")) for each in (found, packaged)]
    torch.testing.assert_close(*agreement, atol=1e-3, rtol=0)
    assert found == packaged


@pytest.mark.slow
def test_transforms_are_made_from_one_s_own_texts(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The tide turns at noon, and the pilot waits. " * 40)
    command = ("calibrate", "--model", "kvshelf-tiny", "--only", "transforms", "--device", "cpu", "--output")
    made = run(*command, str(tmp_path / "made"), "--text", str(text))
    assert made.exit_code == 0, made.output
    assert [path.name for path in (tmp_path / "made" / "kvshelf").iterdir()] == ["klt.safetensors"]
    told = " ".join(made.stderr.split())
    assert "transforms of kvshelf-tiny: 0 of 6, 0 s" in told
    assert re.search(r"transforms of kvshelf-tiny: done in [0-9]+ s", told)
    text.write_bytes(b"\xff")
    refused = run(*command, str(tmp_path / "no"), "--text", str(text))
    assert refused.exit_code == 2
    assert "cannot be read as UTF-8 text" in " ".join(refused.stderr.split())


@pytest.mark.slow
def test_calibrate_finds_the_folder_that_is_served_under_a_name(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message names the model as it is served, because its path is private."""
    from kvshelf.model import calibration

    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    text = tmp_path / "text.txt"
    text.write_text("The tide turns at noon, and the pilot waits. " * 40)
    command = ("calibrate", "--model", "my-model", "--only", "chunks", "--device", "cpu", "--text", str(text))
    assert run(*command).exit_code == 2
    calibration.note_served("my-model", str(tiny_folder))
    made = run(*command)
    assert made.exit_code == 0, made.output
    assert f"my-model is served from {tiny_folder}" in made.stderr.replace("\n", " ")
    assert calibration.served("other") is None
    calibration.note_served("my-model", "my-model")  # what is no path is found by its name
    assert calibration.served("my-model") is None


def test_the_file_that_cannot_be_read_is_the_one_named(tmp_path: Path) -> None:
    (schema := tmp_path / "schema.json").write_text("{}")
    refused = run("ask", "kvs_1", "Why?", "--schema", str(schema), "--grammar", str(tmp_path / "none.lark"))
    assert refused.exit_code == 2
    assert "Invalid value for --grammar" in refused.stderr


@pytest.mark.slow
def test_calibrate_refuses_a_model_that_finds_nothing(tiny_folder: Path, tmp_path: Path) -> None:
    failed = run(
        "calibrate", "--model", str(tiny_folder), "--documents", "1", "--tokens", "260", "--device", "cpu",
        "--only", "heads", "--output", str(tmp_path / "made"),
    )  # fmt: skip
    assert failed.exit_code == 2
    assert "answered none of 1 questions" in " ".join(failed.stderr.split())
    assert list((tmp_path / "made" / "kvshelf").iterdir()) == []


def test_calibrate_refuses_documents_of_less_than_two_blocks() -> None:
    """In one block no key changes, and epicache would share its budget by noise."""
    failed = run("calibrate", "--model", "kvshelf-tiny", "--tokens", str(SINK + 2 * BLOCK - 1))
    assert failed.exit_code == 2
    assert "--tokens" in failed.stderr


def test_calibrate_refuses_an_output_that_cannot_be_written_before_the_search(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for output in (tmp_path / "file", tmp_path / "file" / "below"):
        failed = run("calibrate", "--model", "kvshelf-tiny", "--output", str(output), "--documents", "1000000")
        assert failed.exit_code == 2
        assert "cannot be written" in " ".join(failed.stderr.split())


@pytest.mark.parametrize("command", ["put", "estimate"])
def test_standard_input_that_is_no_text_is_refused(command: str) -> None:
    done = CliRunner().invoke(app, [command, "-", "--url", NOBODY], input="Größe".encode("latin-1"))
    assert done.exit_code == 2
    assert "byte 2 of standard input is not valid UTF-8" in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("name", "begin", "said"),
    [("a.html", b"<p>Berths</p>", "HTML"), ("a.txt", b"<!doctype html><p>", "HTML"), ("a.txt", b"%PDF-1.7\n", "PDF")],
)
def test_an_image_stands_behind_text_alone(tmp_path: Path, name: str, begin: bytes, said: str) -> None:
    (file := tmp_path / name).write_bytes(begin + b"\xff" * (said == "PDF"))
    (tmp_path / "a.png").write_bytes(b"")
    done = run("put", str(file), "--image", str(tmp_path / "a.png"), "--url", NOBODY)
    assert done.exit_code == 2
    assert f"{name} is {said}, and --image stands behind UTF-8 text" in " ".join(done.stderr.split())


@pytest.mark.parametrize("ttl", ["36600d", "9" * 400])
def test_a_key_that_would_outlive_the_calendar_is_refused(ttl: str, tmp_path: Path) -> None:
    done = run("keys", "create", "--file", str(tmp_path / "keys.json"), "--tenant", "a", "--ttl", ttl)
    assert done.exit_code == 2
    assert "more than 100 years" in done.stderr
    assert not (tmp_path / "keys.json").exists()


@pytest.mark.parametrize("option", ["--tokens-per-s", "--hours", "--server-memory-gb", "--gb-month-price"])
def test_a_plan_is_made_with_numbers(option: str) -> None:
    done = run("plan", option, "nan")
    assert done.exit_code == 2
    assert option in done.stderr
    done = run("plan", option, "inf")
    assert done.exit_code == 2
    assert f"{option} is inf, which is no number to plan with" in done.stderr


def test_a_listing_has_the_model_where_there_are_several() -> None:
    from kvshelf.cli.caches import narrow_columns

    assert "model" not in narrow_columns({"one"})
    assert narrow_columns({"one", "other"})[-2:] == ("model", "name")
