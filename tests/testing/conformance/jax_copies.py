"""A copy of gated linear attention in JAX, whose gradients have places for faults."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def run(x: Any, documents: Any = None, state: Any = None, *, fault: str = "") -> tuple[jax.Array, None]:
    """Return outputs [B, T, 2] of one call; the streams lie in x as in `copies`."""
    given = jnp.asarray(x)
    ids = jnp.asarray(np.ones(given.shape[:2], int) if documents is None else documents)
    live = (ids > 0)[..., None]
    x = jnp.where(live, given, 0.0)
    log_decay = -jax.nn.softplus(x[..., 4])
    if fault == "drops the decay's gradient":
        log_decay = jax.lax.stop_gradient(log_decay)
    total = jnp.cumsum(log_decay, 1)
    lasting = total[:, :, None] - total[:, None]
    seen = np.tri(given.shape[1], dtype=bool)[None] & (ids[:, :, None] == ids[:, None])
    if fault == "takes exp before the mask":
        decay = jnp.where(seen, jnp.exp(lasting), 0.0)
    else:
        decay = jnp.exp(jnp.where(seen, lasting, -jnp.inf))
    y = x[..., :1] * ((decay * x[:, None, :, 1]) @ x[..., 2:4])
    if fault == "scales a gradient by 1.01":
        y = y + 0.01 * (y - jax.lax.stop_gradient(y))
    if fault == "leaks a gradient between documents":
        mean = jnp.mean(x, 1, keepdims=True)[..., :2]
        y = y + mean - jax.lax.stop_gradient(mean)
    if fault == "multiplies gradients at padding by 0":
        y = y + jnp.where(live, given * given, 0.0)[..., :2]
    if fault == "takes a norm at 0":
        y = y * jnp.sqrt(jnp.sum(x * x, -1, keepdims=True))
    return y, None
