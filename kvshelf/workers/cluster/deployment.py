"""Replicas as Ray Serve deployments: placement, restart, health checks and queue limits are Ray's.

One deployment per model. Serve's own HTTP proxy stays off: callers use the `RemoteEngine` around its handle.
"""

from __future__ import annotations

import logging
import math
import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import ray
import structlog
import torch
from ray import serve

from kvshelf import errors
from kvshelf.engine.engine import Engine
from kvshelf.engine.llama import engine as llama
from kvshelf.engine.llama.engine import LlamaEngine
from kvshelf.engine.llama.sequences import package_version
from kvshelf.engine.parallel.engine import ParallelEngine
from kvshelf.engine.quality import VERSION, How
from kvshelf.errors import InvalidRequest, KvshelfError, NoWorker, WorkerCrashed
from kvshelf.model import calibration, loading
from kvshelf.model.loading import chosen_device
from kvshelf.model.prepacking import prepack
from kvshelf.store.ladder.rule import Ladder
from kvshelf.store.url import StoreConfig
from kvshelf.workers.cluster import orphans, startup
from kvshelf.workers.cluster.remote import RemoteEngine, running
from kvshelf.workers.cluster.served import served_name
from kvshelf.workers.replica.create.plan import MemoryPlan
from kvshelf.workers.replica.create.spread import SpreadPlan, plan_of_name
from kvshelf.workers.replica.guard import GuardRules
from kvshelf.workers.replica.memory.residents import ResidentLimits
from kvshelf.workers.replica.replica import Replica
from kvshelf.workers.replica.scheduler import Scheduler, SchedulerLimits

log = structlog.get_logger("kvshelf.workers")

_TELL_S: Final = 10.0
"""Seconds between two log lines about a model that is not up yet."""

_SWITCH_S: Final = 0.001
"""After which a thread that runs Python gives way, a fifth of Python's own: the model's thread waits so long for each
other one whenever it comes back from a kernel."""


@dataclass(frozen=True)
class ReplicaConfig:
    """The configuration of each replica of one model.

    model: bundled name, folder or hub id. adapter: the name of the model's adapter, which is the model's in the API; ""
    for a model by its own name. engine: of questions, "kvshelf" or "llama.cpp", which needs a GGUF file. weights: as of
    `Engine.load`; "int8" needs one process. residents: under llama.cpp, which holds caches once more, each gets half of
    their bytes. threads: CPU threads for torch; None leaves Ray's choice. quality: how that of each new cache is
    measured; tenant_quality: of single tenants. max_document_tokens: the longest document it compresses; None leaves it
    to the model. gpus: of the replica. With the device "spread" the layers are spread over them, otherwise as many
    processes share the model's heads, without GPUs on the CPU. memory: of its device, as of `MemoryPlan.of`; a share
    of a GPU below 1 leaves the rest to other replicas. intensity: of the device, as of `Equivalents`; None:
    what the table says. chat_template: as of `Engine.load`. begin: called first in the replica's process, for example
    to set up its logs.
    """

    model: str
    store: StoreConfig
    device: str = "auto"
    dtype: str = "auto"
    weights: str = "plain"
    engine: str = "kvshelf"
    threads: int | None = None
    limits: SchedulerLimits = field(default_factory=SchedulerLimits)
    residents: ResidentLimits = field(default_factory=ResidentLimits)
    quality: How = "fast"
    tenant_quality: Mapping[str, How] = field(default_factory=dict)
    max_document_tokens: int | None = None
    guard: GuardRules = field(default_factory=GuardRules)
    ladder: Ladder = field(default_factory=Ladder)
    gpus: int = 1
    memory: float | None = None
    intensity: float | None = None
    chat_template: str | None = None
    begin: Callable[[], None] = lambda: None
    adapter: str = ""

    @property
    def name(self) -> str:
        return self.adapter or served_name(self.model)

    @property
    def parent(self) -> str | None:
        return served_name(self.model.rpartition("+")[0]) if self.adapter else None


class ServedReplica(Replica):
    """A `Replica` that makes its own parts, because Ray constructs it in the replica's process."""

    def __init__(self, config: ReplicaConfig) -> None:
        startup.begin()
        config.begin()
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # batches are of one text
        sys.setswitchinterval(_SWITCH_S)
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        plan = _plan(config)
        engine = _engine(config, plan) if config.gpus == 1 or config.device == "spread" else _shared_engine(config)
        if plan is not None:
            plan = plan.loaded(engine)
            plan.require()
            log.info("memory planned", plan=str(plan))
        if config.intensity is not None:
            engine.equivalents = replace(engine.equivalents, intensity=config.intensity)
        store, residents = config.store.open(), config.residents
        if isinstance(engine, LlamaEngine):
            residents = replace(residents, max_bytes=residents.max_bytes // 2)
            versions: dict[str, Any] = {"engine_version": package_version(), "quality_version": VERSION}
            engine.link(store.links.makers(engine.identity.fingerprint(), config.engine, **versions))
        super().__init__(
            engine,
            store,
            Scheduler(engine, config.limits),
            residents,
            quality=config.quality,
            tenant_quality=config.tenant_quality,
            max_document_tokens=config.max_document_tokens,
            guard=config.guard,
        )
        self.creations.plan = plan
        self.cooling.follow(config.ladder)
        self.start()
        startup.end()

    def __del__(self) -> None:
        self.stop()


def _plan(config: ReplicaConfig) -> MemoryPlan | SpreadPlan | None:
    """The memory of a replica, before it reads any weight; None where nothing limits it, several processes share a
    model, or another engine holds it. Raises `OutOfMemory`, and as `plan_of_name`."""
    if (config.gpus > 1 and config.device != "spread") or config.engine == llama.NAME:
        return None
    if config.memory is None and chosen_device("auto" if config.device == "spread" else config.device).type == "cpu":
        return None
    plan = plan_of_name(
        config.model,
        config.name,
        device=config.device,
        dtype=config.dtype,
        rounded=config.weights == "int8",
        memory=config.memory,
        attached=config.residents.max_bytes,
        suffixes=config.limits.max_suffix_bytes,
        answers=config.limits.max_open,
        longest=config.max_document_tokens,
    )
    plan.require()
    plan.keep()
    return plan


def _engine(config: ReplicaConfig, plan: MemoryPlan | SpreadPlan | None) -> Engine:
    calibration.note_served(config.name, config.model)
    options: dict[str, Any] = {
        "device": config.device,
        "dtype": config.dtype,
        "chat_template": config.chat_template,
        "shown": config.name,
    }
    engine: Engine
    if config.engine == llama.NAME:
        engine = LlamaEngine.load(config.model, memory=config.residents.max_bytes // 2, **options)
    elif isinstance(plan, SpreadPlan):
        shown = options.pop("shown")
        engine = Engine(*loading.load(config.model, most=plan.most, **options), name=shown)
        prepack(engine.model)  # as `Engine.load`; one with hooks stays as it is
    else:
        engine = Engine.load(config.model, weights=config.weights, **options)
    _ = engine.passes.program  # recorded before the first question waits for it
    return engine


def _shared_engine(config: ReplicaConfig) -> Engine:
    """An engine of several processes. Where one of them ends, this one does, and Serve starts the replica anew."""
    calibration.note_served(config.name, config.model)
    engine = ParallelEngine.load(
        config.model,
        device=config.device,
        dtype=config.dtype,
        ranks=config.gpus,
        shown=config.name,
        chat_template=config.chat_template,
        weights=config.weights,
    )

    def end_replica(error: WorkerCrashed) -> None:
        log.error("the replica ends, because one of its processes has", error=error.message)
        os._exit(1)  # this thread is not the one that waits for the others, and no exception would reach it

    engine.lead.on_lost = end_replica
    return engine


def deploy(
    configs: Sequence[ReplicaConfig],
    replicas: int = 1,
    *,
    max_ongoing_requests: int = 64,
    max_queued_requests: int = 256,
    local: bool = False,
) -> dict[str, RemoteEngine]:
    """Start a deployment for each model, without waiting until they run; returns their engines by served name.

    max_ongoing_requests: of each replica. max_queued_requests: that wait for the replicas of a model.
    A replica takes one GPU or one CPU for each of its processes, by its device; with the device "auto", GPUs if the
    cluster has one now. Raises `InvalidRequest` for more GPUs than a `local` cluster has, which no node can join.
    """
    names = [config.name for config in configs]
    if len(set(names)) != len(names):
        raise InvalidRequest(f"two models go by one name: {', '.join(sorted(names))}", param="models")
    logging.getLogger("ray.serve").setLevel(logging.ERROR)  # it logs each start of a replica
    serve.start(proxy_location="Disabled")
    orphans.remove_orphans()  # before anything is placed: they hold GPUs
    deployment = serve.deployment(ServedReplica).options(
        num_replicas=replicas,
        max_ongoing_requests=max_ongoing_requests,
        max_queued_requests=max_queued_requests,
        health_check_period_s=1.0,
        health_check_timeout_s=30.0,
        graceful_shutdown_timeout_s=5.0,
        max_constructor_retry_count=1,  # at the start, a second try would fail too; later, Serve keeps trying anyway
    )
    require_gpus(configs, replicas, ray.cluster_resources().get("GPU", 0), local=local)
    job = orphans.job_id()
    targets = [
        serve.RunTarget(
            target=deployment.options(ray_actor_options=resources_of(config)).bind(config),
            name=app_name(config.name, job),
            route_prefix=None,
        )
        for config in configs
    ]
    handles = serve.run_many(targets, wait_for_ingress_deployment_creation=True, wait_for_applications_running=False)
    return {
        name: RemoteEngine(name, target.name, handle, replicas, config.gpus, config.parent)
        for name, target, handle, config in zip(names, targets, handles, configs, strict=True)
    }


def await_running(engines: Iterable[RemoteEngine], *, deadline_s: float) -> None:
    """Block until each model has a replica that takes requests; the log says every ten seconds what is missing. Raises
    the error that kept a replica from starting, or `NoWorker`."""
    began = logged = time.monotonic()
    for engine in engines:
        while not running(overview := serve.status().applications[engine.app]):
            waited_s = time.monotonic() - began
            reason = "\n".join(d.message for d in overview.deployments.values())
            if overview.status == "DEPLOY_FAILED":
                raise startup_error(engine.model, reason)
            if waited_s > deadline_s:
                raise NoWorker(f"no worker of {engine.model!r} came up within {deadline_s:g} s: {_missing(reason)}")
            if time.monotonic() - logged > _TELL_S:
                logged = time.monotonic()
                log.info(
                    "the model is not up yet",
                    model=engine.model,
                    seconds=round(waited_s),
                    waits_for=reason or "its replica to start",
                )
            time.sleep(0.2)  # a status takes 0.02 s of processor time, which the starting replica needs


def _missing(reason: str) -> str:
    """What kept a replica from starting, as far as Ray tells."""
    have = {name: count for name, count in ray.cluster_resources().items() if name in ("CPU", "GPU")}
    return (
        f"{reason.rstrip('.') or 'Ray does not say why'}. The cluster has {have}; a replica takes one GPU, or one "
        "CPU, for each of its processes"
    )


def startup_error(model: str, message: str) -> KvshelfError:
    """Why a replica could not be constructed. Serve has only a traceback's text, whose last error is the cause."""
    named = list(re.finditer(r"^kvshelf\.errors\.(\w+): ", message, re.MULTILINE))
    if named and (text := message[named[-1].end() :].rstrip()):
        cls: type[KvshelfError] = getattr(errors, named[-1][1])
        return cls(text)
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return NoWorker(f"no worker of {model!r} came up: {lines[-1] if lines else 'Ray does not say why'}")


def undeploy(engines: Iterable[RemoteEngine]) -> None:
    """Take the deployments down. Not needed where the whole cluster goes down."""
    for engine in engines:
        serve.delete(engine.app)


def require_gpus(configs: Sequence[ReplicaConfig], replicas: int, gpus: float, *, local: bool) -> None:
    shares = [share for config in configs for share in [resources_of(config).get("num_gpus", 0)] if share]
    needed = replicas * sum(shares)
    if shares and max(shares) < 1:  # of one share of a card, which as many have as fit whole
        needed = math.ceil(replicas * len(shares) / int(1 / max(shares)))
    if needed > gpus and local:
        raise InvalidRequest(
            f"the replicas take {needed:g} GPUs, and Ray finds {gpus:g} on this machine; take --device cpu, fewer "
            "--replicas, --gpus-per-replica or models, or let replicas share GPUs (KVSHELF_GPU_MEMORY=0.5)",
            param="device",
        )
    if needed > gpus:
        log.warning("replicas wait for GPUs that the Ray cluster does not have yet", needed=needed, there=gpus)


def resources_of(config: ReplicaConfig) -> dict[str, float]:
    # "cuda" takes a GPU even if the cluster has none yet: a node may join later, and replicas never change device.
    device = config.device
    has_gpus = device in ("auto", "spread") and ray.cluster_resources().get("GPU", 0) > 0
    on_gpus = has_gpus or device.startswith("cuda")
    share = 1 if config.memory is None or config.gpus > 1 else min(1, config.memory)
    return {"num_gpus": config.gpus * share, "num_cpus": 0} if on_gpus else {"num_cpus": config.gpus}


def app_name(name: str, job: str) -> str:
    # Readable in Ray's tools, unique among the services on a cluster, and with the job that owns it.
    readable = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")
    return f"kvshelf-{readable[:40]}-job{job}-{secrets.token_hex(4)}"
