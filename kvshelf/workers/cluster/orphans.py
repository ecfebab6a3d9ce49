"""Orphans: deployments on a shared Ray cluster whose owner, the process that made them, has ended."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import ray
from ray import serve

_NAMESPACE: Final = "kvshelf"
_APP = re.compile(r"kvshelf-.*-job([0-9a-f]+)-[0-9a-f]{8}")


class _Owner:
    """An actor that does nothing: its existence shows that the process lives."""


@contextmanager
def registered() -> Iterator[None]:
    """Inside the block the cluster knows this process as an owner of deployments, by an actor that Ray ends together
    with the process. Ray Serve would keep its deployments, and a GPU for each replica. (Fixed names, taken over by the
    next process, would let two services on one cluster overwrite each other.)"""
    actor = ray.remote(num_cpus=0, max_restarts=-1)(_Owner)
    handle = actor.options(name=_name(job_id()), namespace=_NAMESPACE).remote()
    ray.get(handle.__ray_ready__.remote())
    yield
    del handle  # which ends the actor; until then this frame keeps it


def job_id() -> str:
    """Ray's id for this process, part of the names of its deployments. A cluster gives each id once."""
    return str(ray.get_runtime_context().get_job_id())


def remove_orphans() -> None:
    """Take down the deployments of processes that have ended."""
    for app in serve.status().applications:
        owner = _APP.fullmatch(app)
        if owner and owner[1] != job_id() and not _lives(owner[1]):
            serve.delete(app)


def _lives(job: str) -> bool:
    try:
        ray.get_actor(_name(job), namespace=_NAMESPACE)
    except ValueError:  # what Ray raises for an unknown name
        return False
    return True


def _name(job: str) -> str:
    return f"kvshelf-owner-{job}"
