"""What vLLM calls in each of its processes, by the entry point `kvshelf` of the group `vllm.general_plugins`.

Also where nothing else of kvshelf is used, or can be: so it imports no other part of it."""

from __future__ import annotations

from typing import Final

TESTED: Final = ("0.31", "0.32")
"""Versions of vLLM that the tests run: its interface for connectors changes without notice."""

_BACKEND: Final = "kvshelf.integrations.vllm.ragged.attention.RowsBackend"


def is_tested(version: str) -> bool:
    """Whether the tests run this version of vLLM; others test themselves when they start."""
    return version.startswith(tuple(f"{tested}." for tested in TESTED))


def register() -> None:
    """Have a tested vLLM take our attention on a CPU, unless another one is registered. May be called again."""
    if _is_for_us():
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        if not AttentionBackendEnum.CPU_ATTN.is_overridden():
            register_backend(AttentionBackendEnum.CPU_ATTN, _BACKEND)


def is_registered() -> bool:
    if not _is_for_us():
        return False
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return bool(AttentionBackendEnum.CPU_ATTN.get_path() == _BACKEND)


def _is_for_us() -> bool:
    import vllm

    if not is_tested(vllm.__version__):  # before what another version may not have: vLLM ends by an error of `register`
        return False
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())
