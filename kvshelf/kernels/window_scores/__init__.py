"""How much the last rows of a sequence attend to each token of a document.

    score_j = mean or max over rows r and query heads h of a KV head, of softmax_j(scale * q_hr . k), then pooled

Bytes it must move: the keys once, N * 4 bytes a KV head written; on CUDA they are read a second time, mostly from the
L2 cache, rather than keeping `q_heads * R * N` logits. FLOPs: `2 * q_heads * R * N * D` a pass and `q_heads * R * N`
exponentials; CUDA takes two passes. Two launches. Share of the limit on a GPU: not measured.
"""

from __future__ import annotations

from torch import Tensor

from kvshelf.kernels.checks import require, require_states
from kvshelf.kernels.dispatch import implementation
from kvshelf.kernels.window_scores.eager import pooled

__all__ = ["pass_scores", "pooled", "window_attention", "window_scores"]


def window_scores(
    queries: Tensor,
    keys: Tensor,
    scale: float,
    *,
    own_keys: Tensor | None = None,
    reduce: str = "mean",
    kernel: int = 1,
    pooling: str = "avg",
) -> Tensor:
    """The attention of each GQA group's rows to the tokens of a document, reduced over rows and group and then pooled.

    queries: `[q_heads, R, D]`, R >= 1; keys: `[kv_heads, N, D]`. Query head h reads KV head h // (q_heads // kv_heads).
    Without `own_keys` the rows are the document's last R tokens, and each sees the keys up to its own. With `own_keys`
    `[kv_heads, T, D]`, T >= R, they are the last R of T tokens after the document: each sees all of the document and
    the own keys up to its own, which take part in the denominator and have no score. reduce: "mean" or "max". kernel:
    odd, how many neighbours are pooled, with zeros beyond the edges ("avg") or none ("max"). Returns `[kv_heads, N]`
    fp32. Raises `InvalidTensor` for other shapes.
    """
    states = {"queries": queries, "keys": keys} | ({} if own_keys is None else {"own_keys": own_keys})
    _require("window_scores", 3, states)
    require(
        queries.shape[1] >= 1
        and 0 < keys.shape[0] == (keys if own_keys is None else own_keys).shape[0]
        and queries.shape[0] > 0
        and queries.shape[0] % keys.shape[0] == 0
        and kernel >= 1
        and kernel % 2 == 1
        and reduce in ("mean", "max")
        and pooling in ("avg", "max"),
        "window_scores",
        "queries must be [q_heads, R, D], R from 1, and keys [kv_heads, N, D], q_heads a multiple of kv_heads; kernel "
        f"odd (given {kernel}), reduce mean or max (given {reduce}), pooling avg or max (given {pooling})",
        **states,
    )
    form = implementation("window_scores", keys.device)
    scores: Tensor = form.window_scores(queries, keys, scale, own_keys, reduce, kernel, pooling)
    return scores.float()


def pass_scores(queries: Tensor, keys: Tensor, scale: float, own_keys: Tensor) -> Tensor:
    """The largest attention that the last rows of many passes after a document give each of its tokens.

    Each pass sees the document and its own tokens up to the row, but no other pass: `window_scores` with `own_keys` and
    reduce "max", of all passes together. queries: `[P, q_heads, R, D]`, keys: `[kv_heads, N, D]`, own_keys: `[P,
    kv_heads, T, D]`, 1 <= R <= T. Returns `[kv_heads, N]` fp32, zeros without a pass. Raises `InvalidTensor` for other
    shapes. FLOPs: `2 * P * q_heads * R * N * D` and `P * q_heads * R * N` exponentials. No kernel of its own: on CUDA
    it uses torch's operations, 128 rows at a time.
    """
    require_states(
        "pass_scores", {"queries": 4, "keys": 3, "own_keys": 4}, queries=queries, keys=keys, own_keys=own_keys
    )
    require(
        queries.shape[0] == own_keys.shape[0]
        and 0 < keys.shape[0] == own_keys.shape[1]
        and queries.shape[1] > 0
        and queries.shape[1] % keys.shape[0] == 0
        and 1 <= queries.shape[2] <= own_keys.shape[2]
        and queries.shape[3] == keys.shape[2] == own_keys.shape[3],
        "pass_scores",
        "queries must be [P, q_heads, R, D], keys [kv_heads, N, D] and own_keys [P, kv_heads, T, D], R from 1 to T, "
        "q_heads a multiple of kv_heads",
        queries=queries,
        keys=keys,
        own_keys=own_keys,
    )
    scores: Tensor = implementation("window_scores", keys.device).pass_scores(queries, keys, scale, own_keys)
    return scores.float()


def window_attention(queries: Tensor, keys: Tensor, scale: float, own_keys: Tensor | None = None) -> Tensor:
    """Softmax weights of the rows of one GQA group on the tokens of a document, not reduced.

    queries: `[group, R, D]`, keys: `[N, D]`, own_keys: `[T, D]`, all as in `window_scores` for one KV head. Returns
    `[group, R, N]` fp32; rows sum to at most 1. Writing them is the cost, `group * R * N * 4` bytes (8 MiB at 64 rows,
    group 4 and 8k tokens), so this function has no kernel of its own: on CUDA too it uses torch's operations.
    """
    states = {"queries": queries, "keys": keys} | ({} if own_keys is None else {"own_keys": own_keys})
    _require("window_attention", 2, states)
    weights: Tensor = implementation("window_scores", keys.device).window_attention(queries, keys, scale, own_keys)
    return weights.float()


def _require(operation: str, dims: int, states: dict[str, Tensor]) -> None:
    """The rows must be tokens of the document, or of what follows it."""
    require_states(operation, {"queries": 3, "keys": dims, "own_keys": dims}, **states)
    last = states.get("own_keys", states["keys"])
    require(
        all(tensor.shape[-1] == last.shape[-1] for tensor in states.values())
        and states["queries"].shape[1] <= last.shape[-2],
        operation,
        "all must have one head size, and no more rows than own_keys, or keys where there are none",
        **states,
    )
