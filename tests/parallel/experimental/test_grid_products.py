"""Products over grids: equal to one device's, in the memory and with the exchanges that the table promises."""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

from jaxblt.parallel.experimental import cube_product, grid_product, make_grid
from jaxblt.parallel.experimental.grid_products import BLOCKS, CUBE_LEFT, CUBE_RIGHT, shift, skews
from jaxblt.profiling.plan import device_bytes
from jaxblt.testing.collectives import collectives
from tests.tolerances import assert_close

M, K, N = 24, 16, 32
PRODUCTS: dict[str, Any] = {
    "2": (grid_product, (2, 1), (BLOCKS, BLOCKS), {"collective-permute": 4}, 4),
    "2.5": (grid_product, (2, 2), (BLOCKS, BLOCKS), {"collective-permute": 2, "all-reduce": 1}, 4),
    "3": (cube_product, (2, 2), (CUBE_LEFT, CUBE_RIGHT), {"all-gather": 2, "reduce-scatter": 1}, 8),
}


@pytest.mark.parametrize("kind", PRODUCTS)
def test_values_gradients_memory_and_exchanges(kind: str) -> None:
    product, sides, specs, exchanged, parts = PRODUCTS[kind]
    draw = np.random.default_rng(0)
    a, b, g = (draw.standard_normal(shape).astype(np.float32) for shape in ((M, K), (K, N), (M, N)))
    mesh: Mesh = make_grid(*sides)
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip((a, b), specs, strict=True)]
    assert device_bytes(placed) == (a.nbytes + b.nbytes) // parts

    def run(a: jax.Array, b: jax.Array, g: jax.Array) -> Any:
        y, back = jax.vjp(lambda a, b: product(a, b, mesh=mesh), a, b)
        return y, *back(g)

    forward = jax.jit(lambda a, b: product(a, b, mesh=mesh)).lower(*placed).compile()
    assert Counter(c.kind for c in collectives(forward)) == exchanged
    for found, right, n in zip(jax.jit(run)(*placed, g), (a @ b, g @ b.T, a.T @ g), (K, N, M), strict=True):
        assert_close(found, jnp.asarray(right), n=n)


@pytest.mark.parametrize(("side", "depth"), [(1, 1), (2, 1), (3, 1), (4, 2), (4, 4), (6, 2)])
def test_blocks_meet_on_grids_of_any_side(side: int, depth: int) -> None:
    """Each device multiplies A[i, k] by B[k, j] of one k at a time, and its column of layers meets every k once."""
    places = [(i, j) for i in range(side) for j in range(side) for _ in range(depth)]
    blocks = []
    for pairs, own in zip(skews(side, depth), (1, 0), strict=True):
        source = {target: start for start, target in pairs}
        held = np.array([places[source[device]] for device in range(len(places))])
        assert all(held[device][1 - own] == places[device][1 - own] for device in range(len(places)))
        blocks.append(held[:, own].reshape(side, side, depth))
    left, right = blocks
    met = []
    source = [start for start, _ in shift(side)]
    for _ in range(side // depth):
        np.testing.assert_array_equal(left, right)
        met.append(left)
        left, right = left[:, source], right[source]
    np.testing.assert_array_equal(
        np.sort(np.concatenate(met, -1), -1), np.broadcast_to(np.arange(side), (side, side, side))
    )


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="side 3 and depth 2: the depth is at least 1 and divides"):
        make_grid(3, 2)
    with pytest.raises(ValueError, match="takes 9 devices, there are 8"):
        make_grid(3)
    with pytest.raises(ValueError, match=r"grid_product: \(3, 4\) and \(4, 4\) do not divide into 2 parts"):
        grid_product(jnp.ones((3, 4)), jnp.ones((4, 4)), mesh=make_grid(2))
