from __future__ import annotations

import pytest
import torch

from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.records import Kept
from tests.store.caches import from_heads, make_identity


def ragged() -> Kept:
    """Two heads that keep 2 and 1 entries, and one that keeps none. D is 2 and Dv 1."""
    return from_heads(
        keys=[torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0, 6.0]]), torch.empty(0, 2)],
        values=[torch.tensor([[7.0], [8.0]]), torch.tensor([[9.0]]), torch.empty(0, 1)],
        positions=[torch.tensor([0, 4]), torch.tensor([2]), torch.empty(0, dtype=torch.int64)],
    )


def test_heads_are_packed_and_found_again() -> None:
    layer = ragged()
    assert (layer.kv_heads, layer.entries, layer.offsets, layer.uniform) == (3, 3, (0, 2, 3, 3), False)
    assert [head.tolist() for head in layer.positions] == [[0, 4], [2], []]
    assert layer.entry_positions.dtype == torch.int32
    assert [keys.tolist() for keys, _ in layer.heads()] == [[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0]], []]
    assert [values.tolist() for _, values in layer.heads()] == [[[7.0], [8.0]], [[9.0]], []]
    assert layer.nbytes == 3 * (2 + 1) * 4 + 3 * 4


def test_heads_are_views() -> None:
    layer = ragged()
    assert layer.heads()[1][0].data_ptr() == layer.keys[2:].data_ptr()
    assert layer.positions[1].data_ptr() == layer.entry_positions[2:].data_ptr()


def test_dense_pads_with_zeros_that_are_not_valid() -> None:
    keys, values, valid = ragged().dense()
    assert keys.tolist() == [[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]]]
    assert values.tolist() == [[[7.0], [8.0]], [[9.0], [0.0]], [[0.0], [0.0]]]
    assert valid.tolist() == [[True, True], [True, False], [False, False]]


@pytest.mark.parametrize(("lengths", "uniform"), [((3,), True), ((3, 3), True), ((3, 2), False), ((0, 0), True)])
def test_uniform_says_whether_heads_are_equal(lengths: tuple[int, ...], uniform: bool) -> None:
    parts = [torch.zeros(length, 1) for length in lengths]
    assert from_heads(parts, parts, [part[:, 0] for part in parts]).uniform is uniform


def test_a_cache_counts_what_it_holds() -> None:
    layer = ragged()
    cache = CompressedCache((layer, layer), 5, 5, make_identity(5))
    assert cache.nbytes == 2 * layer.nbytes
    assert cache.kept_tokens == 1  # 6 entries in 6 heads
    assert cache.to("cpu").layers[0] is layer


def test_a_cache_is_shown_in_one_line_without_its_tensors() -> None:
    layer = ragged()
    cache = CompressedCache((layer, layer), 5, 5, make_identity(5))
    assert repr(cache) == (
        "CompressedCache(document=121212121212, model='tiny', policy=keydiff, kept=1 of 5, codec=none, nbytes=96)"
    )


def test_packed_tensors_must_fit_together() -> None:
    with pytest.raises(AssertionError):
        Kept(torch.zeros(3, 2), torch.zeros(2, 2), torch.zeros(3, dtype=torch.int32), (0, 3))
