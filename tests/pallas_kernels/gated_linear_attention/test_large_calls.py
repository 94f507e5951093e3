"""The Hopper kernels on a GPU: arrays of 2^31 elements and more, more rows than a grid has heads, the longest rows.

Gradients of 2^32 elements take 100 GB, so let JAX have nearly all of an H200: XLA_PYTHON_CLIENT_MEM_FRACTION=.95.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import Array

from pallas_kernels._hopper import MOST_BLOCKS
from pallas_kernels.gated_linear_attention.hopper import PIECE
from pallas_kernels.gated_linear_attention.mosaic_gpu import gated_linear_attention_mosaic_gpu
from tests.pallas_kernels.state_ops import GATES

STEPS = 131_072
# Gate, heads, widths: 2^29 elements a row. 32 bits count those of eight rows, signed ones those of four.
LARGE = (
    ("log_gate", 32, 128, 128),
    ("log_key_gate", 32, 128, 128),
    ("log_value_gate", 32, 128, 128),
    ("log_value_gate", 8, 512, 64),
)
# What fits with gradients: gates per channel have gradients in fp32, and copies.
ROWS = {"log_gate": 9, "log_key_gate": 5, "log_value_gate": 5}
MANY = 70_000
LAST = 64 * PIECE


@partial(jax.jit, static_argnums=(0, 1, 2))
def drawn(gate: str, shape: tuple[int, int, int], widths: tuple[int, int]) -> dict[str, Array]:
    """Rows of streams and gates in bf16, [rows, steps, heads]."""
    keys, (narrow, full) = jax.random.split(jax.random.key(1), 4), ((*shape, width) for width in widths)
    gated = {"log_gate": shape, "log_key_gate": narrow, "log_value_gate": full}[gate]
    draw = partial(jax.random.normal, dtype=jnp.bfloat16)
    return {
        "q": draw(keys[0], narrow),
        "k": draw(keys[1], narrow) * jnp.asarray(widths[0] ** -0.5, jnp.bfloat16),
        "v": draw(keys[2], full),
        gate: -jnp.exp(jax.random.uniform(keys[3], gated, jnp.bfloat16, minval=-8.0, maxval=0.0)),
    }


@partial(jax.jit, static_argnums=1)
def repeated(x: Array, rows: int) -> Array:
    """One row's array, in each row by another factor: no row can be taken for another."""
    factors = jnp.linspace(0.5, 1.0, rows).astype(x.dtype)
    return x * factors.reshape(-1, *(1,) * (x.ndim - 1))


@partial(jax.jit, static_argnums=0)
def outputs(run: Any, arrays: dict[str, Array]) -> dict[str, Array]:
    o, final = run(**arrays, output_final_state=True)
    return {"o": o, "final": final}


@partial(jax.jit, static_argnums=0)
def gradients(run: Any, arrays: dict[str, Array]) -> dict[str, Array]:
    """By all arrays; the outputs' cotangent is v, which needs no memory."""
    return jax.vjp(lambda arrays: run(**arrays), arrays)[1](arrays["v"])[0]


@jax.jit
def difference(found: Array, expected: Array) -> Array:
    """Between the last row and the only one, relative, by root mean squares."""
    found, expected = (x[-1].astype(jnp.float32) for x in (found, expected))
    return jnp.sqrt(jnp.square(found - expected).sum() / jnp.square(expected).sum())


def check_last_row(of: Any, run: Any, arrays: dict[str, Array]) -> None:
    """The last row of a call is what that row gives by itself."""
    alone = of(run, {name: x[-1:] for name, x in arrays.items()})
    found = of(run, arrays)
    for name, expected in alone.items():
        assert difference(found[name], expected) <= 0.001, name


@pytest.mark.gpu
@pytest.mark.slow(days=28, group="long")
@pytest.mark.parametrize("of", [outputs, gradients], ids=["outputs", "gradients"])
@pytest.mark.parametrize("large", LARGE, ids=str)
def test_more_elements_than_an_integer_counts(large: Any, of: Any) -> None:
    gate, heads, *widths = large
    row = drawn(gate, (1, STEPS, heads), tuple(widths))
    rows = 9 if of is outputs else ROWS[gate]
    arrays = {name: repeated(row.pop(name), rows) for name in list(row)}
    check_last_row(of, gated_linear_attention_mosaic_gpu, arrays)


@pytest.mark.gpu
@pytest.mark.slow(days=28, group="long")
@pytest.mark.parametrize("keys", [64, 256])
@pytest.mark.parametrize("gate", GATES)
def test_more_rows_than_a_grid_has_heads(gate: str, keys: int) -> None:
    arrays = drawn(gate, (MANY, 64, 1), (64 if gate == "log_key_gate" else keys, 64))
    for of in (outputs, gradients):
        check_last_row(of, gated_linear_attention_mosaic_gpu, arrays)


@pytest.mark.gpu
@pytest.mark.slow(days=28, group="long")
@pytest.mark.parametrize("gate", GATES)
def test_rows_of_as_many_chunks_as_a_grid_has(gate: str) -> None:
    """The last chunks are what they are by themselves, as their first step forgets all before it."""
    arrays = drawn(gate, (1, MOST_BLOCKS * PIECE, 1), (64, 64))
    arrays[gate] = arrays[gate].at[:, -LAST].set(-200)
    last = {name: x[:, -LAST:] for name, x in arrays.items()}
    for of in (outputs, gradients):
        found = of(gated_linear_attention_mosaic_gpu, arrays)
        for name, expected in of(gated_linear_attention_mosaic_gpu, last).items():
            steps = found[name] if name == "final" else found[name][:, -LAST:]
            assert difference(steps, expected) <= 0.001, name
