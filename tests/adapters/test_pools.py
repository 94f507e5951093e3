"""What a router carries of a document: the next document begins without it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.adapters.pools import Pools, Smooth
from jaxblt.mixers.marks import mark

IDS = jnp.asarray([[1, 1, 2, 2, 2]], jnp.int32)
TIME = jnp.asarray([[3, 4, 0, 1, 2]], jnp.int32)
ONES = jnp.ones((1, 5, 1), jnp.float32)
CORES = {
    "pools": (Pools(size=4, lag=2), (2.0 * ONES, ONES, ONES, TIME)),
    "smooth": (Smooth(), (0.5 * ONES, ONES)),
}


@pytest.mark.parametrize("entered", [True, False], ids=["by a call", "by a device"])
@pytest.mark.parametrize("name", CORES)
def test_nan_stays_in_its_document(name: str, entered: bool) -> None:
    """Of the first of two documents in a stretch, which began before it, in a call with a state or on a device."""
    core, streams = CORES[name]
    carry = core.zero(streams)

    @jax.jit
    def after(carry):
        summary = core.run(streams, mark(IDS, 1), carry if entered else None)[1]
        return core.join(carry, summary)

    poisoned = jax.tree.map(lambda x: x + jnp.nan, carry)
    jax.tree.map(np.testing.assert_array_equal, after(poisoned), after(carry))
