"""Deploys the replicas that the settings ask for on the connected Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from kvshelf.service.observe import logs
from kvshelf.service.settings import Settings
from kvshelf.store.ladder.rule import Ladder
from kvshelf.store.url import StoreConfig
from kvshelf.workers.cluster import deployment
from kvshelf.workers.cluster.remote import RemoteEngine
from kvshelf.workers.replica.guard import GuardRules
from kvshelf.workers.replica.memory.residents import ResidentLimits
from kvshelf.workers.replica.queues import SchedulerLimits


@contextmanager
def deployed_replicas(settings: Settings, shelf: StoreConfig, *, local: bool) -> Iterator[dict[str, RemoteEngine]]:
    """Deploys each model for the duration of the block. Its replicas may still be starting, see `await_running`.

    local: whether this process started the cluster.
    """
    configs = [_config(settings, shelf, model, adapter, local=local) for model, adapter in settings.served]
    engines = deployment.deploy(
        configs,
        settings.replicas,
        max_ongoing_requests=settings.max_ongoing_requests,
        max_queued_requests=settings.max_queued_requests,
        local=local,
    )
    try:
        yield engines
    finally:
        if not local:  # a local cluster is shut down as a whole
            deployment.undeploy(engines.values())


def _config(
    settings: Settings, shelf: StoreConfig, model: str, adapter: str, *, local: bool
) -> deployment.ReplicaConfig:
    share_of_cpus = max(1, settings.gpus_per_replica * (os.cpu_count() or 1) // settings.replica_processes)
    return deployment.ReplicaConfig(
        model=model,
        adapter=adapter,
        store=shelf,
        device=settings.device,
        dtype=settings.dtype,
        weights=settings.weights,
        engine=settings.engine,
        chat_template=settings.chat_template,
        threads=settings.threads or share_of_cpus if local else settings.threads,
        limits=SchedulerLimits(
            max_open=settings.max_open_generations,
            max_suffix_bytes=settings.max_suffix_bytes,
            batch_share=settings.batch_share,
        ),
        residents=ResidentLimits(settings.resident_bytes, settings.resident_idle_s),
        intensity=settings.operational_intensity,
        quality=settings.quality_probe,
        tenant_quality=settings.tenant_quality,
        max_document_tokens=settings.max_document_tokens,
        guard=GuardRules(
            settings.guard_share,
            settings.guard_time_share,
            settings.guard_floor,
            settings.guard_below,
            settings.guard_label,
        ),
        ladder=Ladder.parse(settings.ladder) if settings.ladder else Ladder(),
        gpus=settings.gpus_per_replica,
        memory=settings.gpu_memory,
        begin=partial(logs.configure, settings.log_level),
    )
