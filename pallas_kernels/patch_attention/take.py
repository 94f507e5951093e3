"""Each byte's latest patch, a gather whose gradient sums over runs of bytes: contended atomics would take many times
as long.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels._compat import vary_alike
from pallas_kernels._dispatch import has_reference_ops
from pallas_kernels._own_gradient import OwnGradient
from pallas_kernels.patch_attention.lookup_xla import rising
from pallas_kernels.patch_attention.runs import find_runs, reduce_runs


def take_latest(z: Float[Array, "B N M C"], latest: Int[Array, "B N S"]) -> Float[Array, "B N S C"]:
    """Return z of each byte's latest patch; 0 where `latest` is negative.

    The gradient of a patch is the sum over its bytes, in fp32 and in an order that is always the same.

    Args:
      z: patch vectors, block by block.
      latest: the index in z of each byte's latest patch. It does not fall within a block, but is negative for none,
        before and after the bytes that have one.
    """
    z, latest = vary_alike(z, latest)
    return _gather(z, latest, z.shape[2]) if has_reference_ops() else _take(z, latest, z.shape[2])


def _gather(z: Array, latest: Array, count: int) -> Array:
    place = jnp.where(latest < 0, count, latest)
    return jnp.take_along_axis(z, place[..., None], 2, mode="fill", fill_value=0)


def _forward(z: Array, latest: Array, count: int) -> tuple[Array, Array]:
    return _gather(z, latest, count), latest


def _backward(count: int, latest: Array, dy: Array) -> tuple[Array, None]:
    runs, flat = find_runs(rising(latest, count), count), dy.reshape(-1, dy.shape[-1])
    dz = reduce_runs(lambda pick: pick(flat).astype(jnp.float32), runs)
    return dz.reshape(*dy.shape[:2], count, -1).astype(dy.dtype), None


_take = OwnGradient(_gather, nondiff_argnums=(2,))
_take.defvjp(_forward, _backward)
