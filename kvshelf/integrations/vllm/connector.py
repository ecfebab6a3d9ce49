"""The class that vLLM loads, by `kv_connector` and `kv_connector_module_path`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import structlog
import vllm
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
)

from kvshelf.errors import MissingExtra
from kvshelf.integrations.vllm.loading import ShelfWorker
from kvshelf.integrations.vllm.model import ReadingModel
from kvshelf.integrations.vllm.pages import require_read_back
from kvshelf.integrations.vllm.ragged.pages import rows_of
from kvshelf.integrations.vllm.ragged.plugin import TESTED, is_registered, is_tested
from kvshelf.integrations.vllm.scheduling import ShelfScheduler
from kvshelf.integrations.vllm.settings import ShelfSettings, require_supported
from kvshelf.integrations.vllm.step import ConnectorStep
from kvshelf.integrations.vllm.tenants import HiddenKeys

log = structlog.get_logger("kvshelf.vllm")

HiddenKeys().install()  # vLLM imports this also where it receives requests, and makes no object there


class ShelfConnector(KVConnectorBase_V1):  # type: ignore[misc]  # without vLLM its type is unknown
    """vLLM prefills a question and reads its document from the shelf.

    vLLM makes one object in its scheduler and one in each worker; the methods are those of its `KVConnectorBase_V1`. A
    request that names no cache is vLLM's own. One that is refused ends with the finish reason "error", and the log says
    why, with the request's id and the error's code. A version that the tests do not run has to read pages of the
    connector first. Raises `InvalidRequest`, `PolicyUnsupported` and `MissingExtra` where vLLM's settings or version
    are not for it.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        require_supported(vllm_config, len(kv_cache_config.kv_cache_groups))
        settings = ShelfSettings.parse(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._scheduler: ShelfScheduler | None = None
        self._worker: ShelfWorker | None = None
        self._version = vllm.__version__
        self._pages_read = is_tested(self._version)
        self._has_rows = self._pages_read and vllm_config.parallel_config.world_size == 1 and is_registered()
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = ShelfScheduler(settings, vllm_config.cache_config.block_size, rows=self._has_rows)
        else:
            model = vllm_config.model_config
            self._worker = ShelfWorker(
                settings,
                ReadingModel.of(model.model, str(model.dtype).removeprefix("torch.")),
                rank=get_tensor_model_parallel_rank(),
                workers=get_tensor_model_parallel_world_size(),
                page=vllm_config.cache_config.block_size,
            )

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:  # noqa: ARG003
        return True  # a whole recorded pass would not wait for layers

    # In the scheduler

    def on_new_request(self, request: Any) -> None:
        self._of_scheduler.arrived(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return self._of_scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._of_scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> ConnectorStep:
        return self._of_scheduler.take_step(scheduler_output.num_scheduled_tokens)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:  # noqa: ARG002
        self._of_scheduler.finished(request)
        return False, None

    # In a worker

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        layers = self._vllm_config.compilation_config.static_forward_context
        its_layers = {name: layers[name] for name in kv_caches}
        if not self._pages_read:
            require_read_back(self._vllm_config, its_layers, self._kv_cache_config.num_blocks, self._version)
            self._pages_read = True
            if not get_tensor_model_parallel_rank():
                log.warning("untested_version", vllm=self._version, tested=TESTED, pages="read back as written")
        if self._has_rows:
            self._of_worker.rows = rows_of(its_layers)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002
        if not self._pages_read:
            raise MissingExtra(f"vLLM {self._version} did not show its pages before requests; install {TESTED[-1]}")
        self._of_worker.start(self._bound, forward_context.no_compile_layers)

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._of_worker.wait(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass  # the shelf gets no pages: its caches are made by kvshelf

    def wait_for_save(self) -> None:
        self._of_worker.finish()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:  # noqa: ARG002
        refused = set(self._bound.refused)
        return KVConnectorTransferResults(finished_recving=refused, failed_recving=refused)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._of_worker.take_failed()

    def shutdown(self) -> None:
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.close()

    @property
    def _of_scheduler(self) -> ShelfScheduler:
        assert self._scheduler is not None
        return self._scheduler

    @property
    def _of_worker(self) -> ShelfWorker:
        assert self._worker is not None
        return self._worker

    @property
    def _bound(self) -> ConnectorStep:
        step = self._get_connector_metadata()
        assert isinstance(step, ConnectorStep)
        return step
