"""The definitions: all logits at once, in fp32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def cross_entropy(
    x: Float[Array, "*S T D"], head: Float[Array, "D V"], targets: Int[Array, "*S T"]
) -> Float[Array, "*S T"]:
    """Return -log p_target."""
    log_p = _log_probabilities(x, head)
    return -jnp.take_along_axis(log_p, targets[..., None], -1)[..., 0]


def entropy(x: Float[Array, "*S T D"], head: Float[Array, "D V"]) -> Float[Array, "*S T"]:
    """Return -sum_v p_v log p_v."""
    log_p = _log_probabilities(x, head)
    return -jnp.sum(jnp.exp(log_p) * log_p, -1)


def _log_probabilities(x: Float[Array, "*S T D"], head: Float[Array, "D V"]) -> Float[Array, "*S T V"]:
    logits = jnp.matmul(x.astype(jnp.float32), head.astype(jnp.float32), precision="highest")
    return jax.nn.log_softmax(logits, -1)
