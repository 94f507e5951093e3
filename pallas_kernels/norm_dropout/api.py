"""The public function and its implementation table."""

from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from pallas_kernels._arguments import checked
from pallas_kernels._dispatch import Device, Implementation, choose, current_device, explain_call
from pallas_kernels._hopper import why_not_triton_on
from pallas_kernels.norm_dropout import reference, xla

WIDEST = 8192
"""Entries of a row that the kernel holds in registers."""


def _triton(*args: Any, **options: Any) -> Array:
    """Import the kernel where it runs: Pallas' GPU dialect takes over a second to import."""
    from pallas_kernels.norm_dropout import triton_gpu

    return triton_gpu.norm_dropout(*args, **options)


def why_not(device: Device, x: Any, *_: Any, **__: Any) -> str | None:
    """Return why the kernel cannot run such a call, or None."""
    if (reason := why_not_triton_on(device)) is not None:
        return reason
    if str(x.dtype) not in ("bfloat16", "float32"):
        return f"it takes bf16 and fp32, x is {x.dtype}"
    if x.shape[-1] > WIDEST:
        return f"a program holds rows of {WIDEST} at most, not {x.shape[-1]}"
    if not 0 < x.size < 1 << 31:
        return f"it counts entries from 1 to 2^31 - 1, x has {x.size}"
    return None


TABLE = (
    Implementation("triton", _triton, why_not),
    Implementation("xla", xla.norm_dropout),
    Implementation("reference", reference.norm_dropout),
)
"""Implementations of the operation, fastest first."""


@checked
def norm_dropout(
    x: Float[Array, "*S D"],
    scale: Float[Array, "D"],
    seed: UInt32[Array, "2"] | None = None,
    *,
    rate: float = 0.0,
    epsilon: float = 1e-6,
    places: Int[Array, "*S"] | None = None,
    implementation: Literal["triton", "xla", "reference"] | None = None,
) -> Float[Array, "*S D"]:
    """Return max(0, m / (1 - rate) * x / sqrt(mean(x^2) + epsilon) * scale), in x's dtype, computed in fp32.

    m is 0 for a share `rate` of the entries, 1 for the others. It depends on the seed and on the entry's place alone,
    whatever the implementation. Backward passes make it again. Beyond 2^32 entries draws repeat.

    Args:
      x: rows of any number, also none.
      scale: of the norm.
      seed: two random numbers, as of `jax.random.bits(key, (2,))`; not read if rate is 0.
      rate: share of entries that are dropped, from 0 to below 1.
      epsilon: of the norm, above 0.
      places: which row of the whole array each row is, if x is a device's share of one; None for 0, 1, ...
      implementation: a name of the table; None takes the first that runs here.

    Raises:
      ValueError: shapes, dtypes or numbers that do not fit, or an implementation that cannot run here.

    Source: RMSNorm (Zhang and Sennrich 2019, 1910.07467), dropout (Srivastava et al. 2014).
    """
    if x.ndim < 1 or scale.shape != x.shape[-1:] or not x.shape[-1]:
        raise ValueError(
            f"norm_dropout: expected x [..., D] and scale [D] with D >= 1, got {x.shape} and {scale.shape}"
        )
    if not all(jnp.issubdtype(a.dtype, jnp.floating) for a in (x, scale)):
        raise ValueError(
            f"norm_dropout: x and scale must be floating point, got {x.dtype} and {scale.dtype}: cast them first"
        )
    if not 0 <= rate < 1:
        raise ValueError(
            f"norm_dropout: rate must be from 0 to below 1, got {rate}: it is the share that is dropped"
        )
    if not epsilon > 0:
        raise ValueError(
            f"norm_dropout: epsilon must be above 0, got {epsilon}: rows of zeros are divided by its root"
        )
    _check_draws(x, seed, rate, places)
    seed = jnp.zeros(2, jnp.uint32) if seed is None else seed
    args, options = (x, scale, seed, places), {"rate": float(rate), "epsilon": float(epsilon)}
    chosen = choose("norm_dropout", TABLE, implementation, current_device(), *args, **options)
    return chosen.run(*args, **options)


def _check_draws(x: Any, seed: Any, rate: float, places: Any) -> None:
    if seed is None and rate:
        raise ValueError(
            f"norm_dropout: rate {rate} drops at random: give a seed, as of jax.random.bits(key, (2,))"
        )
    if seed is not None and (seed.shape != (2,) or seed.dtype != jnp.uint32):
        raise ValueError(
            f"norm_dropout: seed must be two numbers of uint32, got {seed.dtype} of shape {seed.shape}: "
            "make it by jax.random.bits(key, (2,))"
        )
    if places is not None and (places.shape != x.shape[:-1] or not jnp.issubdtype(places.dtype, jnp.integer)):
        raise ValueError(
            f"norm_dropout: places must be an integer for each row of x, of shape {x.shape[:-1]}, "
            f"got {places.dtype} of shape {places.shape}"
        )


def explain(x: Any, scale: Any, seed: Any = None, *, device: Device | None = None, **options: Any) -> str:
    """Return which implementation runs for arrays or shapes on `device`, and why no faster one."""
    return explain_call(norm_dropout, device, x, scale, seed, **options)
