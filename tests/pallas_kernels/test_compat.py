import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels._compat import count_below


@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 33])
def test_counts_what_is_below(size: int) -> None:
    row = np.sort(np.random.default_rng(size).integers(-3, 9, size)).astype(np.int32)
    wanted = np.arange(-5, 12, dtype=np.int32)
    np.testing.assert_array_equal(
        count_below(jnp.asarray(row), jnp.asarray(wanted)), np.searchsorted(row, wanted)
    )


@pytest.mark.slow(days=28, group="costly")
def test_counts_where_an_axis_is_left_to_the_partitioner() -> None:
    mesh = jax.make_mesh((4, 2), ("rows", "columns"), axis_types=(AxisType.Auto,) * 2)
    rows, wanted = jnp.arange(32, dtype=jnp.int32).reshape(8, 4), jnp.arange(9, dtype=jnp.int32)
    find = jax.vmap(lambda row: count_below(row, wanted))
    with jax.set_mesh(mesh):
        found = jax.jit(jax.shard_map(find, in_specs=P("rows"), out_specs=P("rows"), axis_names={"rows"}))(
            rows
        )
    np.testing.assert_array_equal(found, find(rows))
