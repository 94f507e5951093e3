"""Logits for a chunk of tokens at a time, made again in the backward pass: none are kept.

Saved are the inputs and one or two numbers a token. With z the logits and p = softmax(z), the backward pass needs

    d(cross-entropy) / dz_v = p_v - [v = target]        d(entropy) / dz_v = -p_v (log p_v + entropy)

which each chunk multiplies with the cotangents and sends through two matmuls, in x's dtype, summed in fp32.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels._compat import vary_alike
from pallas_kernels._own_gradient import OwnGradient

TOKENS = 131_072
"""Tokens whose logits exist at a time: 34 MB of fp32 at 260 ids."""


def cross_entropy(
    x: Float[Array, "*S T D"],
    head: Float[Array, "D V"],
    targets: Int[Array, "*S T"],
    *,
    tokens: int = TOKENS,
) -> Float[Array, "*S T"]:
    """Compute `cross_entropy`; logits of about `tokens` tokens exist at a time."""
    rows = _as_rows(x)
    rows, head, flat = vary_alike(rows, head, targets.reshape(rows.shape[:2]))
    return _cross_entropy(_chunk(rows, tokens), rows, head, flat).reshape(targets.shape)


def entropy(
    x: Float[Array, "*S T D"], head: Float[Array, "D V"], *, tokens: int = TOKENS
) -> Float[Array, "*S T"]:
    """Compute `entropy`; logits of about `tokens` tokens exist at a time."""
    rows, head = vary_alike(_as_rows(x), head)
    return _entropy(_chunk(rows, tokens), rows, head).reshape(x.shape[:-1])


def _cross_entropy_forward(
    chunk: int, x: Array, head: Array, targets: Array
) -> tuple[Array, tuple[Array, ...]]:
    def of_chunk(x: Array, targets: Array) -> tuple[Array, Array]:
        logits = _logits(x, head)
        total = jax.nn.logsumexp(logits, -1)
        return total - jnp.sum(jnp.where(_is_target(logits, targets), logits, 0), -1), total

    loss, total = _by_chunks(of_chunk, chunk, x, targets)
    return loss, (x, head, targets, total)


def _cross_entropy_backward(chunk: int, saved: tuple[Array, ...], g: Array) -> tuple[Array, Array, None]:
    x, head, targets, total = saved

    def slope(logits: Array, targets: Array, total: Array) -> Array:
        return jnp.exp(logits - total[..., None]) - _is_target(logits, targets).astype(jnp.float32)

    return *_pull(slope, chunk, x, head, g, targets, total), None


_cross_entropy = OwnGradient(lambda *args: _cross_entropy_forward(*args)[0], nondiff_argnums=(0,))
_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


def _entropy_forward(chunk: int, x: Array, head: Array) -> tuple[Array, tuple[Array, ...]]:
    def of_chunk(x: Array) -> tuple[Array, Array]:
        logits = _logits(x, head)
        total = jax.nn.logsumexp(logits, -1)
        log_p = logits - total[..., None]
        return -jnp.sum(jnp.exp(log_p) * log_p, -1), total

    found, total = _by_chunks(of_chunk, chunk, x)
    return found, (x, head, found, total)


def _entropy_backward(chunk: int, saved: tuple[Array, ...], g: Array) -> tuple[Array, Array]:
    x, head, found, total = saved

    def slope(logits: Array, found: Array, total: Array) -> Array:
        log_p = logits - total[..., None]
        return -jnp.exp(log_p) * (log_p + found[..., None])

    return _pull(slope, chunk, x, head, g, found, total)


_entropy = OwnGradient(lambda *args: _entropy_forward(*args)[0], nondiff_argnums=(0,))
_entropy.defvjp(_entropy_forward, _entropy_backward)


def _logits(x: Float[Array, "B C D"], head: Float[Array, "D V"]) -> Float[Array, "B C V"]:
    return jnp.einsum("bcd,dv->bcv", x, head.astype(x.dtype), preferred_element_type=jnp.float32)


def _is_target(logits: Array, targets: Array) -> Array:
    """Compare ids with targets.

    The gradient of a gather would be a scatter.
    """
    return targets[..., None] == lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)


def _as_rows(x: Float[Array, "*S T D"]) -> Float[Array, "B T D"]:
    return x.reshape(-1, *x.shape[-2:])


def _chunk(x: Float[Array, "B T D"], tokens: int) -> int:
    """Return steps of each row in a chunk, rows split evenly.

    Rows are not mixed: they may lie on many devices.
    """
    rows, length = x.shape[:2]
    count = -(-length // max(tokens // rows, 1))
    return -(-length // count)


def _padded(x: Array, chunk: int) -> Array:
    missing = -x.shape[1] % chunk
    return jnp.pad(x, ((0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2))) if missing else x


def _part(x: Array, index: Array, chunk: int) -> Array:
    return lax.dynamic_slice_in_dim(x, index * chunk, chunk, 1)


def _by_chunks(fn: Callable[..., Any], chunk: int, *arrays: Array) -> Any:
    """Return fn of every chunk of the arrays [B, T, ...], results [B, chunk] joined to [B, T]."""
    length = arrays[0].shape[1]
    arrays = tuple(_padded(a, chunk) for a in arrays)
    count = jnp.arange(arrays[0].shape[1] // chunk, dtype=jnp.int32)
    parts = lax.map(lambda i: fn(*[_part(a, i, chunk) for a in arrays]), count)
    return jax.tree.map(lambda p: jnp.moveaxis(p, 0, 1).reshape(p.shape[1], -1)[:, :length], parts)


def _pull(
    slope: Callable[..., Array],
    chunk: int,
    x: Float[Array, "B T D"],
    head: Float[Array, "D V"],
    g: Float[Array, "B T"],
    *saved: Array,
) -> tuple[Float[Array, "B T D"], Float[Array, "D V"]]:
    """Return gradients of x and head, chunk after chunk.

    Each chunk sends back the cotangent times slope(logits, *saved).
    """
    length = x.shape[1]
    x, *per_token = (_padded(a, chunk) for a in (x, g, *saved))

    def step(carry: tuple[Array, Array], index: Array) -> tuple[tuple[Array, Array], None]:
        dx, dhead = carry
        part, g, *rest = (_part(a, index, chunk) for a in (x, *per_token))
        dlogits = (g[..., None] * slope(_logits(part, head), *rest)).astype(x.dtype)
        back = jnp.einsum("bcv,dv->bcd", dlogits, head.astype(x.dtype), preferred_element_type=jnp.float32)
        dx = lax.dynamic_update_slice_in_dim(dx, back.astype(x.dtype), index * chunk, 1)
        dhead += jnp.einsum("bcd,bcv->dv", part, dlogits, preferred_element_type=jnp.float32)
        return (dx, dhead), None

    start = vary_alike(jnp.zeros(x.shape, x.dtype), jnp.zeros(head.shape, jnp.float32), x)[:2]
    count = jnp.arange(x.shape[1] // chunk, dtype=jnp.int32)
    (dx, dhead), _ = lax.scan(step, start, count)
    return dx[:, :length], dhead.astype(head.dtype)
