"""Parts that kernels in Pallas' Triton share: the launch, products, powers of two.

Imports Pallas' GPU dialect, which takes over a second: import it where a kernel runs.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int

LOG2E = math.log2(math.e)

LOWEST = -1e30
"""Score of what is masked. Subtracting no less than FLOOR makes its exp() 0 where nothing is visible as well."""

FLOOR = -0.5e30


def launch(
    kernel: Callable[..., None],
    name: str,
    programs: int,
    out: Any,
    arrays: Sequence[Array],
    *,
    warps: int,
    stages: int,
    interpret: bool,
    aliases: dict[int, int] | None = None,
) -> Any:
    """Run `kernel(*refs of arrays, *refs of out)` in each of `programs` programs.

    `aliases` are results, by number of an array whose memory they take.
    """
    with warnings.catch_warnings():
        # Expect this backend to go: JAX 0.11 announces it, and `why_not_triton_on` looks for it.
        warnings.simplefilter("ignore", DeprecationWarning)
        return pl.pallas_call(
            kernel,
            grid=(programs,),
            out_shape=out,
            compiler_params=pltriton.CompilerParams(num_warps=warps, num_stages=stages),
            interpret=interpret,
            input_output_aliases=aliases or {},
            name=name,
        )(*arrays)


def span(start: Any, count: int) -> Int[Array, "count"]:
    """Return start, start + 1, ..."""
    return start + jnp.arange(count, dtype=jnp.int32)


def product(left: Array, right: Array) -> Float[Array, "rows columns"]:
    """Return left @ right, summed in fp32."""
    return jnp.dot(left, right, preferred_element_type=jnp.float32)


def steps(begin: Any, end: Any, step: int) -> Array:
    """Count the tiles of `step` rows from `begin` to `end`."""
    return lax.div(end - begin + (step - 1), step)


def exp2(x: Float[Array, "..."], interpret: bool) -> Float[Array, "..."]:
    """Return 2^x in one instruction, subnormal results as 0.

    `jnp.exp2` takes four to keep them.
    """
    return jnp.exp2(x) if interpret else _instruction("ex2.approx.ftz.f32", x)


def log2(x: Float[Array, "..."], interpret: bool) -> Float[Array, "..."]:
    """Return log2(x) for x in the normal range, to 2^-22 of max(1, |log2(x)|)."""
    return jnp.log2(x) if interpret else _instruction("lg2.approx.ftz.f32", x)


def _instruction(name: str, x: Float[Array, "..."]) -> Float[Array, "..."]:
    out = [jax.ShapeDtypeStruct(x.shape, x.dtype)]
    return pltriton.elementwise_inline_asm(
        f"{name} $0, $1;", args=[x], constraints="=f,f", pack=1, result_shape_dtypes=out
    )[0]
