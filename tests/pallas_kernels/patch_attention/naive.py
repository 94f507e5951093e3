"""Both directions written out, one byte or patch at a time, in f64."""

import numpy as np


def _softmax_sum(scores: np.ndarray, values: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max())
    return weights @ values / weights.sum()


def pool(q: np.ndarray, k: np.ndarray, v: np.ndarray, patch_ids: np.ndarray) -> np.ndarray:
    out = np.zeros(q.shape)
    for b, n, p, h in np.ndindex(q.shape[:4]):
        own = np.flatnonzero(patch_ids[b, n] == p)
        if own.size:
            scores = k[b, n, own, h] @ q[b, n, p, h] / np.sqrt(q.shape[-1])
            out[b, n, p, h] = _softmax_sum(scores, v[b, n, own, h])
    return out


def lookup(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    latest: np.ndarray,
    valid: np.ndarray,
    bias: np.ndarray,
) -> np.ndarray:
    out = np.zeros(q.shape)
    for b, n, s, h in np.ndindex(q.shape[:4]):
        back = [(i, latest[b, n, s] - i) for i in range(bias.shape[1])]
        back = [(i, m) for i, m in back if m >= 0 and valid[b, n, m]]
        if back:
            scores = [k[b, n, m, h] @ q[b, n, s, h] / np.sqrt(q.shape[-1]) + bias[h, i] for i, m in back]
            out[b, n, s, h] = _softmax_sum(np.array(scores), v[b, n, [m for _, m in back], h])
    return out
