"""The way back from learned patches: smoothed patch vectors, and bytes that read their latest one."""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxblt.layers import Linear, dense
from jaxblt.mixers.linear.recurrence import Recurrence
from jaxblt.models.bridge import over_blocks
from jaxblt.patching.learned.router import identity, read_document
from pallas_kernels.patch_attention import take_latest

LEAST_P = 1e-4
"""How near p may come to 0 and to 1 in the smoothing."""

FIRST_SCALE = 0.1
"""Scale of U at first. Latent stacks end without a norm: U z of full scale is several times as large as h, and drowns
what tells bytes apart before patches tell anything."""


def smooth(
    z: Float[Array, "B P D"],
    p: Float[Array, "B P"],
    slots: Int[Array, "B P"],
    carry: Float[Array, "B D"] | None = None,
) -> tuple[Float[Array, "B P D"], Float[Array, "B D"] | None]:
    """Return p_j z_j + (1 - p_j) times the smoothed vector before, and the last of all (H-Net, 2507.07955, eq. 5).

    It is computed in fp32, with p in [1e-4, 1 - 1e-4]. Documents begin at zero. Holes are zero and pass on what came.

    Args:
      z: patch vectors.
      p: the router's probability at each patch's last byte.
      slots: segment ids of the slots.
      carry: the last smoothed vector of each row's document; zeros for a new one.
    """
    p = jnp.clip(p.astype(jnp.float32), LEAST_P, 1 - LEAST_P)
    gate = (jnp.log1p(-p) - jnp.log(p))[..., None]
    rows = read_document(jnp.concatenate([z.astype(jnp.float32), gate], -1), slots, carry)
    u, gate = rows.x[..., :-1], rows.x[..., -1:]
    smoothed, last = rows.run(Recurrence(), (jnp.broadcast_to(gate, u.shape), u), carry)
    return rows.restore(smoothed).astype(z.dtype), last


class LatestPatch(nn.Module):
    """U z of the latest patch that ended at or before each byte; 0 before the first.

    It is called as `PatchesToBytes` is.
    """

    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self,
        h: Float[Array, "B N S C"],
        keys: Float[Array, "B N K D"],
        latest: Int[Array, "B N S"],
        valid: Bool[Array, "B N K"],
    ) -> Float[Array, "B N S C"]:
        """Return what each byte gets of its latest patch."""
        options = {"axes": ("latent", "embed"), "dtype": self.dtype, "scale": FIRST_SCALE}
        z = dense(h.shape[-1], **options, name="up")(keys)
        z = jnp.where(valid[..., None], z, jnp.zeros((), z.dtype))
        return over_blocks(lambda own, _: take_latest(*own[1]), (), (z, latest))


def keep_bytes(dtype: Any, width: int) -> Linear:
    """Return W of W h_t, the identity at first.

    H-Net begins with zeros (2507.07955, sec. 2.2). The first steps then learn the bytes' mean alone, along which h_t is
    the same for all. The gradient that tells bytes apart all but vanishes, and runs stay at single bytes' entropy.
    """
    return Linear("btc,cd->btd", {"d": width}, ("embed", "channels"), dtype, kernel_init=identity)
