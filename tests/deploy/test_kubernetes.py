"""deploy/chart and deploy/ray-cluster.yaml: by the schemas of Kubernetes and of Ray, and what they cannot know."""

from __future__ import annotations

import copy
from typing import Any

import helm_python
import kubernetes_validate
import pytest
from ray.autoscaler._private.util import prepare_config, validate_config

import kvshelf
from kvshelf.service.settings import OTHER_VARIABLES, PREFIX, Settings
from tests.deploy.files import (
    CHART,
    DOCKERFILE,
    EXAMPLES,
    RAY_UP,
    ROOT,
    documents,
    environment_of,
    example,
    of_kind,
    pods,
    rendered,
)

VERSIONS = ("1.33", "1.37")

# No package has the schemas of KubeRay's and of the Prometheus operator's objects, so: their fields as their
# documentation has them, as far as they are used here. The templates of pods are checked by Kubernetes' schema of pods.
FOREIGN = {
    "RayCluster": {
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
    },
    "ServiceMonitor": {
        "": {"selector", "endpoints"},
        "selector": {"matchLabels"},
        "endpoints": {"port", "path", "interval", "authorization"},
    },
}


@pytest.fixture(scope="module", params=EXAMPLES)
def objects(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return rendered(example(request.param))


def test_the_chart_passes_helm_s_lint_and_is_of_this_version() -> None:
    report = helm_python.lint(CHART, strict=True)
    assert (report["errors"], [note["error"] for note in report["messages"]]) == ([], ["icon is recommended"])
    (chart,) = documents(CHART / "Chart.yaml")
    assert chart["version"] == chart["appVersion"] == kvshelf.__version__
    assert len(EXAMPLES) == 5


@pytest.mark.parametrize("version", VERSIONS)
def test_objects_are_kubernetes(objects: list[dict[str, Any]], version: str) -> None:
    for manifest in objects:
        if manifest["kind"] not in FOREIGN:
            kubernetes_validate.validate(manifest, version, strict=True)
    for name, template in pods(objects):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": template["spec"]}
        kubernetes_validate.validate(pod, version, strict=True)


def test_the_schema_sees_a_typing_error() -> None:
    (broken, *_) = copy.deepcopy(of_kind(rendered({}), "NetworkPolicy"))
    broken["spec"]["podSelektor"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="podSelektor"):
        kubernetes_validate.validate(broken, VERSIONS[0], strict=True)


def test_objects_of_operators_have_fields_that_these_know(objects: list[dict[str, Any]]) -> None:
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    for kind, fields in FOREIGN.items():
        for manifest in of_kind(objects, kind):
            spec = manifest["spec"]
            assert spec.keys() <= fields[""]
            for name in fields.keys() - {""}:
                parts = spec[name] if isinstance(spec[name], list) else [spec[name]]
                assert all(part.keys() <= fields[name] for part in parts), name
    for cluster in of_kind(objects, "RayCluster"):
        spec = cluster["spec"]
        for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
            assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        assert spec["rayVersion"] == pinned["ray"]


def test_operators_objects_are_in_the_examples() -> None:
    """Otherwise the test above would check nothing."""
    kinds = {manifest["kind"] for name in EXAMPLES for manifest in rendered(example(name))}
    assert kinds >= FOREIGN.keys() | {"HorizontalPodAutoscaler", "Ingress", "PodDisruptionBudget", "NetworkPolicy"}


def test_selectors_find_their_pods_and_services_their_ports(objects: list[dict[str, Any]]) -> None:
    templates = dict(pods(objects))
    labels = [template["metadata"]["labels"] for template in templates.values()]
    selectors = [manifest["spec"]["selector"] for manifest in of_kind(objects, "Service")]
    selectors += [manifest["spec"]["selector"]["matchLabels"] for manifest in of_kind(objects, "PodDisruptionBudget")]
    policies = of_kind(objects, "NetworkPolicy")
    for policy in policies:
        peers = [peer for rule in policy["spec"]["ingress"] for peer in rule.get("from", ())]
        own = [peer["podSelector"] for peer in peers if "podSelector" in peer]
        selectors += [selector["matchLabels"] for selector in (policy["spec"]["podSelector"], *own)]
    assert all(any(chosen.items() <= label.items() for label in labels) for chosen in selectors)
    for manifest in of_kind(objects, "Deployment", "StatefulSet"):
        chosen = manifest["spec"]["selector"]["matchLabels"]
        assert chosen.items() <= templates[manifest["metadata"]["name"]]["metadata"]["labels"].items()
    boxes = [box for template in templates.values() for box in template["spec"]["containers"]]
    ports = {port["name"] for box in boxes for port in box.get("ports", ())}
    named = [port for policy in policies for rule in policy["spec"]["ingress"] for port in rule.get("ports", ())]
    assert {port["port"] for port in named} <= ports
    services = {manifest["metadata"]["name"] for manifest in of_kind(objects, "Service")}
    backends = [manifest["spec"]["rules"][0]["http"]["paths"][0]["backend"] for manifest in of_kind(objects, "Ingress")]
    assert {backend["service"]["name"] for backend in backends} <= services


def test_each_pod_is_reached_by_a_policy_s_word_alone(objects: list[dict[str, Any]]) -> None:
    """Whoever reaches a Ray node, Valkey or vLLM could do anything, so no pod is without a policy."""
    chosen = [manifest["spec"]["podSelector"]["matchLabels"] for manifest in of_kind(objects, "NetworkPolicy")]
    for name, template in pods(objects):
        assert any(labels.items() <= template["metadata"]["labels"].items() for labels in chosen), name


def test_pods_run_as_the_user_of_the_image_and_may_do_nothing_more(objects: list[dict[str, Any]]) -> None:
    for name, template in pods(objects):
        pod = template["spec"]["securityContext"]
        assert pod["runAsNonRoot"] is True
        assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
        for box in template["spec"]["containers"]:
            assert box["securityContext"]["allowPrivilegeEscalation"] is False
            assert box["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            if "/kvshelf:" in box["image"]:
                assert f"USER {pod['runAsUser']}:{pod['runAsGroup']}" in DOCKERFILE.read_text(), name


def environment(box: dict[str, Any]) -> dict[str, Any]:
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in box["env"]}


def test_the_front_end_is_set_up_with_what_is_there(objects: list[dict[str, Any]]) -> None:
    template = dict(pods(objects))["kvshelf-front-end"]
    (box,) = template["spec"]["containers"]
    variables = environment(box)
    for cluster in of_kind(objects, "RayCluster"):
        # What the operator makes of a cluster's name: the service of its head, and the secret with the token.
        name = cluster["metadata"]["name"]
        assert variables["RAY_HEAD"] == f"{name}-head-svc:6379"
        assert variables["RAY_AUTH_TOKEN"] == {"secretKeyRef": {"name": name, "key": "auth_token"}}
    assert (
        ("RAY_HEAD" in variables) is (box["command"] == ["kvshelf-front-end"]) is bool(of_kind(objects, "RayCluster"))
    )
    assert variables["KVSHELF_STORE"]["secretKeyRef"] == {"name": "kvshelf", "key": "store-url"}
    (keys,) = (volume["secret"] for volume in template["spec"]["volumes"] if volume["name"] == "keys")
    assert keys["defaultMode"] == 0o440  # with fsGroup: what read_private takes
    mounted = {mount["name"]: mount["mountPath"] for mount in box["volumeMounts"]}
    files = {f"{mounted['keys']}/{item['path']}" for item in keys["items"]}
    assert files >= {value for key, value in variables.items() if key.endswith("_KEY_FILE")}
    ports = {port["name"]: port["containerPort"] for port in box["ports"]}
    assert ports["http"] == Settings.model_fields["port"].default
    assert float(variables["KVSHELF_SHUTDOWN_GRACE_S"]) < template["spec"]["terminationGracePeriodSeconds"]
    probe = box["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] > float(variables["KVSHELF_STARTUP_DEADLINE_S"])
    known = {PREFIX + field.upper() for field in Settings.model_fields} | OTHER_VARIABLES
    assert {name for name in variables if name.startswith(PREFIX)} <= known


def test_replicas_have_the_gpus_and_the_key_files_that_they_need() -> None:
    """Where they run: on KubeRay's workers, or in the front end's own pod."""
    for name, where, gpus in [("gpu", "workers", "1"), ("autoscaled", "kvshelf-front-end", "1"), ("small", None, None)]:
        templates = dict(pods(rendered(example(name))))
        boxes = {made_by: template["spec"]["containers"][0] for made_by, template in templates.items()}
        limits = {made_by: box["resources"]["limits"].get("nvidia.com/gpu") for made_by, box in boxes.items()}
        assert {made_by: count for made_by, count in limits.items() if count} == ({where: gpus} if where else {})
    workers = dict(pods(rendered({"encryptionKey": "encryption-keys"})))["workers"]["spec"]
    (keys,) = (volume["secret"]["items"] for volume in workers["volumes"] if volume["name"] == "keys")
    assert {"key": "encryption-keys", "path": "encryption-keys"} in keys
    assert {mount["mountPath"] for mount in workers["containers"][0]["volumeMounts"]} >= {"/etc/kvshelf"}


def test_no_service_turns_into_a_setting(objects: list[dict[str, Any]]) -> None:
    """Kubernetes gives each pod variables for each service: one by the name of kvshelf would set KVSHELF_PORT."""
    for manifest in of_kind(objects, "Service"):
        variable = manifest["metadata"]["name"].upper().replace("-", "_") + "_PORT"
        assert variable.removeprefix(PREFIX).lower() not in Settings.model_fields
    assert all(template["spec"]["enableServiceLinks"] is False for _, template in pods(objects))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"modells": []}, "modells"),
        ({"models": []}, "models"),
        ({"device": "tpu"}, "device"),
        ({"settings": {"LOG_LEVEL": "info"}}, "LOG_LEVEL"),
        ({"valkey": {"maxmemory": "16Gi"}}, "maxmemory"),
        ({"frontEnds": {"count": 4, "autoscaling": {"enabled": True, "max": 2}}}, "frontEnds.autoscaling.max is 2"),
        ({"frontEnds": {"maxSurge": 0}}, "no update could begin"),
        ({"frontEnds": {"ingress": {"enabled": True}}}, "needs frontEnds.ingress.host"),
        ({"frontEnds": {"gpusPerReplica": 2}}, "a worker has kuberay.workers.gpus 1"),
        ({"frontEnds": {"replicas": 3}}, "front ends may take 9 GPUs"),
        ({"kuberay": {"workers": {"min": 9}}}, "kuberay.workers.min is 9 and max is 8"),
        ({"vllm": {"enabled": True}}, "vllm.enabled needs dtype"),
        ({"vllm": {"enabled": True}, "dtype": "bfloat16", "models": ["a", "b"]}, "models has 2"),
        (
            {"vllm": {"enabled": True}, "dtype": "bfloat16", "networkPolicy": {"enabled": False}},
            "only the proxy may reach it",
        ),
        ({"serviceMonitor": {"enabled": True}}, "serviceMonitor.keySecret.name"),
        ({"settings": {"KVSHELF_PORT": "80"}}, "settings.KVSHELF_PORT is set by a value of its own"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value,
)
def test_values_that_contradict_each_other_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(helm_python.HelmError, match=message.replace(".", r"\.")):
        rendered(values)


def test_the_image_has_what_the_operator_calls() -> None:
    assert " wget" in DOCKERFILE.read_text()
    assert "ENTRYPOINT" not in DOCKERFILE.read_text()
    assert "KVSHELF_API_KEY_FILE" in environment_of("cuda")


def test_ray_up_takes_its_file() -> None:
    (config,) = documents(RAY_UP)
    validate_config(prepare_config(config))
    config["dokcer"] = {}
    with pytest.raises(Exception, match="dokcer"):
        validate_config(prepare_config(config))
