"""What attention hands over: log-sum-exps are those of its own rows, and its output is what torch's function gives."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kvshelf.engine.attention.function import CONTEXT, Attended, attention
from kvshelf.kernels.column_sums import column_sums
from kvshelf.methods.policies import POLICIES
from kvshelf.methods.policies.view import LayerView

SCALE = 0.11


@dataclass
class Recorder:
    probe_lengths: tuple[int, ...] = ()
    hides: bool = False
    layers: list[Attended] = field(default_factory=list)

    def after_attention(self, layer):
        self.layers.append(layer)


def states(tokens, dtype=torch.float32, *, q_heads=8, kv_heads=2, dim=64, value_dim=64, earlier=0):
    generator = torch.Generator().manual_seed(tokens)
    shapes = (q_heads, tokens, dim), (kv_heads, earlier + tokens, dim), (kv_heads, earlier + tokens, value_dim)
    return [torch.randn(2, *shape, generator=generator).to(dtype) for shape in shapes]


def attend(queries, keys, values, probe_lengths=()):
    recorder = Recorder(probe_lengths)
    with torch.no_grad():
        out, _ = attention(nn.Identity(), queries, keys, values, None, SCALE, **{CONTEXT: recorder})
    (layer,) = recorder.layers
    return out.transpose(1, 2), layer


def lse_of(queries, keys):
    """In fp64, `[B, q_heads, T]`."""
    repeated = keys.double().repeat_interleave(queries.shape[1] // keys.shape[1], dim=1)
    logits = SCALE * queries.double() @ repeated.mT
    future = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
    return logits.masked_fill(future, -torch.inf).logsumexp(dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(8, 2), (4, 4), (3, 1)])
@pytest.mark.parametrize("tokens", [1, 2, 33, 300])
def test_log_sum_exps_are_those_of_the_rows(tokens, q_heads, kv_heads, dtype):
    queries, keys, values = states(tokens, dtype, q_heads=q_heads, kv_heads=kv_heads)
    out, layer = attend(queries, keys, values)
    allowed = 1e-5 if dtype == torch.float32 else 2e-4  # in bf16 torch's exponentials are coarser
    torch.testing.assert_close(layer.lse, lse_of(queries, keys).float(), atol=allowed, rtol=1e-5)
    assert (layer.queries, layer.keys, layer.values, layer.scaling) == (queries, keys, values, SCALE)
    expected = scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=SCALE, enable_gqa=True)
    assert torch.equal(out, expected)


def test_of_what_stands_before_the_probe_passes_only():
    queries, keys, values = states(70)
    out, layer = attend(queries[:1], keys[:1], values[:1], probe_lengths=(4, 6))
    alone, document = attend(queries[:1, :, :60], keys[:1, :, :60], values[:1, :, :60])
    assert torch.equal(layer.lse, document.lse)
    assert torch.equal(out[:, :, :60], alone)


def test_none_where_another_attention_runs():
    assert attend(*states(5, earlier=20))[1].lse is None, "not the whole of a causal call"
    assert attend(*states(5, value_dim=32))[1].lse is None, "torch's flash attention has one head size"
    given = states(40)
    out, told = attend(*given)
    assert told.lse is not None
    with sdpa_kernel(SDPBackend.MATH):
        other, without = attend(*given)
    assert without.lse is None
    torch.testing.assert_close(other, out)


@dataclass(frozen=True)
class Watched(POLICIES["h2o"]):
    seen: ClassVar[list[LayerView]] = []

    def score(self, layer):
        self.seen.append(layer)
        return super().score(layer)


def test_a_policy_sums_columns_by_what_the_prefill_told(llama, monkeypatch):
    monkeypatch.setitem(POLICIES, "watched", Watched)
    Watched.seen.clear()
    llama.engine.compress(llama.ids[:300], policy="watched", compression_ratio=0.5)
    assert len(Watched.seen) == llama.model.config.num_hidden_layers
    for layer in Watched.seen:
        expected = lse_of(layer.queries[None] * layer.scaling / SCALE, layer.keys[None])[0]
        torch.testing.assert_close(layer.lse, expected.float(), atol=1e-4, rtol=1e-5)
        by_itself, _ = column_sums(layer.queries, layer.keys, layer.scaling)
        torch.testing.assert_close(layer.column_sums()[0], by_itself, atol=1e-4, rtol=1e-4)
        doubled = replace(layer, lse=layer.lse + math.log(2))  # of a wrong one the sums are wrong: it is used
        torch.testing.assert_close(doubled.column_sums()[0], by_itself / 2, atol=1e-4, rtol=1e-4)
