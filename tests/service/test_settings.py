"""Settings: from the environment and the command line, checked, frozen, and shown without secrets."""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from kvshelf import open_store
from kvshelf.cli import app
from kvshelf.errors import InvalidRequest
from kvshelf.service.settings import Settings, load_settings
from kvshelf.service.storage import store_config
from kvshelf.store.private import without_secret
from kvshelf.store.url import StoreConfig


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("KVSHELF_"):
            monkeypatch.delenv(name)


def test_the_environment_is_read_and_arguments_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSHELF_MODELS", "one, two")
    monkeypatch.setenv("KVSHELF_PORT", "9000")
    monkeypatch.setenv("KVSHELF_SWEEP_INTERVAL_S", "5")
    settings = load_settings(port=9001, host=None)
    assert (settings.models, settings.port, settings.sweep_interval_s) == (("one", "two"), 9001, 5.0)
    assert settings.host == "127.0.0.1"


def test_a_file_of_variables_is_read_and_the_environment_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "kvshelf.env"
    file.write_text("# Ours\nKVSHELF_PORT=9000\nKVSHELF_REPLICAS=2\nKVSHELF_MODELS=one,two\n")
    monkeypatch.setenv("KVSHELF_REPLICAS", "3")
    settings = load_settings(file, models=("three",))
    assert (settings.port, settings.replicas, settings.models) == (9000, 3, ("three",))


def test_an_empty_variable_is_not_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    refused = {"store", "encryption_key_file", "erasure_key_file", "api_key_file"}
    for name in Settings.model_fields.keys() - refused:
        monkeypatch.setenv(f"KVSHELF_{name.upper()}", "")
    assert load_settings() == Settings(_env_file=None)
    assert load_settings().port == 8765
    file = tmp_path / "kvshelf.env"
    file.write_text("KVSHELF_PORT=9000\nKVSHELF_REPLICAS=\n")
    assert (load_settings(file).port, load_settings(file).replicas) == (9000, 1)


@pytest.mark.parametrize("name", ["store", "encryption_key_file", "erasure_key_file", "api_key_file"])
def test_an_empty_variable_of_the_store_or_a_key_file_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    file = tmp_path / "kvshelf.env"
    for line in (f"KVSHELF_{name.upper()}=\n", f"KVSHELF_{name.upper()}\n"):
        file.write_text(line)
        with pytest.raises(InvalidRequest, match=f"KVSHELF_{name.upper()} is empty"):
            load_settings(file)
    monkeypatch.setenv(f"KVSHELF_{name.upper()}", "")
    with pytest.raises(InvalidRequest, match=f"KVSHELF_{name.upper()} is empty"):
        load_settings()
    assert getattr(load_settings(**{name: "/keys"}), name) == "/keys"  # the option wins


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("PORT", "many", "setting port: .*valid integer.*; found 'many' \\(KVSHELF_PORT\\)"),
        ("PORT", "70000", "found '70000'"),
        ("REPLICAS", "redis://me:hunter2@host", r"found 'redis://\*\*\*@host'"),
        ("REPLICAS", f"redis://me:{'hunter2' * 20}@host", r"found 'redis://\*\*\*@host' "),
        ("WARM", f"redis://me:{'hunter2' * 20}@host", r"'redis://\*\*\*@host' is not taken here"),
        ("WARM", "redis://me:hunter2@host", r"'redis://\*\*\*@host' is no label"),
        ("LOG_LEVEL", "loud", "found 'loud'"),
        ("QUALITY_PROBE", "slow", "setting quality_probe: .*found 'slow'"),
        ("TENANT_QUALITY", "law=full", "'law=full' is no JSON; write .*\\(KVSHELF_TENANT_QUALITY\\)"),
        ("TENANT_QUALITY", '{"law": "slow"}', "setting tenant_quality.law: .*found 'slow'"),
        ("GPU_MEMORY", "much", "'much' is no size"),
        ("DEVICE", "gpu", "'gpu' is none of .*\\(KVSHELF_DEVICE\\)"),
    ],
)
def test_a_refusal_names_setting_value_and_variable(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    monkeypatch.setenv(f"KVSHELF_{name}", value)
    with pytest.raises(InvalidRequest, match=message) as refused:
        load_settings()
    assert "hunter2" not in refused.value.message


def test_a_tenant_s_quality_is_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSHELF_TENANT_QUALITY", '{"law": "full", "logs": false}')
    assert load_settings().tenant_quality == {"law": "full", "logs": False}


@pytest.mark.parametrize(
    "text", [None, "KVSHELF_PROT=9000", "KVSHELF_PROT=", "PORT=9000", "KVSHELF_PORT=many", "\udcff"]
)
def test_a_file_of_variables_that_makes_no_sense_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "kvshelf.env").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(InvalidRequest, match=r"PORT|PROT|port|there is no file|cannot be read"):
        load_settings(tmp_path / "kvshelf.env")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"weights": "int4"}, "'int4' is none of plain, int8"),
        ({"weights": "int8", "gpus_per_replica": 2}, "gpus_per_replica: .*weights in int8 are of one process"),
    ],
)
def test_weights_are_plain_or_int8_of_one_process(given: dict[str, Any], said: str) -> None:
    assert load_settings(weights="int8").weights == "int8"
    assert load_settings(gpus_per_replica=2).weights == "plain"
    with pytest.raises(InvalidRequest, match=said):
        load_settings(**given)


@pytest.mark.parametrize("given", [{"weights": "int8"}, {"gpus_per_replica": 2}, {"guard_share": 0.1}])
def test_what_llama_cpp_does_not_have_is_refused_beside_it(given: dict[str, Any]) -> None:
    assert load_settings(engine="llama.cpp").engine == "llama.cpp"
    with pytest.raises(InvalidRequest, match=f"{next(iter(given))}: .*kvshelf's own engine"):
        load_settings(engine="llama.cpp", **given)
    with pytest.raises(InvalidRequest, match=r"'vllm' is none of kvshelf, llama\.cpp"):
        load_settings(engine="vllm")


def test_the_shelf_is_among_the_user_s_data_unless_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "my data"))
    with open_store(load_settings().store):
        assert (tmp_path / "my data" / "kvshelf").is_dir()


def test_settings_do_not_change() -> None:
    with pytest.raises(ValidationError):
        load_settings().port = 1


def test_a_variable_that_nobody_reads_refuses_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSHELF_PROT", "9000")
    with pytest.raises(InvalidRequest, match="KVSHELF_PROT"):
        load_settings()


def test_the_client_s_variables_may_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSHELF_URL", "http://127.0.0.1:1")
    assert load_settings() == Settings()


@pytest.mark.parametrize(("text", "memory"), [("0.5", 0.5), ("1", 1.0), ("40GiB", 40 << 30), ("8000000000", 8e9)])
def test_memory_is_a_share_or_bytes(monkeypatch: pytest.MonkeyPatch, text: str, memory: float) -> None:
    monkeypatch.setenv("KVSHELF_GPU_MEMORY", text)
    assert load_settings().gpu_memory == memory


@pytest.mark.parametrize("device", [{"device": "spread"}, {"gpus_per_replica": 2}])
def test_memory_is_planned_of_one_device(device: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="of replicas on one device"):
        load_settings(gpu_memory=0.5, **device)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", 70000),
        ("models", ()),
        ("models", ("a", "a")),
        ("models[0]", ("",)),
        ("adapters", ("law",)),
        ("adapters", ("law=",)),
        ("adapters", ("law=./a", "law=./b")),
        ("adapters", ("kvshelf-tiny=./a",)),
        ("adapters", ("law=./a", " law =./b")),
        ("adapters", ("law=./a+b",)),
        ("replicas", 0),
        ("batch_share", 1.0),
        ("gpu_memory", 0),
        ("gpu_memory", "40 apples"),
        ("gpu_memory", "half"),
        ("operational_intensity", 0),
        ("operational_intensity", float("inf")),
        ("host", "0.0.0.0"),
        ("host", "::"),
        ("host", "example.org"),
        ("log_level", "loud"),
        ("default_ttl_s", 0),
        ("max_ttl_s", "soon"),
        ("tenant_max_caches", 0),
        ("tenant_max_bytes", -1),
        ("tenant_max_concurrent", 0),
        ("tenant_requests_per_minute", 0),
        ("tenant_tokens_per_minute", 0),
        ("unread_deadline_s", 0),
        ("max_import_bytes", 5),
        ("max_document_tokens", 0),
        ("colour", "red"),
    ],
)
def test_bad_settings_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        load_settings(**{name.partition("[")[0]: value})
    assert refused.value.param == name


def test_the_default_lies_within_the_maximum() -> None:
    assert load_settings(default_ttl_s=5, max_ttl_s=5).max_ttl_s == 5
    with pytest.raises(InvalidRequest, match="default_ttl_s") as refused:
        load_settings(default_ttl_s=6, max_ttl_s=5)
    assert refused.value.param == "max_ttl_s"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_may_be_bound(host: str) -> None:
    assert load_settings(host=host).host == host


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.2", "example.org"])
def test_any_address_may_be_bound_with_keys(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setenv("KVSHELF_API_KEY_FILE", "/etc/kvshelf/keys.json")
    assert load_settings(host=host).host == host
    with pytest.raises(InvalidRequest, match="1 character"):
        load_settings(api_key_file="", host=host)


def test_serve_shows_its_settings_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSHELF_STORE", "ram:1GiB+redis://me:hunter2@host:6379/0")
    monkeypatch.setenv("KVSHELF_API_KEY", "kvsk_of_a_client")
    arguments = ["serve", "--print-config", "--api-key-file", "/etc/keys.json", "--host", "0.0.0.0", "--port", "9"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "hunter2" not in done.output
    assert "kvsk" not in done.output
    shown = json.loads(done.stdout)
    assert shown.keys() == Settings.model_fields.keys()
    assert (shown["store"], shown["api_key_file"]) == ("ram:1GiB+redis://***@host:6379/0", "/etc/keys.json")
    assert (shown["host"], shown["port"], shown["replicas"]) == ("0.0.0.0", 9, 1)


def test_secrets_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSHELF_STORE", "redis://me:hunter2@host:6379/0")
    shown = load_settings(address="ray://hunter3@head:1").redacted()
    assert "hunter2" not in json.dumps(shown)
    assert "hunter3" not in json.dumps(shown)
    assert shown["store"] == "redis://***@host:6379/0"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("disk:///var/lib/kvshelf", "disk:///var/lib/kvshelf"),
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("redis://:p@host", "redis://***@host"),
        ("redis://me:a@b/c@host/0", "redis://***@host/0"),
        ("ram:2GiB+disk:///x?max=1GiB+rediss://me:pw@host", "ram:2GiB+disk:///x?max=1GiB+rediss://***@host"),
        ("redis-sentinel://me:pw@a:1,b:2/main", "redis-sentinel://***@a:1,b:2/main"),
    ],
)
def test_a_url_is_shown_without_its_password(url: str, shown: str) -> None:
    assert without_secret(url) == shown


def test_what_replicas_get_holds_no_key_and_travels(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ab" * 32)
    keys.chmod(0o600)
    settings = load_settings(
        store=f"disk://{tmp_path}/shelf", encryption_key_file=str(keys), max_ttl_s=50, tenant_max_caches=1
    )
    config = store_config(settings)
    sent = pickle.dumps(config)
    assert b"ab" * 32 not in sent
    assert bytes.fromhex("ab" * 32) not in sent
    rules = pickle.loads(sent).rules()
    assert (rules.max_ttl_s, rules.quota.max_caches, len(rules.keyring.ids)) == (50, 1, 1)
    assert "hunter2" not in repr(StoreConfig("redis://:hunter2@host"))


def test_a_key_file_is_found_from_any_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_settings(encryption_key_file="keys").encryption_key_file == str(tmp_path / "keys")
    assert load_settings(api_key_file="keys").api_key_file == str(tmp_path / "keys")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--store", "ftp://x"], "ftp"),
        (["--port", "1", "--store", "disk:///dev/null/shelf"], ""),
        (["--host", "0.0.0.0"], "API keys"),
        (["--encryption-key-file", "/no/such/keys"], "/no/such/keys"),
        (["--api-key-file", "/no/such/keys.json"], "/no/such/keys.json"),
    ],
)
def test_serve_says_in_one_line_why_it_does_not_start(arguments: list[str], words: str) -> None:
    command = [sys.executable, "-m", "kvshelf", "serve", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert words in done.stderr
    assert done.stdout == ""


def test_a_port_in_use_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "kvshelf", "serve", "--port", port, "--store", f"disk://{tmp_path}/shelf"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode != 0
    assert f"port {port}" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "shelf").exists()


def test_a_chat_template_is_of_one_model(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{{ messages[0].content }}")
    assert Settings(chat_template=str(file)).chat_template == str(file)
    assert Settings(chat_template="tool_use").chat_template == "tool_use"
    with pytest.raises(ValidationError, match="it is of one model"):
        Settings(models=("kvshelf-tiny", "./other"), chat_template="tool_use")


def test_an_adapter_has_no_name_of_a_model_s_folder_and_no_spaces(tmp_path: Path) -> None:
    (tmp_path / "law").mkdir()
    model = str(tmp_path / "law")
    with pytest.raises(InvalidRequest, match="the name 'law' is that of a model"):
        load_settings(models=(model,), adapters=("law=./a",))
    assert load_settings(adapters=(" law = ./a ",)).served[1] == ("kvshelf-tiny+./a", "law")
    with pytest.raises(InvalidRequest, match=r"neither may have a \+"):
        load_settings(models=("model+./b",), adapters=("law=./a",))
