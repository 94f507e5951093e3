"""Attention and its gradients written out in f64, by numpy: what fp32 programs are compared with.

Of two fp32 results each may be right within a tolerance and both apart by more; against this one only one errs. And
there is nothing to compile.
"""

from typing import Any

import numpy as np


def attention_passes(
    q: Any, k: Any, v: Any, do: Any, *, seen: np.ndarray, slopes: Any = None
) -> list[np.ndarray]:
    """o, dq, dk and dv of [B, T, H, K] and [B, T, G, K]; what no query and no key of `seen` is may hold anything.

    Args:
      seen: [B, T, T], whether a query sees a key.
      slopes: ALiBi's, [H].
    """
    repeats, scale = q.shape[2] // k.shape[2], q.shape[-1] ** -0.5
    asks, answers = seen.any(2)[..., None, None], seen.any(1)[..., None, None]
    q, do = (np.where(asks, x, 0).astype(np.float64) for x in (q, do))
    k, v = (np.repeat(np.where(answers, x, 0), repeats, 2).astype(np.float64) for x in (k, v))
    scores = scale * np.einsum("bthk,bshk->bhts", q, k)
    if slopes is not None:
        place = np.arange(seen.shape[1])
        scores -= np.asarray(slopes, np.float64)[:, None, None] * np.abs(place[:, None] - place)
    scores = np.where(seen[:, None], scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0))
    p = weights / np.maximum(weights.sum(-1, keepdims=True), 1)  # the top one's weight is 1
    dp = np.einsum("bthk,bshk->bhts", do, v)
    ds = scale * p * (dp - (p * dp).sum(-1, keepdims=True))
    dk, dv = np.einsum("bhts,bthk->bshk", ds, q), np.einsum("bhts,bthk->bshk", p, do)
    dk, dv = (x.reshape(*x.shape[:2], -1, repeats, x.shape[3]).sum(3) for x in (dk, dv))
    return [np.einsum("bhts,bshk->bthk", p, v), np.einsum("bhts,bshk->bthk", ds, k), dk, dv]
