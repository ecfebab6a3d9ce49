"""A prefill in which a policy decides again at each chunk, against a prefill by hand in fp64 and each paper's rule in
loops."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import (
    AttentionInterface,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.growth import plain_again
from kvshelf.artifact.records import parts_of
from kvshelf.engine.attention.attached import CACHE_ARGUMENT
from kvshelf.engine.engine import Engine
from kvshelf.engine.prefill.chunked import RejudgedLayer
from kvshelf.errors import CallerError
from kvshelf.kernels.prefix_attention import PackedPrefix, StackedPrefix
from kvshelf.methods.policies import build
from kvshelf.methods.policies.chunked import LayerPast
from kvshelf.methods.policies.gate_file import Gates, gate_path
from kvshelf.model.text import EncodedDocument
from tests.amounts import few, in_turn
from tests.methods.policies.gates import GATED, header, random_gates

TOKENS, CHUNK, BUDGET, SINK, HEAD = 158, 64, 44, 3, 8
SHAPES = [(kind, group) for kind in ("llama", "qwen2") for group in (1, 4, 7)]
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "locret": ("locret", {"sink": SINK, "recent": 5, "stabilizers": 20}),
    "trimkv": ("trimkv", {"sink": SINK}),
    "make_each_token_count": ("make_each_token_count", {"sink": SINK, "floor": 0.2}),
    "attention_gate": ("attention_gate", {"sink": SINK}),
    "kvzip_gate": ("kvzip_gate", {"sink": SINK}),
    "snapkv": ("snapkv", {"window": 6}),
    "tova": ("tova", {}),
    "keydiff": ("keydiff", {}),
    "arkv": ("arkv", {"window": 6}),
    "d2o": ("d2o", {"sink": SINK}),
    "d2o whole layers": ("d2o", {"sink": SINK, "first": 1, "form": "code"}),
}
TOGETHER = ("make_each_token_count", "kvzip_gate", "d2o", "d2o whole layers")
"""Of which all layers are reduced when the last one has read a chunk."""


def small(kind: str, group: int) -> PreTrainedModel:
    """A random model of two KV heads, each with so many query heads."""
    config, model = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}[kind]
    sizes = {"hidden_size": 2 * group * HEAD, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 200}
    heads = {"num_attention_heads": 2 * group, "num_key_value_heads": 2, "head_dim": HEAD}
    torch.manual_seed(group)
    return model(config(**sizes, **heads, initializer_range=(2 * group * HEAD) ** -0.5)).eval().requires_grad_(False)


def gated(engine: Engine, policy: str) -> Gates | None:
    """Random gates of the policy, whose outputs are of the order of 1."""
    if policy not in GATED:
        return None
    made = random_gates(policy, engine.preparer.geometry, seed=3)
    tensors = {
        name: t * (0.2 if name.endswith(("up", "query", "key", "value")) else 1) for name, t in made.tensors.items()
    }
    gates = Gates.of(header(policy, weights=engine.identity.weights), tensors)
    gate_path(engine.identity.weights, policy).write_bytes(gates.to_bytes())
    return gates


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Any:
    monkeypatch.setenv("KVSHELF_GATES", str(tmp_path))
    return tmp_path


def document(count: int = TOKENS) -> list[int]:
    """No token stands twice: in the first layer, gates would say the same of both."""
    return torch.randperm(200, generator=torch.Generator().manual_seed(5))[:count].tolist()


class ByHand:
    """The prefill in float64 with transformers' own cache, which drops nothing: what was let go of is hidden.

    A rule is given all that a layer has but protected tokens, which all that follows sees, and says what stays.
    """

    def __init__(
        self, model: Any, policy: str, params: dict[str, Any], gates: Gates | None, protected: Sequence[int] = ()
    ) -> None:
        judged = [place for place in range(TOKENS) if place not in protected]
        self.ranks = {place: rank for rank, place in enumerate(judged)}
        self.model, self.params, self.gates = copy.deepcopy(model).double(), params, gates
        config = model.config
        self.theta = float(config.rope_parameters["rope_theta"])
        self.group = config.num_attention_heads // config.num_key_value_heads
        self.layers, self.heads = config.num_hidden_layers, config.num_key_value_heads
        self.visible = torch.ones(self.layers, self.heads, TOKENS, dtype=torch.bool)
        self.outputs = torch.zeros(self.layers, self.heads, TOKENS, dtype=torch.float64)
        self.sums = torch.zeros(self.layers, self.heads, TOKENS, dtype=torch.float64)
        self.small: dict[int, Any] = {}  # of the attention gate, the keys and values of each token
        self.shares: list[int] = []
        self.taus: dict[int, float] = {}
        self.claims = [0.0] * self.layers
        self.rule = {"kvzip_gate": self.gate, "make_each_token_count": self.gate}.get(policy) or getattr(self, policy)
        self.policy, self.past, self.states = policy, DynamicCache(), {}
        AttentionInterface.register("test_again", self.attention)
        self.model.set_attn_implementation("test_again")

    def attention(self, module: Any, query: Any, key: Any, value: Any, _mask: Any, scaling: float, **_: Any) -> Any:
        self.states[module.layer_idx] = query[0]
        self.scaling = scaling
        logits = query @ key.repeat_interleave(self.group, 1).transpose(2, 3) * scaling
        length, width = logits.shape[2:]
        shown = torch.ones(length, width, dtype=torch.bool).tril(width - length)
        shown = shown & self.visible[module.layer_idx, :, None, :width].repeat_interleave(self.group, 0)
        weights = torch.softmax(logits.masked_fill(~shown, -torch.inf), dim=-1)
        return (weights @ value.repeat_interleave(self.group, 1)).transpose(1, 2).contiguous(), None

    def run(self, ids: list[int], ends: list[int]) -> ByHand:
        start = 0
        for end in ends:
            places = torch.arange(start, end)[None]
            with torch.no_grad():
                self.model(torch.tensor([ids[start:end]]), **{CACHE_ARGUMENT: self.past}, position_ids=places)
            self.start, self.end, self.ended = start, end, end == len(ids)
            self.chunk = [place for place in range(start, end) if place in self.ranks]
            self.judged = self.ranks[self.chunk[-1]] + 1 if self.chunk else 0
            self.rule()
            start = end
        return self

    # What a rule looks at

    def keys(self, layer: int, head: int) -> Any:
        return self.past.layers[layer].keys[0, head]

    def positions(self, layer: int, head: int) -> list[int]:
        """Places of what is left, the chunk's tokens included."""
        return [j for j in range(self.end) if j in self.ranks and self.visible[layer, head, j]]

    def weights(self, layer: int, head: int, rows: int) -> Any:
        """What the last rows of the chunk give to each token that is left: `[group, rows, n]`."""
        at, keys = self.positions(layer, head), self.keys(layer, head)
        result = torch.zeros(self.group, rows, len(at), dtype=torch.float64)
        for member in range(self.group):
            for row in range(rows):
                place = self.chunk[row - rows]
                query = self.states[layer][head * self.group + member, place - self.start]
                seen = [j for j in at if j <= place]
                powers = (keys[seen] @ query * self.scaling).exp()
                result[member, row, : len(seen)] = powers / powers.sum()
        return result

    def keep(self, layer: int, head: int, scores: dict[int, float], must: set[int], count: int) -> None:
        others = sorted((j for j in scores if j not in must), key=lambda j: (-scores[j], j))
        stays = must | set(others[: max(0, count - len(must))])
        for j in self.positions(layer, head):
            self.visible[layer, head, j] = j in stays

    # Gates

    def read(self) -> None:
        """The outputs of the gates for the chunk's tokens."""
        for layer in range(self.layers):
            gate = {name: t.double() for name, t in self.gates.layer(layer, torch.device("cpu")).items()}
            for place in self.chunk:
                turned = [unrotated(q[place - self.start], place, self.theta) for q in self.states[layer]]
                turned += [unrotated(self.keys(layer, head)[place], place, self.theta) for head in range(self.heads)]
                values = [self.past.layers[layer].values[0, head, place] for head in range(self.heads)]
                row = (torch.cat([*turned, *values]) - gate["mean"]) * gate["scale"]
                if self.policy == "attention_gate":
                    hidden = self.attended(layer, gate, row)
                else:
                    hidden = gate["up"] @ row
                    hidden = hidden / (1 + (-hidden).exp())
                self.outputs[layer, :, place] = gate["down"] @ hidden + gate["bias"]

    def attended(self, layer: int, gate: Any, row: Any) -> Any:
        """The small attention of a token over it and all before it, whether they are left or not."""
        query, key, value = (gate[name] @ row for name in ("query", "key", "value"))
        seen = self.small.setdefault(layer, [])
        seen.append((key, value))
        keys, values = (torch.stack(states) for states in zip(*seen, strict=True))
        powers = (keys @ query / math.sqrt(len(query))).exp()
        return value + powers @ values / powers.sum()

    def locret(self) -> None:
        self.read()
        last = self.params["recent"] if self.ended else self.params["stabilizers"]
        for layer in range(self.layers):
            for head in range(self.heads):
                at = self.positions(layer, head)
                must = {j for j in at if self.ranks[j] < SINK or self.ranks[j] >= self.judged - last}
                self.keep(layer, head, {j: float(self.outputs[layer, head, j]) for j in at}, must, BUDGET)

    def score(self, layer: int, head: int, j: int) -> float:
        output = float(self.outputs[layer, head, j])
        if self.policy in ("trimkv", "make_each_token_count"):  # (T - p) log beta
            return -(self.judged - self.ranks[j]) * math.log1p(math.exp(-output))
        return output

    def trimkv(self) -> None:
        self.read()
        for layer in range(self.layers):
            for head in range(self.heads):
                at = self.positions(layer, head)
                scores = {j: self.score(layer, head, j) for j in at}
                self.keep(layer, head, scores, {j for j in at if self.ranks[j] < SINK}, BUDGET)

    attention_gate = trimkv

    def flags(self) -> None:
        """A token that has been read is dropped at once where its probability is below the threshold."""
        self.read()
        for layer in range(self.layers):
            for head in range(self.heads):
                for j in self.chunk:
                    probability = 1 / (1 + math.exp(-float(self.outputs[layer, head, j])))
                    self.visible[layer, head, j] = self.ranks[j] < SINK or probability >= self.params["threshold"]

    def gate(self) -> None:
        """All heads of all layers share one budget."""
        self.read()
        floor = max(SINK, int(self.params.get("floor", 0) * BUDGET))
        pairs = [(layer, head) for layer in range(self.layers) for head in range(self.heads)]
        own, rest = {}, []
        for layer, head in pairs:
            at = self.positions(layer, head)
            best = sorted(at, key=lambda j: (self.ranks[j] >= SINK, -self.score(layer, head, j), j))
            own[layer, head] = set(best[:floor])
            rest += [(-self.score(layer, head, j), layer, head, j) for j in best[floor:]]
        left = BUDGET * len(pairs) - sum(map(len, own.values()))
        for _, layer, head, j in sorted(rest)[:left]:
            own[layer, head].add(j)
        for layer, head in pairs:
            self.keep(layer, head, {}, own[layer, head], 0)

    # What the end of a chunk attends to

    def snapkv(self) -> None:
        rows = self.params["window"]
        for layer in range(self.layers):
            for head in range(self.heads):
                at, weights = self.positions(layer, head), self.weights(layer, head, rows)
                columns = [float(weights[:, :, index].mean()) for index in range(len(at) - rows)]
                self.keep(layer, head, dict(zip(at, pooled(columns), strict=False)), set(at[-rows:]), BUDGET)

    def tova(self) -> None:
        for layer in range(self.layers):
            at = self.positions(layer, 0)
            mean = sum(self.weights(layer, head, 1).mean(dim=0)[0] for head in range(self.heads)) / self.heads
            for head in range(self.heads):
                self.keep(layer, head, dict(zip(at[:-1], mean.tolist(), strict=False)), {at[-1]}, BUDGET)

    def keydiff(self) -> None:
        for layer in range(self.layers):
            for head in range(self.heads):
                at = self.positions(layer, head)
                keys = {j: self.keys(layer, head)[j] / self.keys(layer, head)[j].norm() for j in at}
                anchor = sum(keys.values()) / len(at)
                self.keep(
                    layer, head, {j: -float(key @ anchor / anchor.norm()) for j, key in keys.items()}, set(), BUDGET
                )

    def arkv(self) -> None:
        rows, policy = self.params["window"], build("arkv", {})
        for layer in range(self.layers):
            entropy = shift = peaks = 0.0
            for head in range(self.heads):
                at, weights = self.positions(layer, head), self.weights(layer, head, rows)
                judged = weights[:, :, : len(at) - rows]
                scores = (judged.mean(dim=1) + policy.gamma * judged.var(dim=1)).mean(dim=0).tolist()
                entropy -= float((judged * (judged + 1e-10).log()).sum())
                shift += float(judged.var(dim=1).sum())
                off = judged - judged.mean(dim=1, keepdim=True)
                peaks += float((off.pow(4).mean(dim=1) / off.pow(2).mean(dim=1).clamp_min(1e-8).pow(2)).sum())
                self.keep(layer, head, dict(zip(at, pooled(scores), strict=False)), set(at[-rows:]), BUDGET)
            self.claims[layer] = entropy ** (1 / policy.tau1) * shift ** (1 / policy.tau2) * peaks ** (1 / policy.tau3)

    # Merging

    def d2o(self) -> None:
        spreads = []
        for layer in range(self.layers):
            columns = []
            for head in range(self.heads):
                at = self.positions(layer, head)
                of_group = self.weights(layer, head, len(self.chunk)).sum(dim=1)  # [group, n]
                columns += list(of_group)
                self.sums[layer, head, at] += of_group.mean(dim=0)
            variances = [float(column.var()) for column in columns]
            low, high = min(variances), max(variances)
            spreads.append(sum((v - low) / (high - low + 1e-6) for v in variances) / len(variances))
        if not self.shares:
            self.shares = self.shared([math.exp(-spread) for spread in spreads])
        for layer, share in enumerate(self.shares):
            self.merge(layer, share)

    def shared(self, claims: list[float]) -> list[int]:
        """The layers' shares of what their sinks leave, rounded to the total: the largest parts go up."""
        first = self.params.get("first", 0)
        paid = BUDGET * self.layers - len(self.ranks) * first - SINK * (self.layers - first)
        exact = [paid * claim / sum(claims[first:]) for claim in claims[first:]]
        counts = [math.floor(share) for share in exact]
        for i in sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])[: paid - sum(counts)]:
            counts[i] += 1
        return [len(self.ranks)] * first + [SINK + count for count in counts]

    def merge(self, layer: int, share: int) -> None:
        recent = min(share // 2, share - SINK)
        cosines: list[dict[int, tuple[float, int]]] = []
        for head in range(self.heads):
            at, keys = self.positions(layer, head), self.keys(layer, head)
            must = {j for j in at if self.ranks[j] < SINK} | set(at[len(at) - recent :])
            self.keep(layer, head, {j: float(self.sums[layer, head, j]) for j in at}, must, share)
            stays = self.positions(layer, head)
            cosines.append({})
            for j in (j for j in at if j not in stays):
                like = (keys[stays] @ keys[j] / keys[stays].norm(dim=1) / keys[j].norm()).tolist()
                cosines[-1][j] = max(like), stays[like.index(max(like))]
        every = [u for of_head in cosines for u, _ in of_head.values()]
        if not every:
            return
        mean = sum(every) / len(every)
        tau = self.taus[layer] = (self.taus[layer] + mean) / 2 if layer in self.taus else mean
        for head, of_head in enumerate(cosines):
            members: dict[int, list[tuple[float, int]]] = {}
            for j, (u, center) in of_head.items():
                of_token = [other[j][0] for other in cosines if j in other]
                if sum(of_token) / len(of_token) >= tau:
                    members.setdefault(center, []).append((u, j))
            for states in (self.past.layers[layer].keys[0, head], self.past.layers[layer].values[0, head]):
                before = states.clone()
                for center, joined in members.items():
                    if self.params.get("form") == "code":
                        total = before[center] + sum(u * before[j] for u, j in joined)
                        states[center] = total / (1 + len(joined))
                    else:
                        total = math.e * before[center] + sum(math.exp(u) * before[j] for u, j in joined)
                        states[center] = total / (math.e + sum(math.exp(u) for u, _ in joined))


def unrotated(x: Any, place: int, theta: float) -> Any:
    """A query or key before RoPE: each pair of channels turned back by its angle."""
    half = len(x) // 2
    angles = place * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    first, second = x[:half], x[half:]
    return torch.cat([first * angles.cos() + second * angles.sin(), second * angles.cos() - first * angles.sin()])


def pooled(columns: list[float]) -> list[float]:
    """Means over five neighbours, zeros beyond the edges."""
    return [sum(columns[max(0, i - 2) : i + 3]) / 5 for i in range(len(columns))]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(small("qwen2", 4))


def compressed(engine: Engine, name: str, **changes: Any) -> CompressedCache:
    policy, params = SETTINGS[name]
    gated(engine, policy)
    options = {"prefill": "chunked", "chunk": CHUNK, "budget_tokens": BUDGET} | params | changes
    return engine.compress(document(), policy=policy, **options)


def require_same(cache: CompressedCache, by_hand: ByHand) -> None:
    """The same entries stayed, with the same keys and values."""
    for index, record in enumerate(cache.layers):
        for head, ((keys, values), positions) in enumerate(zip(record.heads(), record.positions, strict=True)):
            assert positions.tolist() == by_hand.visible[index, head].nonzero()[:, 0].tolist(), (index, head)
            states = by_hand.past.layers[index]
            for ours, expected in ((keys, states.keys), (values, states.values)):
                torch.testing.assert_close(ours.double(), expected[0, head, positions.long()], rtol=1e-3, atol=1e-3)


@in_turn({"name": [*SETTINGS], "kind, group": SHAPES})
def test_it_is_the_rule_of_the_paper_at_each_chunk(
    name: str, kind: str, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden states depend on every choice before them: one wrong entry or position and all later keys are others."""
    policy, params = SETTINGS[name]
    if "first" in params:  # the mean of all layers, of which one has the whole document
        monkeypatch.setitem(globals(), "BUDGET", BUDGET * 3)
    engine = Engine(small(kind, group))
    gates = gated(engine, policy)
    cache = compressed(engine, name, budget_tokens=BUDGET)
    by_hand = ByHand(engine.model, policy, params, gates).run(document(), [64, 128, TOKENS])
    assert cache.identity.prefill == f"chunked:chunk={CHUNK}"
    assert sum(record.entries for record in cache.layers) == BUDGET * 2 * len(cache.layers)
    require_same(cache, by_hand)
    if policy == "arkv":
        parts = [claim / max(by_hand.claims) for claim in by_hand.claims]
        window = params["window"]
        assert [record.precise for record in cache.layers] == [
            (window + round(part * (BUDGET - window)),) * 2 for part in parts
        ]


@in_turn({"kind, group": SHAPES, "protect": [None, (70, 75)]})
def test_flags_hide_a_token_from_all_behind_it(kind: str, group: int, protect: tuple[int, int] | None) -> None:
    """By hand each token runs alone, and here 64 together: whether it stays is known before any other sees it."""
    engine = Engine(small(kind, group))
    gates, params = gated(engine, "attention_gate"), {"sink": SINK, "threshold": 0.5}
    said = {} if protect is None else {"protect": [f"tokens:{protect[0]}-{protect[1]}"]}
    cache = engine.compress(document(), policy="attention_gate", prefill="chunked", chunk=CHUNK, **params, **said)
    places = range(*protect) if protect else ()
    by_hand = ByHand(engine.model, "attention_gate", params, gates, places)
    by_hand.rule = lambda: by_hand.chunk and by_hand.flags()
    require_same(cache, by_hand.run(document(), list(range(1, TOKENS + 1))))
    lengths = [length for record in cache.layers for length in record.lengths]
    assert min(lengths) < TOKENS // 2 < max(lengths) < TOKENS, lengths


def test_flags_of_a_document_that_is_read_whole_drop_the_same_in_the_first_layer(engine: Engine) -> None:
    """There they are of what embeddings say, which no earlier choice changes; no token is hidden from another."""
    gated(engine, "attention_gate")
    params = {"policy": "attention_gate", "sink": SINK, "threshold": 0.5}
    whole, chunked = (engine.compress(document(), prefill=prefill, **params) for prefill in ("whole", "chunked"))
    first, *others = zip(whole.layers, chunked.layers, strict=True)
    assert [own.tolist() for own in first[0].positions] == [own.tolist() for own in first[1].positions]
    assert not torch.allclose(others[0][0].keys[:20], others[0][1].keys[:20])
    kept_all = engine.compress(document(), prefill="chunked", **{**params, "threshold": 0.0})
    assert {record.lengths[0] for record in kept_all.layers} == {TOKENS}
    with pytest.raises(CallerError, match="'attention_gate' has its size from its parameters"):
        engine.compress(document(), budget_tokens=BUDGET, **params)


@pytest.mark.parametrize("policy", ["ada", "fair"])
def test_who_shares_a_budget_refuses_a_threshold(policy: str, engine: Engine) -> None:
    gated(engine, "attention_gate")
    params = {"policy": policy, "base": "attention_gate", **({"by": "tokens:0-20"} if policy == "fair" else {})}
    with pytest.raises(CallerError, match=f"{policy} shares a budget .* 'attention_gate' \\(threshold\\)"):
        engine.compress(document(), threshold=0.5, **params)
    assert engine.compress(document(), budget_tokens=BUDGET, **params).kept_tokens == BUDGET


def test_the_last_chunk_has_the_rows_of_the_window(engine: Engine) -> None:
    """Of 132 tokens in chunks of 64 the last would have 4: the one before leaves it as many as it needs."""
    job = engine.prepare(
        document(132),
        policy="snapkv",
        budget_tokens=BUDGET,
        policy_params={"prefill": "chunked", "chunk": 64, "window": 6},
    )
    assert job.absorber is not None
    assert job.absorber.chunks == [64, 62, 6]
    by_hand = ByHand(engine.model, "snapkv", {"window": 6}, None).run(document(132), [64, 126, 132])
    for index, record in enumerate(engine.run(job).cache.layers):
        for head, positions in enumerate(record.positions):
            assert positions.tolist() == by_hand.visible[index, head, :132].nonzero()[:, 0].tolist()


def alive() -> int:
    """Bytes of all that layers have of a document, and of what they had and somebody still refers to."""
    objects = gc.get_objects()
    prefixes = [prefix for prefix in objects if type(prefix) in (StackedPrefix, PackedPrefix)]
    pasts = [past for past in objects if type(past) is LayerPast]
    records = [past.record for past in pasts]
    tensors = [tensor for prefix in prefixes for tensor in (prefix.keys, prefix.values)]
    tensors += [rows for record in records for rows in (*record.rows, record.entry_positions, record.importance)]
    tensors += [rows for past in pasts for rows in (*past.columns.values(), past.note)]
    storages = [tensor.untyped_storage() for tensor in tensors if isinstance(tensor, torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.usefixtures("frozen")
@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "d2o whole layers"])
def test_no_more_is_in_memory_than_the_budget_and_a_chunk(
    engine: Engine, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bytes, whenever a layer has read a chunk or was cut, and in tokens that a layer attends to."""
    memory, attended, stays, widths = [], [], [], [0]
    policy, reduce = type(build(SETTINGS[name][0], {})), RejudgedLayer.reduce
    take, cut = policy.take, policy.cut

    def measured_take(self: Any, past: LayerPast, chunk: Any) -> LayerPast:
        result = take(self, past, chunk)
        memory.append(alive())
        if isinstance(result.note, torch.Tensor):  # of the attention gate, the key and value of each token
            widths.append(result.note[0].numel())
        return result

    def measured_cut(self: Any, past: LayerPast, counts: Any) -> LayerPast:
        result = cut(self, past, counts)
        memory.append(alive())
        stays.append(result.record.entries / 2)
        return result

    def watched(self: RejudgedLayer, layer: Any, chunk: Any) -> None:
        attended.append(sum(sum(prefix.lengths) for prefix in self.prefix) / 2 + self.keys.shape[2])
        reduce(self, layer, chunk)

    monkeypatch.setattr(policy, "take", measured_take)
    monkeypatch.setattr(policy, "cut", measured_cut)
    monkeypatch.setattr(RejudgedLayer, "reduce", watched)
    layers, row = len(compressed(engine, name).layers), 2 * (2 * HEAD * 4 + 3 * 4)  # key, value, position, two numbers
    together = [sum(attended[first : first + layers]) for first in range(0, len(attended), layers)]
    notes = (layers + 1) * TOKENS * max(widths) * 4  # one layer has its note of before and the new one
    if name in TOGETHER:  # all layers have their chunk, and a layer may have more than others
        assert max(memory) <= (layers * (BUDGET + CHUNK) + max(stays)) * row
        assert max(together) == layers * (BUDGET + CHUNK)
    else:  # one layer has what it kept before, that and the chunk joined, and what it will keep
        assert max(memory) <= (layers * BUDGET + BUDGET + CHUNK + BUDGET) * row + notes
        assert max(attended) == BUDGET + CHUNK < TOKENS


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "d2o whole layers"])
def test_a_budget_of_everything_is_the_full_cache(engine: Engine, name: str) -> None:
    whole, full = compressed(engine, name, budget_tokens=TOKENS), engine.compress(document(), policy="full")
    assert whole.identity.prefill == "whole"
    for one, other in zip(whole.layers, full.layers, strict=True):
        assert torch.equal(one.keys, other.keys)
        assert torch.equal(one.values, other.values)
    more = {"keep_scores": True} if name in GOING_ON else {"protect": ["tokens:2-6"]}
    assert compressed(engine, name, budget_tokens=TOKENS, **more).identity.prefill == "whole"


@pytest.mark.parametrize("name", few(5, SETTINGS))
def test_protected_tokens_stay_and_are_judged_by_nothing(
    engine: Engine, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, params = SETTINGS[name]
    if "first" in params:
        monkeypatch.setitem(globals(), "BUDGET", BUDGET * 3)
    cache = compressed(engine, name, protect=["tokens:10-14", "tokens:60-70"], budget_tokens=BUDGET + 14)
    spans = [*range(10, 14), *range(60, 70)]
    by_hand = ByHand(engine.model, policy, params, gated(engine, policy), spans).run(document(), [78, 142, TOKENS])
    assert by_hand.visible[:, :, spans].all()
    require_same(cache, by_hand)


def test_what_is_of_chunks_is_in_no_id_of_a_cache_that_is_read_whole(engine: Engine) -> None:
    for name in SETTINGS:
        gated(engine, SETTINGS[name][0])
        job = engine.prepare(document(), policy=SETTINGS[name][0], budget_tokens=BUDGET * 2)
        assert not {"prefill", "chunk", "stabilizers"} & {*job.identity.policy_params}


@pytest.mark.parametrize(
    ("policy", "params", "param"),
    [
        ("snapkv", {"chunk": 64}, "chunk"),
        ("snapkv", {"prefill": "chunked", "chunk": 64, "window": 33}, "window"),
        ("snapkv", {"prefill": "chunked", "probe": ""}, "probe"),
        ("snapkv", {"prefill": "chunked", "chunk": 63}, "chunk"),
        ("locret", {"stabilizers": 8}, "stabilizers"),
        ("locret", {"prefill": "chunked", "stabilizers": BUDGET}, "stabilizers"),
        ("d2o", {"prefill": "chunked", "store": "slots"}, "store"),
        ("pyramidkv", {"prefill": "chunked", "beta": 3}, "prefill"),
        ("headkv", {"prefill": "chunked"}, "prefill"),
        ("h2o", {"prefill": "chunked"}, "prefill"),
        ("ada", {"prefill": "chunked"}, "prefill"),
    ],
)
def test_bad_input_is_refused_by_name(engine: Engine, policy: str, params: dict[str, Any], param: str) -> None:
    gated(engine, policy)
    with pytest.raises(CallerError) as refused:
        engine.prepare(document(), policy=policy, budget_tokens=BUDGET, policy_params=params)
    assert refused.value.param == f"policy_params.{param}"


def test_a_question_is_refused_with_the_way_to_ask_it(tiny: Engine) -> None:
    for policy in ("snapkv", "tova", "arkv"):
        with pytest.raises(CallerError, match="with prefill=whole") as refused:
            tiny.prepare(
                "The lighthouse of Brennick. " * 40,
                policy=policy,
                budget_tokens=BUDGET,
                expected_questions=["Where is it?"],
                policy_params={"prefill": "chunked", "chunk": CHUNK},
            )
        assert refused.value.param == "expected_questions"


@pytest.mark.parametrize(
    ("budget", "chunk", "stabilizers"), [(6000, 3072, 2500), (6000, 2048, 1666), (3000, 4096, 1250)]
)
def test_locret_leaves_the_authors_part_of_a_budget_and_a_chunk_alone(
    engine: Engine, budget: int, chunk: int, stabilizers: int
) -> None:
    """2,500 of 6,000 entries, and of 3,072 tokens: in every chunk some tokens compete when it has been read."""
    gated(engine, "locret")
    params_ = {"prefill": "chunked", "chunk": chunk, "sink": 0}
    job = engine.prepare(document() * 50, policy="locret", budget_tokens=budget, policy_params=params_)
    assert job.identity.policy_params.get("stabilizers", 2500) == stabilizers


# Turns: a prefill that stopped goes on

GOING_ON = ("trimkv", "make_each_token_count")
CHUNKED = {"prefill": "chunked", "chunk": CHUNK}


def in_turns(engine: Engine, name: str, ends: Sequence[int], **changes: Any) -> CompressedCache:
    """A cache of the first tokens, and what follows appended turn by turn, from one blob to the next."""
    policy, params = SETTINGS[name]
    gated(engine, policy)
    size = {"budget_tokens": BUDGET} | changes
    options = {"prefill": "chunked", "chunk": CHUNK, "keep_scores": True} | params
    cache = engine.compress(document()[: ends[0]], policy=policy, **options, **size)
    for start, end in pairwise(ends):
        before = cache.to_bytes()
        grown = engine.extend(cache, document()[start:end], prefill="chunked", **size)
        assert cache.to_bytes() == before, "the parent stays as it is"
        assert grown.identity.parent == cache.identity.as_parent("none")
        cache = CompressedCache.from_bytes(grown.to_bytes())
    return cache


@pytest.mark.parametrize("budget", [BUDGET, 100])
@in_turn({"name": GOING_ON, "kind, group": SHAPES})
def test_turns_are_one_prefill_with_the_same_chunks(name: str, kind: str, group: int, budget: int) -> None:
    """To the last bit. A first turn that does not fill the budget is read in one pass, which rounds its rates."""
    engine = Engine(small(kind, group))
    turns = in_turns(engine, name, [64, 128, TOKENS], budget_tokens=budget)
    once = compressed(engine, name, keep_scores=True, budget_tokens=budget)
    assert turns.identity.prefill == once.identity.prefill == f"chunked:chunk={CHUNK}"
    assert (turns.num_tokens, turns.next_position, turns.kept_tokens) == (TOKENS, TOKENS, budget)
    assert turns.identity.budget_tokens == budget
    for own, other in zip(turns.layers, once.layers, strict=True):
        assert own.offsets == other.offsets
        for name in ("keys", "values", "entry_positions"):
            assert torch.equal(getattr(own, name), getattr(other, name))
        rounding = 0 if budget < CHUNK else 1e-6
        torch.testing.assert_close(own.columns["rate"], other.columns["rate"], rtol=rounding, atol=0)


@pytest.mark.parametrize("name", GOING_ON)
def test_what_the_template_wrote_stays_over_turns(engine: Engine, name: str) -> None:
    """No append knows how many tokens these were: their rates say that they never fade."""
    gated(engine, name)
    params = SETTINGS[name][1] | CHUNKED | {"keep_scores": True, "sink": 0}
    options = {"policy": name, "budget_tokens": BUDGET, "policy_params": params}
    written = EncodedDocument(document(), 9, "chat", "document")
    once = engine.run(engine.prepare(written, **options)).cache
    cache = engine.run(engine.prepare(replace(written, token_ids=document()[:64]), **options)).cache
    cache = engine.extend(cache, document()[64:], prefill="chunked", budget_tokens=BUDGET)
    for own, other in zip(cache.layers, once.layers, strict=True):
        assert all(positions[:9].tolist() == list(range(9)) for positions in own.positions)
        assert torch.equal(own.entry_positions, other.entry_positions)
        assert torch.equal(own.keys, other.keys)
        assert torch.equal(own.columns["rate"], other.columns["rate"])


@in_turn({"name": GOING_ON, "kind, group": SHAPES})
def test_turns_compete_with_all_before_them(name: str, kind: str, group: int) -> None:
    """By hand in fp64, in turns that end within chunks; the last has more than one."""
    engine, ends = Engine(small(kind, group)), [50, 81, 90, TOKENS]
    policy, params = SETTINGS[name]
    cache = in_turns(engine, name, ends)
    by_hand = ByHand(engine.model, policy, params, gated(engine, policy)).run(document(), [50, 81, 90, 154, TOKENS])
    require_same(cache, by_hand)
    assert min(int(of_head.min()) for record in cache.layers for of_head in record.positions) == 0
    assert sum(record.entries for record in cache.layers) == BUDGET * 2 * len(cache.layers)
    kept = [int((of_head < ends[0]).sum()) for record in cache.layers for of_head in record.positions]
    assert sum(kept) < sum(BUDGET for _ in kept), "later turns took the place of entries of the first"


def test_a_ratio_is_of_everything_that_was_read(engine: Engine) -> None:
    cache = in_turns(engine, "make_each_token_count", [64, 100], budget_tokens=None, compression_ratio=0.5)
    assert (cache.kept_tokens, cache.identity.budget_tokens) == (50, 50)
    by_default = engine.extend(cache, document()[100:], prefill="chunked", chunk=128)
    assert (by_default.kept_tokens, by_default.identity.compression_ratio) == (TOKENS // 2, 0.5)
    assert by_default.identity.prefill == "chunked:chunk=128"
    larger = engine.extend(cache, document()[100:], prefill="chunked", compression_ratio=0.1)
    there = 50 + TOKENS - 100
    assert (larger.kept_tokens, larger.identity.budget_tokens) == (there, there), "what went does not come back"


@pytest.mark.parametrize("codec", ["int8", "int4", "lossless"])
def test_coded_entries_are_read_as_they_decode(engine: Engine, codec: str) -> None:
    name, more = "make_each_token_count", {"prefill": "chunked", "budget_tokens": BUDGET}
    plain = in_turns(engine, name, [100])
    coded = engine.encoded(plain, codec)
    grown = engine.extend(coded, document()[100:], **more)
    assert grown.codec == codec
    assert CompressedCache.from_bytes(grown.to_bytes()).to_bytes() == grown.to_bytes()
    decoded = replace(plain, layers=tuple(plain_again(layer, ()) for layer in engine.decoded(coded).layers))
    expected = engine.encoded(engine.extend(decoded, document()[100:], **more), codec)
    for own, other in zip(engine.decoded(grown).layers, engine.decoded(expected).layers, strict=True):
        for one, another in zip(parts_of(own), parts_of(other), strict=True):
            assert torch.equal(one.columns["rate"], another.columns["rate"])
            assert torch.equal(one.entry_positions, another.entry_positions)
            for of_one, of_another in zip(one.plain_heads(), another.plain_heads(), strict=True):
                assert all(map(torch.equal, of_one, of_another))


@pytest.mark.parametrize(
    ("policy", "params", "changes", "param"),
    [
        ("trimkv", {"keep_scores": True, "prefill": "whole", "chunk": None}, {}, "policy_params.prefill"),
        ("trimkv", {}, {}, "policy_params.prefill"),
        ("trimkv", {"keep_scores": True}, {"policy": "make_each_token_count"}, "policy_params.prefill"),
        ("trimkv", {"keep_scores": True}, {"policy_params": {"sink": 2}}, "policy_params.prefill"),
        ("trimkv", {"keep_scores": True}, {"policy_params": {"keep_scores": False}}, "policy_params.prefill"),
        ("trimkv", {"keep_scores": True}, {"protect": ["tokens:2-6"]}, "policy_params.prefill"),
        ("trimkv", {"keep_scores": True, "protect": ["tokens:2-6"]}, {}, "policy_params.prefill"),
        ("d2o", {"keep_scores": True}, {}, "policy_params.prefill"),
        ("locret", {}, {}, "policy_params.prefill"),
        ("lagkv", {"chunk": None, "lag": 16}, {}, "policy_params.prefill"),
        ("full", {"chunk": None, "prefill": None, "budget_tokens": None}, {}, "policy_params.prefill"),
    ],
)
def test_what_cannot_go_on_is_refused_before_any_work(
    engine: Engine, policy: str, params: dict[str, Any], changes: dict[str, Any], param: str
) -> None:
    for name in ("trimkv", "make_each_token_count", "locret"):
        gated(engine, name)
    options = {"budget_tokens": BUDGET} | CHUNKED | params
    cache = engine.compress(document()[:100], policy=policy, **{k: v for k, v in options.items() if v is not None})
    more = {"budget_tokens": BUDGET} if policy != "full" else {"policy": "trimkv"}
    changes = more | changes | {"policy_params": {"prefill": "chunked"} | changes.get("policy_params", {})}
    with pytest.raises(CallerError) as refused:
        engine.prepare_append(cache, document()[100:], **changes)
    assert refused.value.param == param


def test_what_was_appended_by_itself_is_no_prefill_that_stopped(engine: Engine) -> None:
    cache = in_turns(engine, "trimkv", [64])
    apart = engine.extend(cache, document()[64:100], budget_tokens=20)
    assert apart.kept_tokens == BUDGET + 20
    with pytest.raises(CallerError, match="read 'appended'"):
        engine.prepare_append(apart, document()[100:], policy_params=CHUNKED)
