"""What a vLLM must be like so that it can read the shelf, and where the shelf is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Self
from urllib.parse import urlsplit

from kvshelf.errors import InvalidRequest, PolicyUnsupported, nearest
from kvshelf.integrations.vllm.service import ServiceShelf
from kvshelf.store.base import Store
from kvshelf.store.url import StoreConfig

NO_TABLES: Final = (
    "its heads keep different numbers of entries, for which this vLLM has no page tables: that takes store in place of "
    "service, one worker on a CPU, a tested version with the plug-in kvshelf, and equal heads in every layer"
)
"""Why a cache whose heads keep different numbers of entries is refused."""


@dataclass(frozen=True)
class ShelfSettings:
    """`kv_connector_extra_config` of vLLM. store: the URL of the shelf, by default `KVSHELF_STORE` of the environment.
    encryption_key_file: absolute path of the keys of a sealed one. service: instead, the URL of a kvshelf service, to
    which `KVSHELF_API_KEY` of the environment is the key; its tenant's caches may be asked, and `tenant` names it.

    One of three says whose caches may be asked. tenant: that one's, by default `default`. api_key_file: absolute path
    of the service's keys, of which each request brings one. trust_tenant: of the tenant that the request names.
    """

    store: str | None = None
    service: str | None = None
    encryption_key_file: str | None = None
    tenant: str | None = None
    api_key_file: str | None = None
    trust_tenant: bool = False

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> Self:
        """Raises `InvalidRequest` for an unknown field, a wrong type, two ways to a tenant, no shelf or two."""
        names = [field.name for field in fields(cls)]
        for name, value in config.items():
            kind, what = (bool, "true or false") if name == "trust_tenant" else (str, "a text")
            if name not in names or not isinstance(value, kind):
                why = f"must be {what}" if name in names else f"is unknown{nearest(name, names)}"
                raise InvalidRequest(f"kv_connector_extra_config: {name} {why}", param=name)
        ways = [name for name in ("tenant", "api_key_file", "trust_tenant") if config.get(name)]
        if len(ways) > 1:
            raise InvalidRequest(f"kv_connector_extra_config takes one of {' and '.join(ways)}", param=ways[1])
        if config.get("service"):
            return cls._of_service(config)
        store = config.get("store", os.environ.get("KVSHELF_STORE"))
        if store is None:
            raise InvalidRequest(
                "kv_connector_extra_config needs store, the URL of the shelf, or the environment KVSHELF_STORE; or "
                "service, the URL of a kvshelf service",
                param="store",
            )
        return cls(**{**config, "store": store})

    @classmethod
    def _of_service(cls, config: Mapping[str, Any]) -> Self:
        for name in ("store", "encryption_key_file", "api_key_file", "trust_tenant"):
            if config.get(name):
                raise InvalidRequest(
                    f"kv_connector_extra_config: {name} does not go together with service, which has its shelf and "
                    "one tenant, that of its key",
                    param=name,
                )
        parts = urlsplit(config["service"])
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc or parts.query:
            raise InvalidRequest(
                "kv_connector_extra_config: service must be an address such as http://kvshelf:8765, without a password "
                "or a key; the key is taken from the environment KVSHELF_API_KEY",
                param="service",
            )
        return cls(**config)

    def open(self) -> Store | ServiceShelf:
        """Raises as `StoreConfig.open` does. A service that does not answer raises nothing here."""
        if self.service is not None:
            return ServiceShelf(self.service)
        assert self.store is not None, "as `parse` gives it"
        return StoreConfig(self.store, encryption_key_file=self.encryption_key_file).open()


def require_supported(config: Any, page_groups: int) -> None:
    """Raises `InvalidRequest` or `PolicyUnsupported` for settings under which stored entries would be wrong, or a
    failed load would be computed from stand-ins. config: vLLM's `VllmConfig`."""
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    if config.kv_transfer_config.kv_load_failure_policy != "fail":
        raise InvalidRequest(
            "kv_load_failure_policy must be fail: vLLM cannot recompute a document from stand-ins",
            param="kv_load_failure_policy",
        )
    dtype = str(model.dtype).removeprefix("torch.")
    conflicts = {
        "quantized weights": model.quantization is not None,
        "hf_overrides": bool(model.hf_overrides),
        f"the KV cache in {cache.cache_dtype}": cache.cache_dtype not in ("auto", dtype),
        "speculative decoding": config.speculative_config is not None,
        "context parallelism": parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size > 1,
        "several groups of pages, as of layers with windows or states": page_groups != 1,
    }
    if refused := [what for what, holds in conflicts.items() if holds]:
        raise PolicyUnsupported(f"kvshelf's connector does not take {', '.join(refused)} yet", param="kv_connector")
