"""The op against its steps as XLA fuses them: `python -m pallas_kernels.token_product.bench`."""

from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels._bench import Plan, Work, benchmark
from pallas_kernels._measure import Case
from pallas_kernels.token_product.api import is_one_launch, token_product
from pallas_kernels.token_product.reference import make_token, merge
from pallas_kernels.token_product.shapes import SHAPES, TokenShape

PARTS = 8
"""Parts of XLA's sums: in one, it would write each weight times its channel to memory."""


EPSILON = 1e-6
"""Of the norm."""


def run(
    x: Any,
    kernels: Any,
    parts: Any,
    scale: Any,
    lse: Any,
    squares: Any,
    *,
    leaves_norm: bool,
    implementation: Any,
) -> tuple[Any, Float[Array, "N"]]:
    """Run the operation, and add its parts up, as the next one does while it reads them."""
    options = {"scale": scale, "lse": lse, "squares": squares, "leaves_norm": leaves_norm}
    found: Any = token_product(x, kernels, parts=parts, implementation=implementation, **options)
    token, y, *left = found
    inverse = jax.lax.rsqrt(jnp.sum(left[0]) + EPSILON) if left else 1.0
    return token, jnp.sum(y, 0) * inverse


def plain(
    x: Any, kernels: Any, parts: Any, scale: Any, lse: Any, squares: Any
) -> tuple[Any, Float[Array, "N"]]:
    """Compute the op a step at a time, as a decoded token without the kernel is computed."""
    dim, dtype = len(kernels[0]), kernels[0].dtype
    if squares is not None:
        parts = parts * jax.lax.rsqrt(jnp.sum(squares) + EPSILON)
    token = make_token(x, parts, dtype) if lse is None else merge(parts, lse, dtype)
    wide = token.astype(jnp.float32)
    if scale is not None:
        wide = (
            (wide * jax.lax.rsqrt(jnp.mean(wide * wide) + EPSILON) * scale).astype(dtype).astype(jnp.float32)
        )
    split = wide.reshape(PARTS, dim // PARTS, 1)
    tiles = [kernel.reshape(PARTS, dim // PARTS, -1).astype(jnp.float32) for kernel in kernels]
    y = jnp.concatenate([reduce(jnp.add, jnp.sum(split * tile, 1)) for tile in tiles])
    return None if x is None else token, y


def plan(shape: TokenShape, dtype: Any = jnp.bfloat16) -> Plan:
    """Plan the kernel, where it runs, against XLA's form of the same steps."""
    keys = iter(jax.random.split(jax.random.key(1), 5 + len(shape.widths)))
    x = None if shape.gated or shape.heads else jax.random.normal(next(keys), (shape.dim,), dtype)
    scale = 1 + 0.1 * jax.random.normal(next(keys), (shape.dim,)) if shape.normed else None
    parts = jax.random.normal(next(keys), (shape.parts, shape.channels)) if shape.parts else None
    lse = jax.random.normal(next(keys), (shape.parts, shape.heads)) if shape.heads else None
    kernels = tuple(
        shape.dim**-0.5 * jax.random.normal(next(keys), (shape.dim, n), dtype) for n in shape.widths
    )
    squares = jax.random.uniform(next(keys), (shape.parts,)) if shape.gated else None
    args, names = (x, kernels, parts, scale, lse, squares), ["triton"] if is_one_launch(dtype) else []
    call = partial(run, leaves_norm=shape.leaves_norm)
    moved = float(sum(kernel.nbytes for kernel in kernels))
    return Plan(
        truth=Case("truth", partial(call, implementation="reference"), args),
        plain=Case("plain", plain, args),
        versions=[Case(name, partial(call, implementation=name), args) for name in names],
        work={"forward": Work(2.0 * shape.dim * sum(shape.widths), moved)},
    )


if __name__ == "__main__":
    print(benchmark("token_product", SHAPES, plan))
