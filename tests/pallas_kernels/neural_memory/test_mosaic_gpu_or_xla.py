"""Hopper kernels without derivatives, XLA with them: which of both runs, and when it goes first."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._dispatch import Device
from pallas_kernels.neural_memory import MemoryState, bench, explain, neural_memory
from pallas_kernels.neural_memory.mosaic_gpu_or_xla import neural_memory_mosaic_gpu_or_xla
from pallas_kernels.neural_memory.shapes import SHAPES, NeuralMemoryShape
from pallas_kernels.neural_memory.xla import neural_memory_xla
from tests.pallas_kernels.linear_state import equations, packed

SHAPE = NeuralMemoryShape("h2_d128", 2, 700, 2, 128, 256, 256)
KERNEL = "wgmma_ref"
"""The product of a Mosaic kernel on tensor cores."""
HOPPER = Device("gpu", (9, 0), "NVIDIA H200")
MILLION = NeuralMemoryShape("h1_d256_t1048576_c2048", 1, 1 << 20, 1, 256, 1024, 2048)


@pytest.fixture
def arrays() -> dict[str, Any]:
    """Of rows with documents, the first of which continues a memory."""
    *streams, m1, m2 = bench.arrays(SHAPE)
    state = tuple(jnp.broadcast_to(m, (SHAPE.batch, *m.shape)) for m in (m1, m2))
    options = {"segment_ids": packed(SHAPE.length), "initial_state": MemoryState(state, state)}
    return {"streams": (*streams, (m1, m2)), "options": options}


def call(op: Any, arrays: dict[str, Any]) -> Any:
    options = arrays["options"] | {"output_final_state": True, "output_trace": True}
    return op(*arrays["streams"], chunk_size=SHAPE.chunk, **options)


def pulled(op: Any, arrays: dict[str, Any]) -> Any:
    """Derivatives of all that has one."""

    def of_streams(streams: Any, state: Any) -> Any:
        options = arrays["options"] | {"initial_state": state}
        return call(op, {"streams": streams, "options": options})

    found, pull = jax.vjp(of_streams, arrays["streams"], arrays["options"]["initial_state"])
    return pull(jax.tree.map(jnp.ones_like, found))


@pytest.mark.slow(days=28, group="costly", turn="pallas_kernels/neural_memory/test_mosaic_gpu_or_xla")
def test_derivatives_are_those_of_xla(arrays: dict[str, Any]) -> None:
    found, expected = (
        jax.jit(partial(pulled, op))(arrays) for op in (neural_memory_mosaic_gpu_or_xla, neural_memory_xla)
    )
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def rematted(*streams: Any, segment_ids: Any, initial_state: Any, **options: Any) -> Any:
    def run(streams: Any, ids: Any, state: Any) -> Any:
        return neural_memory_mosaic_gpu_or_xla(*streams, segment_ids=ids, initial_state=state, **options)

    return jax.checkpoint(run)(streams, segment_ids, initial_state)


@pytest.mark.slow(days=28, group="costly", turn="pallas_kernels/neural_memory/test_mosaic_gpu_or_xla")
@pytest.mark.parametrize("op", [neural_memory_mosaic_gpu_or_xla, rematted])
def test_kernels_run_where_no_derivative_is_taken(arrays: dict[str, Any], op: Any) -> None:
    def has_kernels(function: Any) -> bool:
        names = {e.primitive.name for e in equations(jax.make_jaxpr(partial(function, op))(arrays).jaxpr)}
        return KERNEL in names

    assert has_kernels(call)
    assert not has_kernels(pulled)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_goes_first_where_it_was_timed(shape: NeuralMemoryShape) -> None:
    given = jax.eval_shape(partial(bench.arrays, shape))
    line = explain(*given[:6], given[6:], device=HOPPER, chunk_size=shape.chunk)
    first = shape.hidden > 0 and shape.chunk >= 512
    assert line.startswith(f"neural_memory: {'mosaic_gpu_or_xla' if first else 'xla'} on NVIDIA H200")


@pytest.mark.gpu
@pytest.mark.parametrize("remat", [False, True])
def test_on_a_gpu(arrays: dict[str, Any], remat: bool) -> None:
    """Derivatives compile, of a rematerialised call too, and are finite; values have a test by name."""
    op = rematted if remat else neural_memory_mosaic_gpu_or_xla
    values, derivatives = jax.jit(partial(call, op))(arrays), jax.jit(partial(pulled, op))(arrays)
    for x in jax.tree.leaves((values, derivatives)):
        assert not jnp.issubdtype(x.dtype, jnp.floating) or np.isfinite(np.asarray(x, np.float32)).all()


def read_and_pull(*given: Any) -> Any:
    """Outputs of what runs by itself, and derivatives by all it is given."""

    def run(*given: Any) -> Any:
        return neural_memory(*given[:6], given[6:], chunk_size=MILLION.chunk)

    y, pull = jax.vjp(run, *given)
    return run(*given), pull(jnp.ones_like(y))


@pytest.mark.gpu
def test_a_million_tokens_on_a_gpu() -> None:
    """Values and derivatives are finite over 512 chunks, and none is all zero."""
    for x in jax.tree.leaves(jax.jit(read_and_pull)(*bench.arrays(MILLION))):
        found = np.asarray(x, np.float32)
        assert np.isfinite(found).all()
        assert found.any()
