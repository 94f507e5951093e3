"""The calls that the Triton kernel takes, known without importing Triton, which many machines lack."""

from typing import Any

from pallas_kernels._dispatch import Device
from pallas_kernels._jax_triton import why_not_on

MOST = 8
"""Taps that the kernel is unrolled for, more than the op is meant for."""

SHORTEST = 1024
"""Steps of a row: half a program's where rows are not packed. At one step, a program each, XLA took a hundredth of
the time."""

DTYPES = {"bfloat16", "float32"}


def why_not(
    device: Device,
    x: Any,
    taps: Any,
    *,
    history: Any = None,
    pre_gate: Any = None,
    post_gate: Any = None,
    **_: Any,
) -> str | None:
    """Return why the kernel cannot run such a call, or None."""
    if (reason := why_not_on(device)) is not None:
        return reason
    dtypes = {str(z.dtype) for z in (x, pre_gate, post_gate, history) if z is not None}
    if not dtypes <= DTYPES:
        return f"it takes bf16 and fp32 streams, these are {', '.join(sorted(dtypes))}"
    if taps.shape[1] > MOST:
        return f"it takes at most {MOST} taps, not {taps.shape[1]}"
    if x.shape[2] < SHORTEST:
        return f"a program takes 2,048 steps, rows are shorter than {SHORTEST}"
    return None
