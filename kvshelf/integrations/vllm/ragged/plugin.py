"""What vLLM calls in each of its processes, by the entry point `kvshelf` of the group `vllm.general_plugins`."""

from __future__ import annotations

from kvshelf.integrations.vllm.settings import is_tested


def register() -> None:
    """Have a vLLM that the tests run take our attention on a CPU, unless another one is registered already. May be
    called again."""
    import vllm
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    ours = current_platform.is_cpu() and is_tested(vllm.__version__)
    if ours and not AttentionBackendEnum.CPU_ATTN.is_overridden():
        register_backend(AttentionBackendEnum.CPU_ATTN, "kvshelf.integrations.vllm.ragged.attention.RowsBackend")
