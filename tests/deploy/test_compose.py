"""deploy/compose*.yaml: by the Compose Specification's schema, and what the schema cannot know."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from jsonschema.validators import validator_for

from kvshelf.errors import StoreUnavailable
from kvshelf.integrations.vllm.ragged.plugin import TESTED
from kvshelf.integrations.vllm.settings import ShelfSettings
from kvshelf.store.redis.address import parse
from kvshelf.store.redis.link import RedisLink, ServerFacts
from tests.deploy.files import (
    COMPOSE,
    COMPOSE_CUDA,
    COMPOSE_VLLM,
    DEPLOY,
    DOCKERFILE,
    documents,
    environment_of,
    image_of,
    of_kind,
    rendered,
)
from tests.store.redis.servers import binary, free_port, wait_until

SCHEMA = files("check_jsonschema") / "builtin_schemas" / "vendor" / "compose-spec.json"


def compose(path: Path = COMPOSE) -> dict[str, Any]:
    (found,) = documents(path)
    return found


def problems(content: dict[str, Any]) -> list[str]:
    schema = json.loads(SCHEMA.read_text())
    validator = validator_for(schema)(schema)
    return [f"{'/'.join(map(str, error.absolute_path))}: {error.message}" for error in validator.iter_errors(content)]


@pytest.mark.parametrize("path", [COMPOSE, COMPOSE_CUDA, COMPOSE_VLLM], ids=lambda path: path.name)
def test_the_file_is_one_of_compose(path: Path) -> None:
    assert problems(compose(path)) == []


def test_the_schema_sees_a_typing_error() -> None:
    content = compose()
    content["services"]["front-end"]["helthcheck"] = {}
    assert len(problems(content)) == 1


@pytest.mark.parametrize("path", [COMPOSE, COMPOSE_VLLM], ids=lambda path: path.name)
def test_services_name_what_is_there(path: Path) -> None:
    volumes, names = compose()["volumes"], compose()["services"].keys() | compose(path)["services"].keys()
    for service in compose(path)["services"].values():
        depends = service.get("depends_on", {})
        assert set(depends) <= names
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert (DEPLOY / source).exists() if source.startswith(".") else source in volumes
        if build := service.get("build"):
            assert image_of(build["target"])
            assert service["image"] == f"kvshelf:{build['target']}"
            assert (DEPLOY / build["context"] / build["dockerfile"]).samefile(DOCKERFILE)
    assert compose(COMPOSE_CUDA)["services"].keys() <= compose()["services"].keys()


def test_who_waits_for_health_waits_for_somebody_who_tells_it() -> None:
    services = compose()["services"]
    depends = [service.get("depends_on") for service in services.values()]
    waits = [wait for found in depends if isinstance(found, dict) for wait in found.items()]
    healthy = [name for name, how in waits if how["condition"] == "service_healthy"]
    assert len(healthy) == 3
    assert [name for name in healthy if "test" not in services[name]["healthcheck"]] == []
    assert "test" in compose(COMPOSE_VLLM)["services"]["vllm"]["healthcheck"]


@pytest.mark.parametrize("path", [COMPOSE, COMPOSE_VLLM], ids=lambda path: path.name)
def test_images_of_others_are_pinned_and_nothing_is_open_to_the_network(path: Path) -> None:
    for service in (each for each in compose(path)["services"].values() if "image" in each):
        assert re.search(r":(cpu|cuda|vllm|v?\d+\.\d+\.\d+[\w.-]*)$", service["image"])
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
        assert service["cap_drop"] == ["ALL"]


def test_secrets_have_no_default() -> None:
    text = COMPOSE.read_text() + COMPOSE_VLLM.read_text()
    names = re.findall(r"\$\{(\w*(?:PASSWORD|TOKEN|API_KEY)\w*)", text)
    assert "VLLM_API_KEY" in names
    for name in names:
        assert re.search(rf"\$\{{{name}:\?", text), name
        assert not re.search(rf"\$\{{{name}:?-", text), name


def test_all_nodes_of_ray_have_its_token() -> None:
    services = compose()["services"]
    for name in ("ray-head", "ray-worker", "front-end"):
        assert services[name]["environment"]["RAY_AUTH_MODE"] == "token"
        assert "RAY_AUTH_TOKEN" in services[name]["environment"]


def test_volumes_lie_where_the_image_keeps_its_files() -> None:
    home = "/var/lib/kvshelf"
    kept = environment_of("cpu")["KVSHELF_API_KEY_FILE"]
    mounts = {volume.split(":")[1] for volume in compose()["services"]["front-end"]["volumes"]}
    assert str(Path(kept).parent) in mounts
    made = re.findall(r"install --directory [^&\n]*", DOCKERFILE.read_text().replace("\\\n", " "))
    folders = {f"{home}/{folder}" for line in made for folder in re.sub(r"--\S+ (\d+)?", "", line).split()[1:]}
    assert mounts <= folders, "a volume over a folder that the image does not have would belong to root"


def test_only_the_proxy_reaches_a_vllm_that_believes_the_tenant_of_a_request() -> None:
    services = compose()["services"] | compose(COMPOSE_VLLM)["services"]
    words = services["vllm"]["command"]
    transfer = json.loads(words[words.index("--kv-transfer-config") + 1])
    assert import_module(transfer["kv_connector_module_path"]).__all__[0] == transfer["kv_connector"]
    given = transfer["kv_connector_extra_config"]
    assert ShelfSettings.parse(given | {"store": services["vllm"]["environment"]["KVSHELF_STORE"]}).trust_tenant
    beside = {name for name, each in services.items() if "vllm" in each.get("networks", ["default"])}
    assert beside == {"vllm", "vllm-proxy", "valkey"}
    assert "ports" not in services["vllm"]
    assert services["vllm"]["environment"].keys() >= {"VLLM_API_KEY"} <= services["vllm-proxy"]["environment"].keys()
    (version,) = re.findall(r"^ARG VLLM=v(\d+\.\d+)\.\d+$", DOCKERFILE.read_text(), re.M)
    assert version in TESTED


def valkey_commands() -> dict[str, list[str]]:
    (server,) = of_kind(rendered({}), "StatefulSet")
    (container,) = server["spec"]["template"]["spec"]["containers"]
    return {"compose": compose()["services"]["valkey"]["command"], "kubernetes": container["command"]}


@pytest.mark.parametrize("where", ["compose", "kubernetes"])
def test_a_real_server_started_so_is_one_that_a_home_can_be_on(where: str, tmp_path: Path) -> None:
    name, *words = [re.sub(r"\$\{\w+:-(\w+)\}", r"\1", word) for word in valkey_commands()[where]]
    assert name == "valkey-server"
    words = [str(tmp_path) if word == "/data" else "x" * 20 if word.startswith("$") else word for word in words]
    port = free_port()
    command = [binary(), *words, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(tmp_path)]
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            facts = _facts(f"redis://:{'x' * 20}@127.0.0.1:{port}?timeout_s=10", shlex.join(command))
        finally:
            process.kill()
    assert facts.problems() == []
    assert facts.warnings() == []


def _facts(url: str, command: str) -> ServerFacts:
    link = RedisLink(parse(url))
    found: list[ServerFacts] = []

    def answers() -> bool:
        try:
            found.extend(link.facts())
        except StoreUnavailable:
            return False
        return True

    wait_until(answers, command)
    link.close()
    return found[0]
