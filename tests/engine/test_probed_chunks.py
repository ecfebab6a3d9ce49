"""A prefill block by block with a probe behind each block: policies epicache and kvzip with prefill=chunked."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, DynamicCache

from kvshelf.artifact.cache import CompressedCache
from kvshelf.engine.attention.attached import CACHE_ARGUMENT
from kvshelf.engine.engine import Engine
from kvshelf.engine.prefill.chunked import RejudgedLayer
from kvshelf.errors import InvalidRequest, PolicyUnsupported
from kvshelf.methods.policies.epicache import sensitivities
from kvshelf.methods.policies.sharing import floored
from kvshelf.model import calibration
from kvshelf.model.calibration import Calibration, Origin
from kvshelf_bench.models.small import small_model
from tests.amounts import in_turn, pairwise
from tests.engine.asking import ids
from tests.engine.attention.test_latents import OLD
from tests.engine.attention.test_latents import made as with_latents
from tests.engine.attention.test_states import SUPPORTED
from tests.engine.test_chunks import made as with_chunks
from tests.engine.test_windows import made as with_windows

TOKENS, CHUNK, BUDGET, SINK, LEAD = 230, 64, 50, 4, 8
EPISODE = 64
"""Tokens of a pass of epicache without a tokenizer."""
SPANS = (0, 7), (30, 33), (100, 131)
PROTECTED = [at for first, end in SPANS for at in range(first, end)]
"""In a document of as many more tokens: before the sinks, within a block, and over the ends of two."""
RULES = [f"tokens:{first}-{end}" for first, end in SPANS]


def chunked(engine: Engine, document: list[int], policy: str, **changes: Any) -> CompressedCache:
    given = {"sink": SINK, "chunk": CHUNK, "prefill": "chunked", "budget_tokens": BUDGET} | changes
    return engine.compress(document, policy=policy, **given)


class ByHand:
    """The same prefill in float64 with transformers' own cache, which drops nothing: what was let go of is hidden.

    The probe is a pass of its own behind each block, on a copy of the cache. Tokens that are protected are read with
    the others, seen by all that follows, and judged by nothing.
    """

    def __init__(
        self, model: Any, policy: str, across: str, protected: list[int], budgets: list[int] | None = None
    ) -> None:
        self.model, self.policy, self.across = copy.deepcopy(model).double(), policy, across
        config, self.protected = model.config, protected
        self.budgets = budgets or [BUDGET] * config.num_hidden_layers
        self.num_tokens = TOKENS + len(protected)
        self.others = torch.tensor([at for at in range(self.num_tokens) if at not in protected])
        shape = config.num_hidden_layers, config.num_key_value_heads, self.num_tokens
        self.visible = torch.ones(shape, dtype=torch.bool)
        self.scores = torch.zeros(shape, dtype=torch.float64)
        self.past, self.rows = DynamicCache(), {}
        AttentionInterface.register("test_probed", self.attention)
        self.model.set_attn_implementation("test_probed")

    def attention(self, module: Any, query: Any, key: Any, value: Any, _mask: Any, scaling: float, **_: Any) -> Any:
        group, (length, width) = query.shape[1] // key.shape[1], (query.shape[2], key.shape[2])
        logits = query @ key.repeat_interleave(group, 1).transpose(2, 3) * scaling
        shown = torch.ones(length, width, dtype=torch.bool).tril(width - length).expand(logits.shape[1], -1, -1).clone()
        own = min(self.num_tokens, width)
        shown[:, :, :own] &= self.visible[module.layer_idx, :, None, :own].repeat_interleave(group, 0)
        self.rows[module.layer_idx] = logits[0], shown, group
        weights = torch.softmax(logits.masked_fill(~shown, -torch.inf), dim=-1)
        return (weights @ value.repeat_interleave(group, 1)).transpose(1, 2).contiguous(), None

    def forward(self, tokens: list[int], start: int, past: DynamicCache) -> None:
        places = torch.arange(start, start + len(tokens))[None]
        with torch.no_grad():
            self.model(torch.tensor([tokens]), **{CACHE_ARGUMENT: past}, position_ids=places)

    def run(self, document: list[int]) -> ByHand:
        judged, read = [document[at] for at in self.others], 0
        for start in range(0, TOKENS, CHUNK):
            end = min(start + CHUNK, TOKENS)
            behind = [*self.others.tolist(), self.num_tokens][end]
            self.forward(document[read:behind], read, self.past)
            lead = judged[max(0, start - LEAD) : start]
            probe = judged[-EPISODE:] if self.policy == "epicache" else [*lead, *judged[start:end]]
            self.forward(probe, behind, copy.deepcopy(self.past))
            for layer in range(len(self.visible)):
                self.judge(layer, start, end, behind)
            read = behind
        return self

    def judge(self, layer: int, start: int, end: int, behind: int) -> None:
        logits, shown, group = self.rows[layer]
        counted = shown.clone()
        counted[:, :, [at for at in self.protected if at < behind]] = False
        if self.policy == "epicache":  # no column of the pass itself
            counted[:, :, behind:] = False
            judged = self.others[:end]
        else:  # sinks, the block and the pass
            counted[:, :, self.others[SINK:start]] = False
            judged = self.others[start:end]
        weights = torch.softmax(logits.masked_fill(~counted, -torch.inf), dim=-1)
        largest = weights.reshape(-1, group, *weights.shape[1:]).amax(dim=(1, 2))
        self.scores[layer, :, judged] = largest[:, judged]
        heads, read = len(largest), self.others[:end]
        scores = self.scores[layer, :, read].masked_fill(~self.visible[layer, :, read], -1)
        scores[:, :SINK] = torch.inf
        together = scores.reshape(1, -1) if self.across == "layer" else scores
        most = self.budgets[layer] * (heads if self.across == "layer" else 1)
        stays = torch.zeros_like(together, dtype=torch.bool)
        for row, kept in zip(together, stays, strict=True):
            best = row.sort(descending=True, stable=True).indices[:most]
            kept[best] = True
        self.visible[layer, :, read] &= stays.reshape(heads, end)


@pairwise({"protected": [[], PROTECTED], "across": ["layer", "head"], "policy": ["epicache", "kvzip"]})
def test_it_is_the_prefill_by_hand(oracle: Any, policy: str, across: str, protected: list[int]) -> None:
    """Hidden states depend on every choice before them: one wrong entry or position and all later keys are others."""
    document, budget = oracle.ids[: TOKENS + len(protected)], BUDGET + len(protected)
    more: dict[str, Any] = {"across": across, "budget_tokens": budget, "protect": RULES if protected else []}
    cache = chunked(oracle.engine, document, policy, **more)
    by_hand = ByHand(oracle.model, policy, across, protected).run(document)
    assert cache.identity.prefill == f"chunked:chunk={CHUNK},probed"
    for index, record in enumerate(cache.layers):
        assert record.entries == budget * len(record.lengths)
        for head, positions in enumerate(record.positions):
            expected = by_hand.visible[index, head].nonzero().flatten()
            assert positions.tolist() == expected.tolist()
            keys = by_hand.past.layers[index].keys[0, head, expected]
            torch.testing.assert_close(record.plain_heads()[0][head].double(), keys, rtol=1e-3, atol=1e-4)
    if across == "layer" and len(cache.layers[0].lengths) > 1:
        assert any(len(set(record.lengths)) > 1 for record in cache.layers)


def shares_by_hand(similarities: list[float], sharpness: float, total: int, floor: int, cap: int) -> list[int]:
    """Budgets in proportion to the weights of epicache, but at least `floor` and at most `cap`, by bisection."""
    low, high = min(similarities), max(similarities)
    weights = [(1 - (each - low) / (high - low)) ** sharpness for each in similarities]
    least, most = 0.0, 1e9
    for _ in range(200):
        level = (least + most) / 2
        shares = [min(cap, max(floor, level * weight)) for weight in weights]
        least, most = (level, most) if sum(shares) < total else (least, level)
    counts = [int(share + 1e-6) for share in shares]
    for i in sorted(range(len(shares)), key=lambda i: counts[i] - shares[i])[: total - sum(counts)]:
        counts[i] += 1
    return counts


@pytest.fixture
def calibrated(oracle: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How alike the keys of each layer are, in a calibration of the recorded model."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    config, weights = oracle.model.config, oracle.engine.identity.weights
    layers, similarities = config.num_hidden_layers, [0.995, 0.72, 0.91, 0.83]
    similarities = (similarities * layers)[:layers]
    origin = Origin(model="recorded", documents=1, tokens=1, answered=1.0, compression_ratio=0.5)
    found = Calibration(
        weights=weights,
        head_scores=((1.0,) * config.num_attention_heads,) * layers,
        layer_errors=(1 / layers,) * layers,
        key_similarities=tuple(similarities),
        origin=origin,
    )
    path = calibration.paths(weights).heads
    path.parent.mkdir(parents=True)
    calibration.save(found, path)
    return similarities


@in_turn({"across, sharpness": [("layer", 1.1), ("head", 3.0), ("layer", 0.0)], "prefill": ["chunked", "whole"]})
def test_layers_keep_by_how_much_their_keys_change(
    oracle: Any, calibrated: list[float], across: str, sharpness: float, prefill: str
) -> None:
    mean = 2 * BUDGET  # or the layer at the floor keeps no more than those whose weight is 1.0 in fp32
    budgets = shares_by_hand(calibrated, sharpness, mean * len(calibrated), mean // 4, TOKENS)
    assert (len(set(budgets)) > 1) == (sharpness > 0)
    more: dict[str, Any] = {"layers": "sensitivity", "sharpness": sharpness, "across": across, "prefill": prefill}
    cache = chunked(oracle.engine, oracle.ids[:TOKENS], "epicache", budget_tokens=mean, **more)
    assert [record.entries for record in cache.layers] == [each * len(cache.layers[0].lengths) for each in budgets]
    if prefill == "chunked":
        by_hand = ByHand(oracle.model, "epicache", across, [], budgets).run(oracle.ids[:TOKENS])
        for index, record in enumerate(cache.layers):
            for head, positions in enumerate(record.positions):
                assert positions.tolist() == by_hand.visible[index, head].nonzero().flatten().tolist()


@pytest.mark.usefixtures("calibrated")
def test_shares_of_layers_are_computed_once(oracle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not for each layer and chunk: for 80 layers, that takes as long as the chunk's pass on a GPU."""
    shares: list[list[int]] = []

    def counted(*args: Any) -> list[int]:
        shares.append(floored(*args))
        return shares[-1]

    monkeypatch.setattr("kvshelf.methods.policies.epicache.floored", counted)
    sharpness = 2 + len(oracle.model.config.model_type) / 8 + oracle.model.config.num_attention_heads / 100
    more = {"layers": "sensitivity", "sharpness": sharpness}  # of this model alone
    cache = chunked(oracle.engine, oracle.ids[:TOKENS], "epicache", budget_tokens=BUDGET, **more)
    assert [record.entries // len(record.lengths) for record in cache.layers] == shares[0]
    assert len(shares) == 1


@pytest.mark.parametrize(("name", "value"), [("calibration", "nonsense"), ("sharpness", 7.0)])
def test_what_layers_need_is_refused_where_they_are_equal(llama: Any, name: str, value: Any) -> None:
    with pytest.raises(PolicyUnsupported, match=f"{name} says nothing without layers=sensitivity") as refused:
        llama.engine.prepare(llama.ids[:TOKENS], policy="epicache", policy_params={name: value}, budget_tokens=BUDGET)
    assert refused.value.param == f"policy_params.{name}"


def test_layers_that_differ_by_rounding_alone_are_alike() -> None:
    """What documents of one block measure."""
    assert sensitivities([1.0000000013, 0.9999999953, 0.9999999975, 0.9999999923], 1.1) == [1.0] * 4
    assert sensitivities([0.9, 0.8995], 1.0) == [0.0, 1.0]


def test_its_caches_are_of_the_similarities_alone(tiny: Engine) -> None:
    text, params = "A ledger of the harbour. " * 40, {"layers": "sensitivity"}
    job = tiny.prepare(text, policy="epicache", policy_params=params)
    own = job.document.calibration
    assert own is not None
    assert job.identity.policy_params["calibration"] == own.keys_digest
    with pytest.raises(PolicyUnsupported, match="is not this model's"):
        tiny.prepare(text, policy="epicache", policy_params={**params, "calibration": own.digest})


def test_a_calibration_without_similarities_is_refused_and_equal_layers_need_none(
    llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    plain = chunked(llama.engine, llama.ids[:TOKENS], "epicache")
    assert not {"layers", "sharpness", "calibration"} & set(plain.identity.policy_params)
    with pytest.raises(PolicyUnsupported, match="kvshelf calibrate"):
        chunked(llama.engine, llama.ids[:TOKENS], "epicache", layers="sensitivity")
    config, weights = llama.model.config, llama.engine.identity.weights
    layers = config.num_hidden_layers
    origin = Origin(model="recorded", documents=1, tokens=1, answered=1.0, compression_ratio=0.5)
    heads = ((1.0,) * config.num_attention_heads,) * layers
    old = Calibration(weights=weights, head_scores=heads, layer_errors=(1 / layers,) * layers, origin=origin)
    path = calibration.paths(weights).heads
    path.parent.mkdir(parents=True)
    calibration.save(old, path)
    with pytest.raises(PolicyUnsupported, match="no key_similarities") as refused:
        chunked(llama.engine, llama.ids[:TOKENS], "epicache", layers="sensitivity")
    assert refused.value.param == "policy_params.layers"


@pytest.mark.parametrize("protect", [[], ["first:9", "chars:700-801", "chars:2500-2600"]])
@pytest.mark.parametrize("across", ["layer", "head"])
@pytest.mark.parametrize("policy", ["epicache", "kvzip"])
def test_one_block_is_the_whole_document(tiny: Engine, policy: str, across: str, protect: list[str]) -> None:
    """The choice of a pass over the whole document, which no block came before."""
    text = "A ledger of the harbour: the crane was tested, the grain was stored. " * 40
    fields: dict[str, Any] = {"policy": policy, "compression_ratio": 0.8, "across": across, "protect": protect}
    if policy == "epicache":
        fields["probe"] = "Who tested the crane?"
    whole = tiny.compress(text, prefill="whole", **fields)
    block = tiny.compress(text, prefill="chunked", chunk=2048, **fields)
    assert whole.identity.prefill != block.identity.prefill
    for one, other in zip(whole.layers, block.layers, strict=True):
        assert one.offsets == other.offsets
        assert one.entry_positions.equal(other.entry_positions)
        torch.testing.assert_close(one.keys, other.keys, atol=5e-5, rtol=1e-4)
        torch.testing.assert_close(one.importance, other.importance, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("protected", [[], PROTECTED], ids=["", "protect"])
@pytest.mark.parametrize("policy", ["epicache", "kvzip"])
def test_no_layer_holds_more_than_budget_block_and_probe(
    llama: Any, policy: str, protected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[tuple[float, int]] = []
    before = RejudgedLayer.reduce

    def watched(self: RejudgedLayer, attended: Any, chunk: Any) -> None:
        entries = sum(sum(prefix.lengths) for prefix in self.prefix) / attended.keys.shape[1]
        held.append((entries, attended.keys.shape[2]))
        before(self, attended, chunk)

    monkeypatch.setattr(RejudgedLayer, "reduce", watched)
    budget, tokens = BUDGET + len(protected), TOKENS + len(protected)
    more: dict[str, Any] = {"budget_tokens": budget, "protect": RULES if protected else []}
    cache = chunked(llama.engine, llama.ids[:tokens], policy, **more)
    probe = EPISODE if policy == "epicache" else LEAD + CHUNK
    blocks = -(-TOKENS // CHUNK)
    assert len(held) == blocks * len(cache.layers)
    assert max(entries for entries, _ in held) == budget
    assert max(entries + call for entries, call in held) == budget + CHUNK + probe < tokens


def test_equal_requests_give_equal_bytes_and_the_mode_is_part_of_the_identity(llama: Any) -> None:
    one, same, other = (chunked(llama.engine, llama.ids[:TOKENS], "epicache", chunk=n) for n in (64, 64, 100))
    assert one.to_bytes() == same.to_bytes()
    assert one.identity.prefill != other.identity.prefill
    assert CompressedCache.from_bytes(one.to_bytes()).identity == one.identity


def test_what_does_not_go_with_blocks_is_refused_by_name(tiny: Engine) -> None:
    document = ids(200)
    windows = Engine(with_windows("gemma2"), name="gemma2")
    others = [(windows, "sliding window"), (Engine(with_chunks(), name="llama4"), "chunked attention")]
    if SUPPORTED:
        others.append((Engine(small_model("falcon_h1"), name="falcon_h1"), "recurrent states"))
    for engine, what in others:
        for policy in ("epicache", "kvzip"):
            with pytest.raises(PolicyUnsupported, match=what) as refused:
                chunked(engine, document, policy)
            assert refused.value.param == "policy_params.prefill"
    if not OLD:
        latents = Engine(with_latents("deepseek_v2"), name="deepseek_v2")
        with pytest.raises(PolicyUnsupported, match="latents") as refused:
            chunked(latents, document, "epicache")
        assert refused.value.param == "policy_params.prefill"
    with pytest.raises(PolicyUnsupported, match="share one budget") as refused:
        tiny.compress("a " * 300, policy="kvzip", prefill="chunked", across="cache")
    assert refused.value.param == "policy_params.across"
    for given, param in (
        ({"policy": "kvcues", "prefill": "chunked"}, "policy_params.prefill"),
        ({"policy": "ada", "base": "kvzip", "prefill": "chunked"}, "policy_params.prefill"),
        ({"policy": "epicache", "prefill": "none"}, "policy_params.prefill"),
        ({"policy": "epicache", "chunk": 8}, "policy_params.chunk"),
        ({"policy": "epicache", "probe": "a" * 16385}, "policy_params.probe"),
        ({"policy": "epicache", "centroid": "no"}, "policy_params.centroid"),
        ({"policy": "epicache", "centroid": "AAAAAAA="}, "policy_params.centroid"),
    ):
        with pytest.raises(InvalidRequest) as wrong:
            tiny.compress("a " * 300, **given)  # type: ignore[arg-type]
        assert wrong.value.param == param
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        chunked(windows, document, "epicache", prefill="whole", probe="Who?")
