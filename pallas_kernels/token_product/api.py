"""The public function and its implementation table."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import jax
from jaxtyping import Array, Float

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
from pallas_kernels.token_product import reference


def _triton(*arrays: Any, **options: Any) -> tuple[Array | None, ...]:
    return _run(tuple(sorted(options.items())), *arrays)


@partial(OwnGradient, nondiff_argnums=(0,))
def _run(options: tuple[tuple[str, Any], ...], *arrays: Any) -> tuple[Array | None, ...]:
    """Import the kernel where it runs: Pallas' GPU dialect takes over a second to import."""
    from pallas_kernels.token_product import triton_gpu

    return triton_gpu.token_product(*arrays, **dict(options))


def _keep(options: tuple[tuple[str, Any], ...], *arrays: Any) -> tuple[Any, tuple[Any, ...]]:
    return _run(options, *arrays), arrays


def _gradients(options: tuple[tuple[str, Any], ...], arrays: tuple[Any, ...], dy: Any) -> tuple[Any, ...]:
    run: Any = partial(reference.token_product, **dict(options))
    return jax.vjp(run, *arrays)[1](dy)


_run.defvjp(_keep, _gradients)


def why_not(device: Device, x: Any, kernels: Any, *_: Any, **__: Any) -> str | None:
    """Return why the kernel cannot run such a call, or None."""
    if (reason := why_not_triton_on(device)) is not None:
        return reason
    dtypes = sorted({str(kernel.dtype) for kernel in kernels})
    if dtypes not in (["bfloat16"], ["float16"]):
        return f"its products are in bfloat16 or float16, these are of {', '.join(dtypes)}"
    return None


TABLE = (
    Implementation("triton", _triton, why_not),
    Implementation("reference", reference.token_product),
)
"""Implementations of the operation, fastest first."""


@checked
def token_product(
    x: Float[Array, "D"] | None,
    kernels: Sequence[Float[Array, "D _"]],
    *,
    parts: Float[Array, "S _"] | None = None,
    scale: Float[Array, "D"] | None = None,
    lse: Float[Array, "S H"] | None = None,
    squares: Float[Array, "S"] | None = None,
    epsilon: float = 1e-6,
    leaves_norm: bool = False,
    implementation: Literal["triton", "reference"] | None = None,
) -> tuple[Array | None, ...]:
    """Return a token and the parts of its products with matrices: n(token) W is the sum of the parts.

    The token t is x, or x + sum(parts). Without x it is silu(g) u, where g and u are the halves of sum(parts). With
    `lse` it is sum_s softmax_s(lse) parts_s, per head. n(t)_i = t_i / sqrt(mean_j t_j^2 + epsilon) scale_i, or t_i
    without a scale. With `leaves_norm` the parts are of t_i scale_i instead, and the next call divides by the norm: it
    gets the squares. So one launch does a product, what stands before it, and the sum of the product before that.

    Args:
      x: channels of one token, or None.
      kernels: the matrices W; their columns are joined in the result.
      parts: of the product before, in fp32: [S, D], or [S, 2 D] without x. With `lse`, of attention: [S, D].
      scale: of the norm.
      lse: log-sum-exps of attention's parts, without x. A head all of whose parts are at -1e30 or below is 0.
      squares: of the product before, without x, if that left its norm: sum(parts) / sqrt(sum(squares) + epsilon) are
        the halves then.
      epsilon: of the norm, above 0.
      leaves_norm: leave the division by the norm to the next call, so that no program reads the whole token.
      implementation: a name of the table; None takes the first that runs here.

    Returns:
      The token [D], None without x, and P parts of its products with all N columns in fp32. With `leaves_norm` also
      P parts of mean_j t_j^2.

    Raises:
      ValueError: shapes or options do not fit together, or the implementation cannot run this here.

    Source: RMSNorm (Zhang and Sennrich 2019, 1910.07467), SwiGLU (Shazeer 2020, 2002.05202), products in parts of the
    rows (split-K; Osama et al. 2023, 2301.03598, section 2).
    """
    kernels = tuple(kernels)
    _check(x, kernels, parts, scale, lse)
    _check_norm(x, scale, lse, squares, leaves_norm)
    args = (x, kernels, parts, scale, lse, squares)
    options = {"epsilon": float(epsilon), "leaves_norm": leaves_norm}
    return choose("token_product", TABLE, implementation, current_device(), *args, **options).run(
        *args, **options
    )


def _check(x: Any, kernels: tuple[Any, ...], parts: Any, scale: Any, lse: Any) -> None:
    shapes = [kernel.shape for kernel in kernels]
    if not shapes or any(len(shape) != 2 or shape[0] != shapes[0][0] for shape in shapes):
        raise ValueError(f"token_product: expected kernels [D, N] of one D, got {shapes}")
    dim = shapes[0][0]
    if x is None and parts is None:
        raise ValueError("token_product: pass x, parts, or both")
    if x is not None and x.shape != (dim,):
        raise ValueError(f"token_product: expected x [{dim}] for kernels {shapes}, got {list(x.shape)}")
    if lse is not None and (x is not None or parts is None or len(lse) != len(parts) or dim % lse.shape[1]):
        raise ValueError(
            f"token_product: expected lse [S, H] with parts [S, {dim}] and no x, got {list(lse.shape)}"
        )
    width = 2 * dim if x is None and lse is None else dim
    if parts is not None and (len(parts.shape) != 2 or parts.shape[1] != width):
        raise ValueError(f"token_product: expected parts [S, {width}], got {list(parts.shape)}")
    if scale is not None and scale.shape != (dim,):
        raise ValueError(f"token_product: expected scale [{dim}], got {list(scale.shape)}")


def _check_norm(x: Any, scale: Any, lse: Any, squares: Any, leaves_norm: bool) -> None:
    if squares is not None and (x is not None or lse is not None):
        raise ValueError("token_product: pass squares without x and lse, as they are of parts before a gate")
    if leaves_norm and scale is None:
        raise ValueError("token_product: pass the scale of the norm that is left to the next call")


def is_one_launch(dtype: Any) -> bool:
    """Check whether the kernel runs here for a dtype."""
    if has_reference_ops():
        return False
    return TABLE[0].cannot_run(current_device(), None, (jax.ShapeDtypeStruct((1, 1), dtype),)) is None


def explain(x: Any, kernels: Any, *, device: Device | None = None, **options: Any) -> str:
    """Return which implementation runs for arrays or shapes on `device`, and why no faster one."""
    return explain_call(token_product, device, x, kernels, **options)
