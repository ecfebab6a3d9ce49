"""GPUs that cannot be used, or lack a dtype, are refused by name before anything is loaded."""

from __future__ import annotations

import pytest
import torch

from kvshelf.errors import InvalidRequest
from kvshelf.model.devices import require_bfloat16
from kvshelf.model.loading import chosen_device, outline


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_cuda_the_reason_is_named() -> None:
    with pytest.raises(InvalidRequest, match=r"device 'cuda:1' cannot be used: .*(CUDA|driver).*--device cpu"):
        chosen_device("cuda:1")


def test_a_driver_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040). Please update it")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", refuse)
    with pytest.raises(InvalidRequest, match=r"driver on your system is too old .*11040\); PyTorch .* CUDA 13\.0"):
        chosen_device("cuda")


def test_a_number_beyond_the_last_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert chosen_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(InvalidRequest, match="'cuda:2' cannot be used: this process sees 2 GPUs"):
        chosen_device("cuda:2")


@pytest.mark.parametrize(("card", "capability"), [("Tesla T4", (7, 5)), ("Tesla V100-SXM2-16GB", (7, 0))])
def test_a_card_before_ampere_has_no_bfloat16(card: str, capability: tuple[int, int]) -> None:
    with pytest.raises(InvalidRequest, match=rf"{card} .*{capability[0]}\.{capability[1]}.*--dtype float16") as refused:
        require_bfloat16(card, capability)
    assert refused.value.param == "dtype"


@pytest.mark.parametrize(("card", "capability"), [("NVIDIA A100-SXM4-80GB", (8, 0)), ("NVIDIA H200", (9, 0))])
def test_later_cards_have_it(card: str, capability: tuple[int, int]) -> None:
    require_bfloat16(card, capability)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_an_outline_is_what_would_be_loaded_without_its_weights(dtype: str) -> None:
    model = outline("kvshelf-tiny", device="cpu", dtype=dtype)
    assert model.dtype == getattr(torch, dtype)
    assert all(weight.is_meta for weight in model.parameters())
    assert outline("kvshelf-tiny", device="cpu", dtype="auto").dtype == torch.float32


def test_an_outline_of_an_unknown_dtype_names_the_known_ones() -> None:
    with pytest.raises(InvalidRequest, match="unknown dtype 'fp8'; one of auto, float32, bfloat16, float16") as refused:
        outline("kvshelf-tiny", device="cpu", dtype="fp8")
    assert refused.value.param == "dtype"
