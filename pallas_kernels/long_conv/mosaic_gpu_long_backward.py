"""Gradients of rows of 8,193 to 32,768 steps: two passes of the kernel whose two warpgroups share a row.

With u = pre_gate x, v = post_gate dy, their spectra U and V, and the taps' H, as in `mosaic_gpu_backward`:

    first pass: U, and dpost_gate = dy Re(A^H (H U))
    second pass: V, and dx = pre_gate du, dpre_gate = x du of du = Re(A^H (conj(H) V))

One spectrum fills shared memory, so U and V go through device memory, in fp16. A third kernel sums conj(U) V over rows
in fp32, in one order. With both gates a step costs 20 bytes of streams, 8 to write spectra, 8 to read them, and 8 for
the bias.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.long_conv.hopper import Ring
from pallas_kernels.long_conv.mosaic_gpu_backward import DY, POST, PRE, Gradients, X
from pallas_kernels.long_conv.mosaic_gpu_correlated import correlate
from pallas_kernels.long_conv.mosaic_gpu_long import run_long


def differentiate_long(
    ring: Ring,
    spectrum: Float[Array, "D P 64 64"],
    inverse: Float[Array, "D 64"],
    streams: dict[int, Float[Array, "R N 64"]],
    *,
    interpret: bool,
    dtype: Any = jnp.float32,
) -> Gradients:
    """Differentiate as `mosaic_gpu_backward.differentiate` does.

    There is an even number of classes, the last two not empty.
    """
    inner, outer = ([streams[z] for z in places if z in streams] for places in ((X, PRE), (DY, POST)))
    gates = [streams[PRE], streams[X]] if PRE in streams else []

    def run(inputs: list[Array], gates: list[Array], name: str, *, adjoint: bool) -> list[Array]:
        name = f"{ring.points}_vjp_{name}"
        options: Any = {"kept": True, "adjoint": adjoint, "interpret": interpret, "dtype": dtype}
        return run_long(ring, spectrum, inverse, inputs, gates, name=name, **options)

    dpost, u, inverse_u = run(inner, [streams[DY]], "u", adjoint=False)
    *found, v, inverse_v = run(outer, gates, "v", adjoint=True)
    results = dict(zip((X, PRE), found, strict=False)) | ({POST: dpost} if POST in streams else {})
    channels = spectrum.shape[0]
    sums = correlate(u, v, inverse_u * inverse_v, channels, interpret=interpret)
    return Gradients(results, sums[:, None], _sums_of_products([*inner, *outer], channels)[:, None])


def _sums_of_products(streams: Sequence[Float[Array, "R N 64"]], channels: int) -> Float[Array, "D"]:
    """Sum u v: the gradient of `bias`, one number of many, without a transform's error."""
    rows, chunks, chunk = streams[0].shape
    both = reduce(jnp.multiply, (z.astype(jnp.float32) for z in streams))
    return jnp.sum(both.reshape(rows // channels, channels, chunks * chunk), axis=(0, 2))
