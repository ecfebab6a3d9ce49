"""What is in deploy/, read as data, and what Helm makes of its chart."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python
import yaml

ROOT = Path(__file__).resolve().parent.parent.parent
DEPLOY = ROOT / "deploy"

COMPOSE = DEPLOY / "compose.yaml"
COMPOSE_CUDA = DEPLOY / "compose.cuda.yaml"
COMPOSE_VLLM = DEPLOY / "compose.vllm.yaml"
DOCKERFILE = DEPLOY / "Dockerfile"
CHART = DEPLOY / "chart"
EXAMPLES = tuple(path.stem for path in sorted((CHART / "examples").glob("*.yaml")))
RAY_UP = DEPLOY / "ray-cluster.yaml"
UNIT = DEPLOY / "systemd" / "kvshelf.service"


def every_file() -> list[Path]:
    return sorted(path for path in DEPLOY.rglob("*") if path.is_file())


def documents(path: Path) -> list[dict[str, Any]]:
    return [found for found in yaml.safe_load_all(path.read_text()) if found]


def example(name: str) -> dict[str, Any]:
    """The values of an example of the chart."""
    (values,) = documents(CHART / "examples" / f"{name}.yaml")
    return values


def rendered(values: dict[str, Any]) -> list[dict[str, Any]]:
    """The objects that `helm install kvshelf` makes of the chart with these values.

    Raises:
        helm_python.HelmError: The values contradict the schema or each other.
    """
    texts = helm_python.Chart.load(CHART).render(values, name="kvshelf", namespace="shelf")
    manifests = [text for path, text in sorted(texts.items()) if path.endswith(".yaml")]
    return [manifest for text in manifests for manifest in yaml.safe_load_all(text) if manifest]


def of_kind(objects: list[dict[str, Any]], *kinds: str) -> list[dict[str, Any]]:
    return [manifest for manifest in objects if manifest["kind"] in kinds]


def pods(objects: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The templates of all pods, by the name of what makes them."""
    for manifest in of_kind(objects, "Deployment", "StatefulSet"):
        yield manifest["metadata"]["name"], manifest["spec"]["template"]
    for cluster in of_kind(objects, "RayCluster"):
        for group in [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]:
            yield group.get("groupName", "head"), group["template"]


def image_of(stage: str) -> str:
    """What a stage of the Dockerfile consists of, and the stages it is built on, as one text."""
    text = DOCKERFILE.read_text().replace("\\\n", " ")
    stages = {
        name: (base, body)
        for base, name, body in re.findall(r"^FROM (\S+) AS (\S+)\n(.*?)(?=^FROM|\Z)", text, re.M | re.S)
    }
    base, body = stages[stage]
    return (image_of(base) if base in stages else "") + body


def copies(stage: str) -> list[tuple[str, str]]:
    """What a stage copies from the repository: (from, to)."""
    found = re.findall(r"^COPY (?!--from)(?:--\S+ )*(.+) (\S+)$", image_of(stage), re.M)
    return [(source, target) for sources, target in found for source in sources.split()]


def environment_of(stage: str) -> dict[str, str]:
    """The variables that an image sets."""
    return dict(re.findall(r"(\w+)=(\S+)", "\n".join(re.findall(r"^ENV (.*)$", image_of(stage), re.M))))
