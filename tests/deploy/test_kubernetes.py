"""deploy/kubernetes and deploy/ray-cluster.yaml: by the schemas of Kubernetes and of Ray, and what they cannot know."""

from __future__ import annotations

import copy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from ray.autoscaler._private.util import prepare_config, validate_config

from kvshelf.service.settings import Settings
from tests.deploy.files import DEPLOY, DOCKERFILE, KUBERNETES, RAY_UP, ROOT, documents, environment_of, objects, pods

VERSIONS = ("1.33", "1.37")

# No package has the schema of KubeRay's own objects, so: its fields as its documentation of 1.5 has them, as far as
# they are used here. The templates of pods inside are checked by Kubernetes' schema of pods.
RAY_CLUSTER = {
    "": {
        "rayVersion",
        "authOptions",
        "enableInTreeAutoscaling",
        "autoscalerOptions",
        "headGroupSpec",
        "workerGroupSpecs",
    },
    "authOptions": {"mode"},
    "autoscalerOptions": {"idleTimeoutSeconds", "securityContext"},
    "headGroupSpec": {"rayStartParams", "template"},
    "workerGroupSpecs": {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"},
}

PLAIN = [found for path in KUBERNETES for found in documents(path) if found["apiVersion"] != "ray.io/v1"]


def name_of(found: dict[str, Any]) -> str:
    return f"{found['kind']} {found['metadata']['name']}"


@pytest.mark.parametrize("version", VERSIONS)
def test_objects_are_kubernetes(version: str) -> None:
    for found in PLAIN:
        kubernetes_validate.validate(found, version, strict=True)
    for name, template in pods():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": template["spec"]}
        kubernetes_validate.validate(pod, version, strict=True)


def test_the_schema_sees_a_typing_error() -> None:
    broken = copy.deepcopy(PLAIN[-1])
    broken["spec"]["podSelektor"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="podSelektor"):
        kubernetes_validate.validate(broken, VERSIONS[0], strict=True)


def test_the_ray_cluster_has_fields_that_kuberay_knows() -> None:
    (cluster,) = objects("RayCluster")
    assert cluster["apiVersion"] == "ray.io/v1"
    spec = cluster["spec"]
    assert spec.keys() <= RAY_CLUSTER[""]
    for name in RAY_CLUSTER.keys() - {""}:
        parts = spec[name] if isinstance(spec[name], list) else [spec[name]]
        assert all(part.keys() <= RAY_CLUSTER[name] for part in parts), name
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    assert spec["rayVersion"] == pinned["ray"]


def test_selectors_find_their_pods_and_services_their_ports() -> None:
    templates = dict(pods())
    labels = [template["metadata"]["labels"] for template in templates.values()]
    selectors = [found["spec"]["selector"] for found in objects("Service")]
    selectors += [found["spec"]["selector"]["matchLabels"] for found in objects("PodDisruptionBudget")]
    for found in objects("NetworkPolicy"):
        rules = [peer for rule in found["spec"].get("ingress", ()) for peer in rule.get("from", ())]
        chosen = [found["spec"]["podSelector"], *(peer["podSelector"] for peer in rules)]
        selectors += [choice["matchLabels"] for choice in chosen if choice]
    assert [chosen for chosen in selectors if not any(chosen.items() <= label.items() for label in labels)] == []
    for kind in ("Deployment", "StatefulSet"):
        for found in objects(kind):
            assert (
                found["spec"]["selector"]["matchLabels"].items()
                <= templates[found["metadata"]["name"]]["metadata"]["labels"].items()
            )
    ports = {
        port["name"]
        for template in templates.values()
        for box in template["spec"]["containers"]
        for port in box.get("ports", ())
    }
    assert {
        rule["port"]
        for found in objects("NetworkPolicy")
        for way in found["spec"].get("ingress", ())
        for rule in way.get("ports", ())
    } <= ports


def test_pods_run_as_the_user_of_the_image_and_may_do_nothing_more() -> None:
    for name, template in pods():
        pod = template["spec"]["securityContext"]
        assert pod["runAsNonRoot"] is True
        assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
        for box in template["spec"]["containers"]:
            assert box["securityContext"]["allowPrivilegeEscalation"] is False
            assert box["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            if box["image"] == "kvshelf":
                assert f"USER {pod['runAsUser']}:{pod['runAsGroup']}" in DOCKERFILE.read_text(), name


def environment(box: dict[str, Any]) -> dict[str, Any]:
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in box["env"]}


def test_the_front_end_is_set_up_with_what_is_there() -> None:
    template = dict(pods())["front-end"]
    (box,) = template["spec"]["containers"]
    given = environment(box)
    (cluster,) = objects("RayCluster")
    name = cluster["metadata"]["name"]
    # What the operator makes of a cluster's name: the service of its head, and the secret with the token.
    assert given["RAY_HEAD"] == f"{name}-head-svc:6379"
    assert given["RAY_AUTH_TOKEN"] == {"secretKeyRef": {"name": name, "key": "auth_token"}}
    generated = documents(DEPLOY / "kubernetes" / "kustomization.yaml")[0]["secretGenerator"][0]
    assert generated["name"] != name
    assert given["KVSHELF_STORE"]["secretKeyRef"]["key"] in generated["files"]
    (keys,) = (volume["secret"] for volume in template["spec"]["volumes"] if volume["name"] == "keys")
    assert keys["secretName"] == generated["name"]
    assert keys["defaultMode"] == 0o440  # with fsGroup: what read_private takes
    mounted = {mount["name"]: mount["mountPath"] for mount in box["volumeMounts"]}
    assert given["KVSHELF_API_KEY_FILE"] == f"{mounted['keys']}/{keys['items'][0]['path']}"
    ports = {port["name"]: port["containerPort"] for port in box["ports"]}
    assert ports["http"] == Settings.model_fields["port"].default
    grace_s = float(given["KVSHELF_SHUTDOWN_GRACE_S"])
    assert grace_s < template["spec"]["terminationGracePeriodSeconds"]
    probe = box["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= float(given["KVSHELF_STARTUP_DEADLINE_S"])


def test_no_service_turns_into_a_setting() -> None:
    """Kubernetes gives each pod variables for each service: one by the name of kvshelf would set KVSHELF_PORT."""
    assert [name_of(found) for found in objects("Service") if found["metadata"]["name"].startswith("kvshelf")] == []
    assert dict(pods())["front-end"]["spec"]["enableServiceLinks"] is False


def test_the_image_has_what_the_operator_calls() -> None:
    assert " wget" in DOCKERFILE.read_text()
    assert "ENTRYPOINT" not in DOCKERFILE.read_text()
    assert "KVSHELF_API_KEY_FILE" in environment_of("cuda")


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not on PATH")
def test_kustomize_puts_it_together(tmp_path: Path) -> None:
    folder = shutil.copytree(DEPLOY / "kubernetes", tmp_path / "kubernetes")
    for name in documents(folder / "kustomization.yaml")[0]["secretGenerator"][0]["files"]:
        (folder / name).write_text("x")
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=60, check=True)
    assert "image: registry.example.com/kvshelf:cuda" in done.stdout
    assert "image: kvshelf\n" not in done.stdout
    assert "name: kvshelf\n  namespace: kvshelf" in done.stdout  # the secret has no suffix


def test_ray_up_takes_its_file() -> None:
    (config,) = documents(RAY_UP)
    validate_config(prepare_config(config))
    config["dokcer"] = {}
    with pytest.raises(Exception, match="dokcer"):
        validate_config(prepare_config(config))
