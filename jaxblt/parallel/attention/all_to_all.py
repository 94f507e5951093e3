"""All-to-all attention: each device of a sequence gets all tokens of its share of the heads (2309.14509)."""

import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax import lax
from jaxtyping import Array, Float

from jaxblt.parallel.attention.plan import Plan
from jaxblt.parallel.attention.tiles import Keys
from jaxblt.parallel.content import content_first
from pallas_kernels.attention import attention, masks


def attend_by_heads(
    plan: Plan, q: Float[Array, "B T H K"], keys: Keys, slopes: Float[Array, "H"] | None
) -> Float[Array, "B T H K"]:
    """Return exact attention to the keys of all devices, inside an island: one exchange there and one back.

    Args:
      plan: its axis divides the heads of queries and of keys.
      q, keys: of this device's stretch.
      slopes: ALiBi's, of all heads.
    """
    axis, ids = plan.devices, keys.segment_ids
    if ids is not None:
        ids = lax.all_gather(ids, axis.name, axis=1, tiled=True)
    # Send queries, keys and values of every device's heads in one message.
    sent = [rearrange(x, "b t (n h) k -> b t n h k", n=axis.size) for x in (q, keys.k, keys.v)]
    came = lax.all_to_all(jnp.concatenate(sent, 3), axis.name, 2, 1, tiled=True)[:, :, 0]
    q, k, v = jnp.split(came, np.cumsum([x.shape[3] for x in sent])[:-1], axis=2)
    if plan.sort is not None and ids is not None:
        content = content_first(ids)
        q, k, v = map(content.sort, (q, k, v))
        mask = plan.band & masks.token_lengths(content.lengths)
        o = content.restore(attention(q, k, v, mask, **plan.options))
    else:
        if slopes is not None:
            slopes = slopes.reshape(axis.size, -1)[lax.axis_index(axis.name)]
        o = attention(q, k, v, plan.band & masks.documents(ids), alibi_slopes=slopes, **plan.options)
    return rearrange(lax.all_to_all(o[:, :, None], axis.name, 1, 2, tiled=True), "b t n h k -> b t (n h) k")
