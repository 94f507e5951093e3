"""The op against shifted products as one would write them: `python -m pallas_kernels.short_conv.bench`."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._bench import Plan, Work, benchmark, packed_ids
from pallas_kernels._dispatch import current_device
from pallas_kernels._measure import Case
from pallas_kernels.short_conv.hopper import why_not as why_not_mosaic_gpu
from pallas_kernels.short_conv.mosaic_gpu import short_conv_mosaic_gpu
from pallas_kernels.short_conv.shapes import SHAPES, ShortConvShape
from pallas_kernels.short_conv.triton_gpu import short_conv_triton
from pallas_kernels.short_conv.triton_why import why_not as why_not_triton
from pallas_kernels.short_conv.xla import short_conv_xla


def plan(shape: ShortConvShape, *, interpret: bool = False) -> Plan:
    """Plan bf16 streams, with both gates where the layer has them.

    They are checked against the plain version in fp32. A kernel is among the versions where it runs, or if `interpret`
    simulates it.
    """
    keys = jax.random.split(jax.random.key(1), 4)
    full = (shape.batch, shape.channels, shape.length)
    names = ("x", "pre_gate", "post_gate") if shape.gated else ("x",)
    streams = {
        name: jax.random.normal(key, full, jnp.bfloat16) for name, key in zip(names, keys, strict=False)
    }
    taps = jax.random.normal(keys[3], (shape.channels, shape.taps)) * shape.taps**-0.5
    flops, stream = 2.0 * shape.taps * streams["x"].size, float(streams["x"].nbytes)
    forward = len(names) + 1
    ids = dict(zip(("segment_ids",), packed_ids(shape.batch, shape.length, shape.documents), strict=False))
    args = (streams | {"taps": taps} | ids,)
    interpret = interpret and not ids  # the simulated kernel takes no packed rows
    mosaic = [Case("mosaic_gpu", lambda arrays: short_conv_mosaic_gpu(**arrays, interpret=interpret), args)]
    triton = [Case("triton", lambda arrays: short_conv_triton(**arrays), args)]
    return Plan(
        truth=Case("truth", partial(_shifted_products, dtype=jnp.float32), args),
        plain=Case("plain", partial(_shifted_products, dtype=jnp.bfloat16), args),
        versions=[
            Case("xla", lambda arrays: short_conv_xla(**arrays), args),
            *(mosaic if interpret or why_not_mosaic_gpu(current_device(), **args[0]) is None else []),
            *(triton if why_not_triton(current_device(), **args[0]) is None else []),
        ],
        work={
            "forward": Work(flops, forward * stream),
            # Count what backward moves: it reads the streams and the cotangent, which comes after y, and writes a
            # gradient a stream.
            "forward+backward": Work(3 * flops, (forward + 2 * len(names) + 1) * stream),
        },
    )


def _shifted_products(arrays: dict[str, Any], *, dtype: Any) -> Any:
    """Return y_t = post_t sum_k taps_k u_{t-k}, u = pre * x rounded to `dtype`.

    Every shift is a copy that XLA may fuse. In packed rows a product counts where both steps are of one document.
    """
    ids = arrays.get("segment_ids")
    wide = {name: z.astype(jnp.float32) for name, z in arrays.items() if name != "segment_ids"}
    one = jnp.ones((), jnp.float32)
    u, taps = (wide["x"] * wide.get("pre_gate", one)).astype(dtype), wide["taps"]
    length = u.shape[-1]
    shifted = [jnp.pad(u, ((0, 0), (0, 0), (k, 0)))[..., :length] for k in range(taps.shape[1])]
    if ids is not None:
        same = (jnp.pad(ids, ((0, 0), (k, 0)))[:, :length] == ids for k in range(taps.shape[1]))
        shifted = [jnp.where(own[:, None], z, 0) for own, z in zip(same, shifted, strict=True)]
    y = sum(taps[None, :, k, None] * z.astype(jnp.float32) for k, z in enumerate(shifted))
    return (y * wide.get("post_gate", one)).astype(arrays["x"].dtype)


if __name__ == "__main__":
    print(benchmark("short_conv", [shape for shape in SHAPES if shape.length > 1], plan))
