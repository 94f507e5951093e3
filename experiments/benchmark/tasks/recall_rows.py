"""Rows of multi-query associative recall, drawn on the device: a host that draws them would set the pace."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from experiments.benchmark.tasks.small_models import Rows
from jaxblt.data.tasks import MQAR
from jaxblt.data.vocab import OFFSET


def draw_rows(task: MQAR, key: Array, count: int) -> Rows:
    """Draw `count` rows as `MQAR.draw` makes them, of other random numbers.

    With half the vocabulary squared to the power of the pairs there are so many rows that none comes twice.
    """
    half, shown, room = task.symbols // 2, 2 * task.pairs, (task.positions - 2 * task.pairs) // 2
    parts = jax.random.split(key, 4)
    keys = distinct(parts[0], jnp.zeros((half,)), count, task.pairs)
    values = half + distinct(parts[1], jnp.zeros((task.symbols - half,)), count, task.pairs)
    gaps = jnp.arange(1, room + 1, dtype=jnp.float32)
    places = shown + 2 * distinct(parts[2], (task.power - 1) * jnp.log(gaps), count, task.pairs)
    stream = jax.random.randint(parts[3], (count, task.positions + 1), 0, task.symbols)
    stream = stream.at[:, 0:shown:2].set(keys).at[:, 1:shown:2].set(values)
    row = jnp.arange(count)[:, None]
    stream = stream.at[row, places].set(keys)
    targets = stream[:, 1:].at[row, places].set(values)
    scored = jnp.zeros((count, task.positions), bool).at[row, places].set(True)
    return Rows(stream[:, :-1] + OFFSET, targets + OFFSET, scored)


def distinct(key: Array, log_weights: Array, rows: int, count: int) -> Int[Array, "B N"]:
    """Draw different indices a row, one after another, with chances that go by the weights: Gumbel's top k."""
    noise = jax.random.gumbel(key, (rows, log_weights.shape[0]), jnp.float32)
    return jax.lax.top_k(noise + log_weights[None], count)[1]
