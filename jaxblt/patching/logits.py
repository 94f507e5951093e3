"""The entropy of a prediction, from its logits."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def entropies_from_logits(logits: Float[Array, "*S V"]) -> Float[Array, "*S"]:
    """Return H = -sum_v p_v ln p_v in nats, fp32, with p = softmax(logits).

    A logit of -inf counts as p = 0; NaN gives NaN.
    """
    log_p = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    p = jnp.exp(log_p)
    return -jnp.sum(jnp.where(p == 0, 0.0, p * log_p), axis=-1)
