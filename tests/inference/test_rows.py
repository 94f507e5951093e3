"""Rows taken out of every decoding state of the library, and put in, wherever its rows lie."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.adapters import AdapterConfig, RouterConfig, attach
from jaxblt.inference import Decoder, init_decoder, put_rows, take_rows
from jaxblt.inference.unroll import unroll_state
from jaxblt.mixers import MACConfig, MAGConfig, NeuralMemoryConfig, SlotMemoryConfig, init_state
from jaxblt.models import ByteLMConfig
from tests.answers.runs import BYTES, LOCAL, PATCHER, PATCHES
from tests.mixers.configs import ALL

ENTROPY = ByteLMConfig(stack=LOCAL)
MEMORIES = {
    "mac": MACConfig(dim=8),
    "mag": MAGConfig(dim=8),
    "neural_memory": NeuralMemoryConfig(dim=8),
    "slot_memory": SlotMemoryConfig(dim=8),
}
MIXERS = {name: config for name, config in (ALL | MEMORIES).items() if config.causal}
DECODERS = {
    "bytes": Decoder(BYTES),
    "patches": Decoder(PATCHES, PATCHER, ENTROPY),
    "contexts": Decoder(PATCHES, replace(PATCHER, entropy_context=8), ENTROPY),
    "routed": Decoder(attach(BYTES, AdapterConfig(rank=2, blocks=2, router=RouterConfig()))),
    "routed_blocks": Decoder(
        attach(BYTES, AdapterConfig(rank=2, blocks=2, router=RouterConfig(per="block")))
    ),
}
STARTS = {name: partial(init_state, config, capacity=20) for name, config in MIXERS.items()}
STARTS |= {name: partial(init_decoder, decoder, num_bytes=40) for name, decoder in DECODERS.items()}
STARTS |= {f"{name}_unrolled": lambda n, name=name: unroll_state(STARTS[name](n)) for name in DECODERS}
"""From a number of rows to a state."""

ROWS, PART = 13, 11
"""Numbers of rows that no other axis of these states has as its size."""


def told(state):
    return jax.tree.map(lambda x: (x.shape, x.dtype), state)


@pytest.mark.parametrize("name", STARTS)
def test_rows_lie_where_they_are_looked_for(name):
    """Taken rows have the shapes of a state of so many rows, and fit back in."""
    whole, part = (jax.eval_shape(partial(STARTS[name], n)) for n in (ROWS, PART))
    rows = jax.ShapeDtypeStruct((PART,), jnp.int32)
    assert told(jax.eval_shape(take_rows, whole, rows)) == told(part)
    assert told(jax.eval_shape(put_rows, whole, rows, part)) == told(whole)


def filled(state, seed):
    """Return the state with random numbers."""
    rng = np.random.default_rng(seed)
    draw = lambda x: jnp.asarray(rng.integers(0, 2 if x.dtype == bool else 99, x.shape), x.dtype)  # noqa: E731
    return jax.tree.map(draw, state)


@pytest.mark.slow(days=28, group="costly")
def test_rows_that_were_put_are_taken_and_others_stay():
    """Of a state in which layers stand before rows, and an entropy model reads each row twice."""
    shapes = jax.eval_shape(lambda: (STARTS["contexts"](4), STARTS["contexts"](2)))
    whole, part = (filled(shape, seed) for seed, shape in enumerate(shapes))
    rows, rest = jnp.asarray([3, 1]), jnp.asarray([0, 2])
    after, take = jax.jit(put_rows)(whole, rows, part), jax.jit(take_rows)
    jax.tree.map(np.testing.assert_array_equal, take(after, rows), part)
    jax.tree.map(np.testing.assert_array_equal, take(after, rest), take(whole, rest))
    keys = after.entropy.model.stack.periods[0].k
    np.testing.assert_array_equal(keys[:, np.array([3, 1, 7, 5])], part.entropy.model.stack.periods[0].k)
