"""Which deployments on a shared Ray cluster have been left behind.

Ray Serve keeps a deployment running when the process that made it is gone, and with it a GPU for each replica. So every
process on a cluster that is not its own has an actor there, which Ray ends with it, however it ends; a deployment whose
maker has none is nobody's. (Deployments under a fixed name, taken over by the next process, would let two services
on one cluster overwrite each other.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import ray
from ray import serve

_NAMESPACE: Final = "kvshelf"
_APP = re.compile(r"kvshelf-.*-job([0-9a-f]+)-[0-9a-f]{8}")


class _Lifeline:
    """Does nothing but be there."""


@contextmanager
def held() -> Iterator[None]:
    """Inside the block this process is known to the cluster it is connected to."""
    actor = ray.remote(num_cpus=0, max_restarts=-1)(_Lifeline)
    handle = actor.options(name=_name(job_id()), namespace=_NAMESPACE).remote()
    ray.get(handle.__ray_ready__.remote())
    yield
    del handle  # which ends the actor; until then this frame keeps it


def job_id() -> str:
    """Ray's number for this process. It is in the names of its deployments; a cluster gives it once."""
    return str(ray.get_runtime_context().get_job_id())


def remove_orphans() -> None:
    """Take down the deployments of processes that are gone."""
    for app in serve.status().applications:
        maker = _APP.fullmatch(app)
        if maker and maker[1] != job_id() and not _is_there(maker[1]):
            serve.delete(app)


def _is_there(job: str) -> bool:
    try:
        ray.get_actor(_name(job), namespace=_NAMESPACE)
    except ValueError:  # what Ray raises for a name that nobody has
        return False
    return True


def _name(job: str) -> str:
    return f"kvshelf-lifeline-{job}"
