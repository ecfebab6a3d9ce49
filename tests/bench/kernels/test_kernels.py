"""`kvshelf bench kernels`: the bytes and FLOPs it counts, and that each baseline computes what its kernel does."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from kvshelf.errors import InvalidRequest
from kvshelf.kernels import rates
from kvshelf.kernels.rowwise import available
from kvshelf.kernels.select import pack
from kvshelf_bench.cli import app
from kvshelf_bench.kernels import baselines, kernels, products
from kvshelf_bench.kernels.baselines import (
    column_sums_of_whole_weights,
    gather_expanded,
    layer_prefill,
    snapkv_by_expansion,
)
from kvshelf_bench.kernels.cases import PREFILL, Layer, LayerSize, cases

CPU = torch.device("cpu")
SHAPE = LayerSize(q_heads=4, kv_heads=2, head_dim=16, hidden=32, intermediate=48)
LIMITS = kernels.Ceilings(copy_bytes_per_s=1e10, matmul_flops=1e12)


@pytest.fixture
def layer():
    torch.manual_seed(0)
    return Layer(SHAPE, 512, torch.float32, CPU)


def named(layer, name):
    return next(case for case in cases(layer) if case.name == name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_case_runs_and_says_which_limit_binds(dtype):
    rows = list(kernels.kernel_times(CPU, dtype, 512, 1, LIMITS, SHAPE))
    names = [row.name for row in rows]
    assert len(set(names)) == len(names)
    assert rows[0].name == PREFILL
    for row in rows:
        assert row.share == pytest.approx(max(row.nbytes / 1e10, row.flops / 1e12) / row.seconds.median)
        assert row.limit == ("bytes" if row.nbytes / 1e10 > row.flops / 1e12 else "FLOPs")
        assert row.of_prefill == row.seconds.median / rows[0].seconds.median
        assert (row.slower is None) == (row.beside == "")
    beside = {row.name: row for row in rows if row.beside}
    assert {row.beside for row in beside.values()} <= set(names)
    whole = next(row for row in rows if row.name == "column_sums")
    assert beside["column sums in three steps"].slower == pytest.approx(
        beside["column sums in three steps"].seconds.median / whole.seconds.median
    )


def test_the_flops_of_a_prefill_are_those_that_torch_counts(layer):
    """torch does not count the CPU's fused attention, so it counts all weights, half of which are causal."""
    case, attention = named(layer, PREFILL), named(layer, "causal attention")
    with FlopCounterMode(display=False) as projections:
        case.run(*case.make())
    assert case.flops == projections.get_total_flops() + attention.flops
    queries, keys, values = attention.make()
    with FlopCounterMode(display=False) as square:
        torch.softmax(queries @ keys.mT.repeat(2, 1, 1), dim=-1) @ values.repeat(2, 1, 1)
    assert attention.flops == square.get_total_flops() / 2


def test_a_prefill_is_causal(layer):
    hidden, weights = named(layer, PREFILL).make()
    before = layer_prefill(hidden, weights, SHAPE.head_dim)
    hidden[-1] += 1
    after = layer_prefill(hidden, weights, SHAPE.head_dim)
    assert torch.equal(before[:-1], after[:-1])
    assert not torch.allclose(before[-1], after[-1])


def test_kvpresss_flow_keeps_what_ours_keeps():
    """Compared as sets: kvpress orders entries by score. One key, which only the last query sees, beats all others."""
    torch.manual_seed(0)
    layer = Layer(SHAPE, 1024, torch.float32, CPU)  # half of what is kept is the window
    queries, keys, values = layer.window()
    keys[:, -1] *= 30
    ours = named(layer, "snapkv: scores, select, pack").run(queries, keys, values)
    theirs = snapkv_by_expansion(queries, keys, values, layer.kept)
    for packed, gathered in zip(ours, theirs, strict=True):
        for a, b in zip(packed.view(SHAPE.kv_heads, layer.kept, -1), gathered, strict=True):
            rows = ({tuple(row.tolist()) for row in states} for states in (a, b))
            assert len(set.intersection(*rows)) >= layer.kept - 1  # sums in another order may swap the last two


def test_an_expanded_gather_gives_what_pack_gives(layer):
    keys, values, mask = named(layer, "pack").make()
    chosen = mask.nonzero()[:, 1].view(SHAPE.kv_heads, -1)
    packed_keys, packed_values, positions, _ = pack(keys, values, mask)
    assert torch.equal(gather_expanded(keys, chosen).flatten(0, 1), packed_keys)
    assert torch.equal(gather_expanded(values, chosen).flatten(0, 1), packed_values)
    assert torch.equal(positions, chosen.flatten().int())


def test_the_bytes_of_pack_are_those_of_its_tensors(layer):
    case = named(layer, "pack")
    keys, values, mask = case.make()
    packed_keys, packed_values, positions, _ = pack(keys, values, mask)
    assert case.nbytes == 2 * (packed_keys.nbytes + packed_values.nbytes) + mask.nbytes + positions.nbytes


def test_the_bytes_of_row_norms_are_those_of_its_tensors(layer):
    case = named(layer, "row_norms")
    (keys,) = case.make()
    assert case.nbytes == keys.nbytes + case.run(keys).nbytes


def test_the_bytes_of_int4_are_those_of_its_tensors(layer):
    for name in ("quantize_tokens", "quantize_channels"):
        case = named(layer, name)
        (rows,) = case.make()
        # 16 channels are a group of their own, shorter than what is counted.
        stored = sum(part.nbytes for part in case.run(rows))
        assert rows.nbytes < case.nbytes <= rows.nbytes + stored
        dequantized = named(layer, f"de{name}")
        assert dequantized.run(*dequantized.make()).shape == rows.shape


def test_three_steps_over_some_heads_at_a_time_give_the_same_sums(layer, monkeypatch):
    queries, keys = named(layer, "column_sums").make()
    together = column_sums_of_whole_weights(queries, keys, 0.25)
    monkeypatch.setitem(baselines.WHOLE_WEIGHTS_BYTES, "cpu", 1)
    assert torch.allclose(together, column_sums_of_whole_weights(queries, keys, 0.25))


@pytest.mark.parametrize("tokens", [0, 256, 513])
def test_a_length_that_the_cases_cannot_take_is_refused(tokens):
    with pytest.raises(InvalidRequest, match="multiple of 128 from 512"):
        Layer(SHAPE, tokens, torch.float32, CPU)


@pytest.mark.slow
def test_the_kernels_are_measured_without_transformers_and_ray():
    hidden = "import sys; sys.modules.update(dict.fromkeys(('transformers', 'ray', 'safetensors', 'blake3')))"
    program = f"{hidden}; import kvshelf_bench.cli, kvshelf_bench.kernels.kernels as k; print(k.LLAMA_8B.q_heads)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout == "32\n", done.stderr


def test_kernels_command(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "LLAMA_8B", SHAPE)
    for sizes in (rates.BUFFER_BYTES, rates.MATMUL_SIZE):
        monkeypatch.setitem(sizes, "cpu", 256)
    monkeypatch.setitem(products.SHAPES, "smollm2-135m", ((64, 48),))
    report = tmp_path / "kernels.json"
    arguments = ["kernels", "--device", "cpu", "--lengths", "512", "--rounds", "1", "--output", str(report)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    found = json.loads(report.read_text())
    assert found["dtype"] == "float32"
    assert found["copy_bytes_per_s"] > 0
    assert found["rows"][0]["name"] == PREFILL
    measured = [(row["outputs"], row["inputs"], row["rows"]) for row in found.get("products", [])]
    assert measured == [(64, 48, rows) for rows in products.ROWS] * available()
    assert all(
        row["ours"] > 0 and row["bf16"] > 0 and row["int8"] > 0 and row["of_limit"] > 0
        for row in found.get("products", [])
    )
