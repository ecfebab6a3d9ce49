"""Connectors in a vLLM of a version that is said to be unknown: it tests its pages when it starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvshelf.integrations.vllm import connector
from tests.integrations_vllm.losing import LosingConnector

connector.is_tested = lambda version: not version


class UntestedConnector(LosingConnector):
    pass


class ShiftedConnector(LosingConnector):
    """In a vLLM whose slots begin elsewhere."""

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        for layer in self._vllm_config.compilation_config.static_forward_context.values():
            shift(layer.impl)
        super().register_kv_caches(kv_caches)


def shift(impl: Any) -> None:
    update = impl.do_kv_cache_update
    impl.do_kv_cache_update = lambda layer, keys, values, pages, slots: update(layer, keys, values, pages, slots + 1)
