"""The time that compression adds to its prefill, policy by policy, compared with kvpress."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from kvshelf.kernels.rates import Cost, cost
from kvshelf_bench.measure import Spread, interleaved, ratios, timed
from kvshelf_bench.peers.peer import Peer
from kvshelf_bench.speed.subject import Subject

ONE_PASS = (
    "streaming_llm", "knorm", "keydiff", "tova", "snapkv", "pyramidkv", "chunkkv", "lagkv", "expected_attention", "h2o",
    "ems",
)  # fmt: skip
"""The policies without a forward pass of their own."""


@dataclass(frozen=True)
class Hooked:
    """One prefill that compresses. total: the whole call; hook_s: the wall time that compressing took."""

    total: Cost
    hook_s: float

    @property
    def prefill_s(self) -> float:
        return self.total.wall_s - self.hook_s


@dataclass(frozen=True)
class CompressionCost:
    """Seconds and their ratios, each taken within a round.

    plain_s: a prefill of the same tokens by the model alone. hook_s: the policy's part of `Engine.run`; share: hook_s
    over the rest of the same run. whole, whole_wall: `Engine.prepare` and `Engine.run` over the plain prefill. peer_s:
    kvpress's hook for the same method; peer_share: peer_s over the rest of its run; beside_peer: our hook over
    kvpress's. None where kvpress was not run.
    """

    policy: str
    tokens: int
    removed: float
    plain_s: Spread
    hook_s: Spread
    share: Spread
    whole: Spread
    whole_wall: Spread
    peer_s: Spread | None
    peer_share: Spread | None
    beside_peer: Spread | None


@dataclass(frozen=True)
class CompressionCosts:
    """The rows of one length. `same`: the ratio of two plain prefills in one round; its range is noise."""

    tokens: int
    same: Spread
    rows: list[CompressionCost]


def compression_costs(
    subject: Subject, peer: Peer | None, tokens: int, rounds: int, policies: Sequence[str], removed: float
) -> CompressionCosts:
    """Every policy at `removed`, interleaved with the plain model and, where kvpress has the method, with kvpress."""
    ids = subject.tokens(tokens, seed=1)
    variants: dict[tuple[str, str], Callable[[], Hooked]] = {}
    variants["plain", "first"] = variants["plain", "second"] = lambda: Hooked(plain_prefill(subject, ids), 0.0)
    for policy in policies:
        variants["ours", policy] = partial(compress, subject, ids, policy, removed)
        if peer is not None and policy in peer.ready["timed"]:
            variants["peer", policy] = partial(_compress_by, peer, ids, policy, removed)
    measured = interleaved(variants, rounds)
    plain, again = measured["plain", "first"], measured["plain", "second"]
    rows = [
        _row(policy, tokens, removed, plain, measured["ours", policy], measured.get(("peer", policy)))
        for policy in policies
    ]
    return CompressionCosts(tokens, ratios(_totals(again), _totals(plain)), rows)


def plain_prefill(subject: Subject, ids: Sequence[int]) -> Cost:
    """The model under its own attention, keeping its cache, as without a shelf."""
    model = subject.engine.model
    input_ids = torch.tensor([ids], device=model.device)
    with torch.no_grad():
        return cost(lambda: model(input_ids=input_ids, use_cache=True, logits_to_keep=1), subject.device)


def compress(subject: Subject, ids: Sequence[int], policy: str, removed: float) -> Hooked:
    """Compress a document of token ids; `Compression.compress_s` is the policy's part of it."""
    prepare = partial(subject.engine.prepare, ids, policy=policy, compression_ratio=removed)
    compression, total = timed(lambda: subject.engine.run(prepare()), subject.device)
    return Hooked(total, compression.compress_s)


def _compress_by(peer: Peer, ids: Sequence[int], policy: str, removed: float) -> Hooked:
    answer = peer.ask(method=policy, removed=removed, token_ids=list(ids))
    return Hooked(Cost(answer["total_s"], answer["wall_s"]), answer["hook_s"])


def _row(
    policy: str, tokens: int, removed: float, plain: list[Hooked], hooked: list[Hooked], peer: list[Hooked] | None
) -> CompressionCost:
    plain_s, hook_s = _totals(plain), [run.hook_s for run in hooked]
    peer_s = [run.hook_s for run in peer] if peer is not None else None
    return CompressionCost(
        policy=policy,
        tokens=tokens,
        removed=removed,
        plain_s=Spread.of(plain_s),
        hook_s=Spread.of(hook_s),
        share=_share(hooked),
        whole=ratios(_totals(hooked), plain_s),
        whole_wall=ratios([run.total.wall_s for run in hooked], [run.total.wall_s for run in plain]),
        peer_s=Spread.of(peer_s) if peer_s is not None else None,
        peer_share=_share(peer) if peer is not None else None,
        beside_peer=ratios(hook_s, peer_s) if peer_s is not None else None,
    )


def _totals(runs: list[Hooked]) -> list[float]:
    return [run.total.seconds for run in runs]


def _share(runs: list[Hooked]) -> Spread:
    return ratios([run.hook_s for run in runs], [run.prefill_s for run in runs])
