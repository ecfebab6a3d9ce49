"""What is in deploy/, read as data."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent.parent
DEPLOY = ROOT / "deploy"

COMPOSE = DEPLOY / "compose.yaml"
COMPOSE_CUDA = DEPLOY / "compose.cuda.yaml"
COMPOSE_VLLM = DEPLOY / "compose.vllm.yaml"
DOCKERFILE = DEPLOY / "Dockerfile"
KUBERNETES = sorted(path for path in (DEPLOY / "kubernetes").glob("*.yaml") if path.name != "kustomization.yaml")
RAY_UP = DEPLOY / "ray-cluster.yaml"
UNIT = DEPLOY / "systemd" / "kvshelf.service"


def every_file() -> list[Path]:
    return sorted(path for path in DEPLOY.rglob("*") if path.is_file())


def documents(path: Path) -> list[dict[str, Any]]:
    return [found for found in yaml.safe_load_all(path.read_text()) if found]


def objects(kind: str) -> list[dict[str, Any]]:
    """The Kubernetes objects of a kind."""
    return [found for path in KUBERNETES for found in documents(path) if found["kind"] == kind]


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    """The templates of all pods, by the name of what makes them."""
    for kind in ("Deployment", "StatefulSet"):
        for found in objects(kind):
            yield found["metadata"]["name"], found["spec"]["template"]
    for cluster in objects("RayCluster"):
        groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
        for group in groups:
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
