"""The count that a document's routes ask for."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxblt.mixers.driver.sequence import read
from jaxblt.mixers.slots.state_count import count_by_spread


def test_the_count_is_of_slots_that_the_documents_routes_spread_over() -> None:
    """One document goes to 8 slots of 12 in turn, the next to two; a hole between tokens counts for nothing."""
    ids = np.asarray([[1] * 16 + [2] * 8 + [-2] * 8])
    slots = np.concatenate([np.arange(16) % 8, np.arange(8) % 2, 7 + np.arange(8) % 5])

    def run(routes: jax.Array) -> jax.Array:
        rows = read(jnp.zeros((1, 32, 4)), jnp.asarray(ids, jnp.int32), None, None, width=4)
        return count_by_spread(rows, routes)

    routes = jax.nn.one_hot(jnp.asarray(slots)[None, :, None], 12)
    found = np.asarray(jax.jit(run)(routes))[0]
    counts = np.concatenate([np.minimum(np.arange(1, 17), 8), np.minimum(np.arange(1, 9), 2)])
    whole = np.isin(np.arange(24), [0, 1, 2, 3, 4, 5, 6, 7, 15, 17, 23])
    expected = np.clip((counts - 4) / 8, 0, 1)
    np.testing.assert_allclose(found[:24][whole], expected[whole], atol=1e-5)
    gradient = jax.jit(jax.grad(lambda routes: jnp.sum(run(routes))))(routes)
    assert not np.any(gradient)
