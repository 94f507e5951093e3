"""Every form against XLA's FFT and the floor: `python -m pallas_kernels.long_conv.bench`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._bench import Plan, Work, benchmark
from pallas_kernels._dispatch import current_device
from pallas_kernels._measure import Case
from pallas_kernels.long_conv.api import TABLE
from pallas_kernels.long_conv.shapes import SHAPES, LongConvShape
from pallas_kernels.long_conv.xla import long_conv_xla


def plan(shape: LongConvShape, dtype: Any = jnp.bfloat16) -> Plan:
    """What the table has beside XLA's FFT and the textbook, with both gates, all checked against the FFT in fp32."""
    args = arguments(shape, dtype)
    options = {"causal": shape.causal, **documents(shape)}
    stream, taps = float(args[0].nbytes), float(args[1].nbytes)
    others = [entry for entry in TABLE if entry.name not in ("xla", "reference")]
    able = [
        entry
        for entry in others
        if entry.why_not(current_device(), *args[:2], **_named(args, options)) is None
    ]
    return Plan(
        truth=Case("truth", partial(_in_fp32, options), args),
        plain=Case("xla", _gated(long_conv_xla, options), args),
        versions=[Case(entry.name, _gated(entry.run, options), args) for entry in able],
        # The floor is that of memory: a transform's FLOPs are of whoever chooses it.
        work={
            "forward": Work(0.0, 4 * stream + taps),
            # Backward reads x, the gates, the taps and the cotangent, which comes after y, and writes four gradients.
            "forward+backward": Work(0.0, 11 * stream + 3 * taps),
        },
    )


def arguments(shape: LongConvShape, dtype: Any) -> tuple[Any, ...]:
    """x, taps of unit energy, and both gates."""
    keys = jax.random.split(jax.random.key(1), 4)
    full, taps = (shape.batch, shape.channels, shape.length), shape.taps
    x, pre_gate, post_gate = (jax.random.normal(key, full, dtype) for key in keys[:3])
    width = taps if shape.causal else 2 * taps - 1
    filter = jax.random.normal(keys[3], (shape.channels, width)) * width**-0.5
    return x, filter, pre_gate, post_gate


def documents(shape: LongConvShape) -> dict[str, Any]:
    """Segment ids of documents of one length, which the op is not told; nothing for one document a row."""
    if shape.documents == 1:
        return {}
    ids = 1 + jnp.arange(shape.length, dtype=jnp.int32) * shape.documents // shape.length
    return {"segment_ids": jnp.broadcast_to(ids, (shape.batch, shape.length))}


def _named(args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    return {"pre_gate": args[2], "post_gate": args[3], **options}


def _gated(op: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    return lambda *args: op(*args[:2], **_named(args, options))


def _in_fp32(options: dict[str, Any], *args: Any) -> Any:
    wide = [z.astype(jnp.float32) for z in args]
    return _gated(long_conv_xla, options)(*wide).astype(args[0].dtype)


if __name__ == "__main__":
    print(benchmark("long_conv", SHAPES, plan))
