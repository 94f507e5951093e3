"""A copy of gated linear attention in chunks, in NumPy, and one in JAX, with places for faults."""

from typing import Any

import numpy as np

CHUNK, WIDTH = 4, 5
"""Tokens of a chunk, and columns of x: q and k have one each, v two, the decay one."""

State = tuple[np.ndarray, np.ndarray]
"""The sums [B, 2] and the document [B] behind the last token."""


def start(rows: int) -> State:
    return np.zeros((rows, 2), np.float32), np.zeros(rows, int)


def streams(x: np.ndarray, live: np.ndarray, fault: str) -> Any:
    """Return q, k [B, T], v [B, T, 2] and the logarithms of decays [B, T]; padding holds nothing, and takes no time."""
    masked = x * live[..., None] if fault == "multiplies padding by 0" else np.where(live[..., None], x, 0)
    masked = x if fault == "reads padding" else masked
    log_decay = -np.logaddexp(0, masked[..., 4])
    if fault == "clamps decays":
        log_decay = np.maximum(log_decay, -5)
    if fault != "padding takes time":
        log_decay = np.where(live, log_decay, 0)
    return masked[..., 0], masked[..., 1], masked[..., 2:4], log_decay


def run(
    x: np.ndarray, documents: Any = None, state: Any = None, *, fault: str = ""
) -> tuple[np.ndarray, State]:
    """Return outputs [B, T, 2] and the state."""
    begun = (
        start(len(x))
        if state is None or (fault == "forgets the state of long calls" and x.shape[1] > 1)
        else state
    )
    carry, last = begun if fault == "writes into the state" else (begun[0].copy(), begun[1].copy())
    ids = (
        np.where(last == 0, 1, last)[:, None] + np.zeros(x.shape[:2], int) if documents is None else documents
    )
    ids = np.broadcast_to(ids, x.shape[:2])
    if fault == "leaks between documents":
        ids = np.sign(ids)
    if fault == "resets a token late":
        ids = np.concatenate([ids[:, :1], ids[:, :-1]], 1)
    if fault == "resets a token early":
        ids = np.concatenate([ids[:, 1:], ids[:, -1:]], 1)
    if fault == "keeps the carry at a call's start" and state is not None and documents is not None:
        last = ids[:, 0].copy()
    outputs = np.zeros((*x.shape[:2], 2), np.float32)
    length = x.shape[1] - x.shape[1] % 2 if fault == "drops an odd tail" else x.shape[1]
    parts = streams(x, ids > 0, fault)
    for at in range(0, length, CHUNK):
        here = slice(at, min(at + CHUNK, length))
        for row in range(len(x)):
            chunk = [part[row, here] for part in parts]
            source = 0 if fault == "reads row 0's carry" else row
            y, carry[row], last[row] = run_chunk(*chunk, ids[row, here], carry[source], last[row], fault)
            outputs[row, here] = y
    if fault == "keeps sums of bf16":
        carry = rounded(carry)
    if fault == "returns more of the state":
        carry = np.concatenate([carry, carry[:, :1]], 1)[:, : carry.shape[1] + x.shape[1] % 2]
    return outputs.astype(np.float64 if fault == "returns f64" else np.float32), (carry, last)


def run_chunk(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    log_decay: np.ndarray,
    ids: np.ndarray,
    carry: Any,
    last: Any,
    fault: str,
) -> tuple[np.ndarray, np.ndarray, int]:
    """Return outputs of a chunk, its carry and its document."""
    total = np.cumsum(log_decay)
    ahead = {"reads the next token": 1, "leaves out its own token": -1}.get(fault, 0)
    same = (ids[:, None] == ids[None]) & (ids[None] > 0)
    seen = np.tri(len(q), k=ahead, dtype=bool) & same
    decay = (
        np.exp(np.where(seen | (fault == "takes exp before the mask"), total[:, None] - total[None], -np.inf))
        * seen
    )
    if fault == "takes exp of sums apart":
        decay = np.exp(total)[:, None] * np.exp(-total)[None] * seen
    if fault == "swaps decay and write":
        decay = np.exp(np.where(seen, total[:, None] - total[None] + log_decay[None], -np.inf))
    reads = np.exp(total) * ((ids == last) | (last == 0))
    if fault == "does not decay what it carried":
        reads = 1.0 * ((ids == last) | (last == 0))
    products = decay * k[None]
    if fault == "sums in bf16":
        products = rounded(products)
    y = q[:, None] * (products @ v + reads[:, None] * carry[:2])
    live = np.flatnonzero(ids)
    if not len(live):
        return np.zeros_like(y), carry, last
    end = ids[live[-1]]
    kept = (
        np.exp(total[-1] - total)
        * (ids == end)
        * (1 if fault != "leaves out the last write" else np.arange(len(q)) < live[-1])
    )
    before = np.exp(total[-1]) * carry * (last in (0, end))
    if fault == "does not decay between chunks":
        before = carry * (last in (0, end))
    return y, before + (kept * k) @ v, int(end)


def rounded(x: np.ndarray) -> np.ndarray:
    """Return fp32 numbers cut to bf16."""
    return (np.asarray(x, np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)


def reference(x: np.ndarray) -> np.ndarray:
    """Return the outputs token by token in f64."""
    sums, y = np.zeros((len(x), 2)), []
    for t in range(x.shape[1]):
        sums = sums / (1 + np.exp(x[:, t, 4:])) + x[:, t, 1:2] * x[:, t, 2:4]
        y.append(x[:, t, :1] * sums)
    return np.stack(y, 1)
