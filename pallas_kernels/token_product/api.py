"""The public function and its implementation table."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import jax
from jaxtyping import Array, Bool, Float

from pallas_kernels._arguments import checked
from pallas_kernels._dispatch import (
    Device,
    Implementation,
    choose,
    current_device,
    explain_call,
    has_reference_ops,
)
from pallas_kernels._hopper import why_not_triton_on
from pallas_kernels._own_gradient import OwnGradient
from pallas_kernels.token_product import reference, xla

MOST_TOKENS = 64
"""The most tokens that a program of the kernel holds at once."""


def _triton(*arrays: Any, **options: Any) -> tuple[Array, ...]:
    return _run(tuple(sorted(options.items())), *arrays)


@partial(OwnGradient, nondiff_argnums=(0,))
def _run(options: tuple[tuple[str, Any], ...], *arrays: Any) -> tuple[Array, ...]:
    """Import the kernel where it runs: Pallas' GPU dialect takes over a second to import."""
    from pallas_kernels.token_product import triton_gpu

    return triton_gpu.token_product(*arrays, **dict(options))


def _keep(options: tuple[tuple[str, Any], ...], *arrays: Any) -> tuple[Any, tuple[Any, ...]]:
    return _run(options, *arrays), arrays


def _gradients(options: tuple[tuple[str, Any], ...], kept: tuple[Any, ...], dy: Any) -> tuple[Any, ...]:
    *floats, rows = kept

    def run(*floats: Any) -> tuple[Array, ...]:
        call: Any = xla.token_product
        return call(*floats, rows, **dict(options))

    return *jax.vjp(run, *floats)[1](dy), None


_run.defvjp(_keep, _gradients)


def why_not(device: Device, x: Any, kernels: Any, *_: Any, **__: Any) -> str | None:
    """Return why the kernel cannot run such a call, or None."""
    if (reason := why_not_triton_on(device)) is not None:
        return reason
    dtypes = sorted({str(z.dtype) for z in (x, *kernels)})
    if dtypes not in (["bfloat16"], ["float16"]):
        return f"its products are in bfloat16 or float16, these are of {', '.join(dtypes)}"
    if not 0 < x.shape[0] <= MOST_TOKENS:
        return f"a program holds 1 to {MOST_TOKENS} tokens, these are {x.shape[0]}"
    return None


TABLE = (
    Implementation("triton", _triton, why_not),
    Implementation("xla", xla.token_product),
    Implementation("reference", reference.token_product),
)
"""Implementations of the operation, fastest first."""


@checked
def token_product(
    x: Float[Array, "R D"],
    kernels: Sequence[Float[Array, "D _"]],
    *,
    scale: Float[Array, "D"] | None = None,
    added: Float[Array, "R N"] | None = None,
    kept: Bool[Array, "R"] | None = None,
    gated: bool = False,
    epsilon: float = 1e-6,
    dtype: Any = None,
    implementation: Literal["triton", "xla", "reference"] | None = None,
) -> tuple[Float[Array, "R _"], ...]:
    """Return n(x) W of each matrix, for a few tokens, summed in fp32.

    n(x) = x / sqrt(mean(x^2) + epsilon) * scale, or x without a scale.

    Args:
      x: tokens.
      kernels: the matrices W; two if `gated`, one if there is something to add.
      scale: of the norm.
      added: return `added` + n(x) W.
      kept: rows that are False are zeros.
      gated: return silu(n(x) W_0) * n(x) W_1 alone.
      epsilon: of the norm, above 0.
      dtype: of the result; x's if None.
      implementation: a name of the table; None takes the first that runs here.

    Raises:
      ValueError: shapes or options do not fit together, or the implementation cannot run this here.

    Source: RMSNorm (Zhang and Sennrich 2019, 1910.07467), SwiGLU (Shazeer 2020, 2002.05202).
    """
    kernels = tuple(kernels)
    _check(x, kernels, scale, added, gated)
    args, options = (
        (x, kernels, scale, added, kept),
        {"gated": gated, "epsilon": float(epsilon), "dtype": dtype},
    )
    return choose("token_product", TABLE, implementation, current_device(), *args, **options).run(
        *args, **options
    )


def _check(x: Any, kernels: tuple[Any, ...], scale: Any, added: Any, gated: bool) -> None:
    shapes = [kernel.shape for kernel in kernels]
    if not shapes or any(len(shape) != 2 or shape[0] != x.shape[1] for shape in shapes):
        raise ValueError(f"token_product: expected kernels [D, N] for x [R, D], got {shapes} and x {x.shape}")
    if gated and (len(shapes) != 2 or shapes[0] != shapes[1]):
        raise ValueError(f"token_product: gated=True takes two kernels of one shape, got {shapes}")
    if added is not None and (gated or len(shapes) != 1 or added.shape != (x.shape[0], shapes[0][1])):
        raise ValueError(
            f"token_product: added goes with one kernel and has its result's shape, got {added.shape} for kernels "
            f"{shapes} and x {x.shape}"
        )
    if scale is not None and scale.shape != x.shape[1:]:
        raise ValueError(f"token_product: scale must have x's width, got {scale.shape} for x {x.shape}")


def is_one_launch(tokens: int, dtype: Any) -> bool:
    """Check whether the kernel runs here for so many tokens of a dtype."""
    if has_reference_ops():
        return False
    x = jax.ShapeDtypeStruct((tokens, 1), dtype)
    return TABLE[0].cannot_run(current_device(), x, (x,)) is None


def explain(x: Any, kernels: Any, *, device: Device | None = None, **options: Any) -> str:
    """Return which implementation runs for arrays or shapes on `device`, and why no faster one."""
    return explain_call(token_product, device, x, kernels, **options)
