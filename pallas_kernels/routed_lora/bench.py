"""The cost of the update over the plain product: `python -m pallas_kernels.routed_lora.bench`.

The overhead is over the fastest product without an update: `jnp.matmul` of x and the sites' weights, one by one or
joined. With channels first it is an einsum, or a GEMM for each row. The floor has the update's FLOPs, of blocks whose
number is not 0, and reads x, and in the backward pass the cotangents, once more. Where numbers are 0, versions have
`active`, except `dense`. With channels first `transposed` is the op with time first, and a transposition.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._bench import Plan, Work, benchmark, kernels_for
from pallas_kernels._measure import Case
from pallas_kernels.routed_lora.active import active_blocks
from pallas_kernels.routed_lora.api import TABLE, routed_lora
from pallas_kernels.routed_lora.products import forward
from pallas_kernels.routed_lora.reference import code_of_ranks
from pallas_kernels.routed_lora.shapes import SHAPES, RoutedLoraShape


def plan(shape: RoutedLoraShape, dtype: Any = jnp.bfloat16) -> Plan:
    """Plan the op against einsums of the same, and the products without an update."""
    x, w, v, u, code = arrays(shape, dtype)
    options: dict[str, Any] = {"chunk": shape.chunk, "scale": 2.0, "channels_first": shape.channels_first}
    hidden = tuple(_as_integers(site) for site in w)
    args = (x, hidden, v, u, code)
    op, asked = routed_lora, dict(options)
    if shape.active is not None:
        op = _skipping
        asked["active"] = active_blocks(code, shape.length, chunk=shape.chunk)
    names: list[Any] = ["reference", *kernels_for(TABLE, x, w, v, u, code, **asked), "xla"]

    def case(name: str, run: Callable[..., Any], **more: Any) -> Case:
        return Case(name, _frozen(dtype, partial(run, **options, **more)), args)

    truth, *versions = (case(name, op, implementation=name) for name in names)
    if shape.active is not None:
        versions.append(case("dense", routed_lora))
    if shape.channels_first:
        versions.append(case("transposed", _transposed))
    return Plan(
        truth=truth,
        plain=case("plain", _plain),
        versions=versions,
        work=work(shape, x, code),
        bare=_bare(shape, x, w, dtype),
    )


def _bare(shape: RoutedLoraShape, x: Any, w: Any, dtype: Any) -> list[Case]:
    """Return the products without an update, in the order of axes that the op gives."""
    if shape.channels_first:
        ways = {"matmul": _channels_first, "row_by_row": partial(forward, channels_first=True)}
        hidden = tuple(_as_integers(site) for site in w)
        return [Case(name, _frozen(dtype, partial(_each, way)), (x, hidden)) for name, way in ways.items()]
    return [
        Case(
            "matmul", _frozen(dtype, partial(_each, jnp.matmul)), (x, tuple(_as_integers(site) for site in w))
        ),
        Case("joined", _frozen(dtype, jnp.matmul), (x, _as_integers(jnp.concatenate(w, 1)))),
    ]


def _channels_first(x: Any, w: Any) -> Any:
    return jnp.einsum("btk,kn->bnt", x, w)


def _each(way: Callable[..., Any], x: Any, w: Any) -> Any:
    return tuple(way(x, site) for site in w)


def _as_integers(w: Any) -> Any:
    """Return the bits of a weight as integers.

    Every float argument of a benchmark gets a gradient, and a frozen weight has none.
    """
    return jax.lax.bitcast_convert_type(w, jnp.dtype(f"int{8 * w.dtype.itemsize}"))


def _frozen(dtype: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return `run` for weights that arrive as integers."""

    def with_weights(x: Any, w: Any, *rest: Any) -> Any:
        return run(x, jax.tree.map(lambda site: jax.lax.bitcast_convert_type(site, dtype), w), *rest)

    return with_weights


def arrays(shape: RoutedLoraShape, dtype: Any) -> tuple[Any, Any, Any, Any, Any]:
    """Draw x, w, v, u and codes about 1, of which `active` random numbers are not 0."""
    keys = iter(jax.random.split(jax.random.key(1), 3 + 3 * shape.sites))

    def matrices(rows: int, columns: int) -> tuple[Any, ...]:
        scale = jnp.asarray(rows**-0.5, dtype)
        return tuple(
            jax.random.normal(next(keys), (rows, columns), dtype) * scale for _ in range(shape.sites)
        )

    x = jax.random.normal(next(keys), (shape.batch, shape.length, shape.inputs), dtype)
    chunks = -(-shape.length // shape.chunk)
    code = 1 + 0.3 * jax.random.normal(next(keys), (shape.batch, chunks, shape.blocks), jnp.float32)
    if shape.active is not None:
        places = jnp.broadcast_to(jnp.arange(shape.blocks), code.shape)
        places = jax.random.permutation(next(keys), places, axis=-1, independent=True)
        code = jnp.where(places < shape.active, code, 0.0)
    w, v = matrices(shape.inputs, shape.outputs), matrices(shape.inputs, shape.rank)
    return x, w, v, matrices(shape.rank, shape.outputs), code


def work(shape: RoutedLoraShape, x: Any, code: Any) -> dict[str, Work]:
    """Count FLOPs and bytes of the products and the update.

    x (and dy) are read a second time.
    """
    tokens, outputs = shape.batch * shape.length, shape.sites * shape.outputs
    plain = 2.0 * tokens * shape.inputs * outputs
    ranks = shape.rank * (shape.blocks if shape.active is None else shape.active) / shape.blocks
    update = 2.0 * tokens * shape.sites * ranks * (shape.inputs + shape.outputs)
    y = tokens * outputs * x.itemsize
    forward = Work(plain + update, 2.0 * x.nbytes + y + code.nbytes)
    backward = Work(plain + 2 * update, 3.0 * x.nbytes + 2.0 * y + 2.0 * code.nbytes)
    both = Work(forward.flops + backward.flops, forward.bytes_moved + backward.bytes_moved)
    return {"forward": forward, "forward+backward": both}


def _plain(
    x: Any, w: Any, v: Any, u: Any, code: Any, *, chunk: int, scale: float, channels_first: bool
) -> Any:
    """Compute what one would write."""
    found, multiply = [], _channels_first if channels_first else jnp.matmul
    for weight, down, up in zip(w, v, u, strict=True):
        numbers = code_of_ranks(code, chunk, x.shape[1], down.shape[1])
        z = jnp.matmul(x, down) * (scale * numbers).astype(x.dtype)
        found.append(multiply(x, weight) + multiply(z, up))
    return tuple(found)


def _transposed(*args: Any, channels_first: bool, **options: Any) -> Any:
    """Return the op with time first, and transpositions."""
    del channels_first
    return tuple(y.swapaxes(1, 2) for y in routed_lora(*args, **options))


def _skipping(x: Any, w: Any, v: Any, u: Any, code: Any, *, chunk: int, **options: Any) -> Any:
    """Run the op, with what it may skip."""
    active = active_blocks(code, x.shape[1], chunk=chunk)
    return routed_lora(x, w, v, u, code, chunk=chunk, active=active, **options)


if __name__ == "__main__":
    print(benchmark("routed_lora", SHAPES, plan))
