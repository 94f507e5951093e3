"""Rows of recall over a gap, drawn on the device."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from experiments.benchmark.tasks.recall_rows import Rows, distinct
from jaxblt.data.tasks import GapRecall
from jaxblt.data.vocab import OFFSET


def draw_rows(task: GapRecall, key: Array, gaps: Int[Array, "B"], length: int) -> Rows:
    """Draw rows as `GapRecall.draw` does, each of its own gap; fillers follow up to `length`, and none is scored.

    One length for all gaps is one program for all of them.

    Args:
      task: the symbols and the pairs; its gaps play no part.
      key: of the random numbers.
      gaps: fillers between pairs and questions, at most length - 3 pairs.
      length: positions of a row.
    """
    count, parts = gaps.shape[0], jax.random.split(key, 4)
    keys, values = (distinct(k, jnp.zeros((task.symbols,)), count, task.pairs) for k in parts[:2])
    order = distinct(parts[2], jnp.zeros((task.pairs,)), count, task.pairs)
    stream = 2 * task.symbols + jax.random.randint(parts[3], (count, length), 0, task.fillers)
    shown, row = 2 * task.pairs, jnp.arange(count)[:, None]
    stream = stream.at[:, 0:shown:2].set(keys).at[:, 1:shown:2].set(task.symbols + values)
    places = shown + gaps[:, None] + jnp.arange(task.pairs)[None]
    stream = stream.at[row, places].set(jnp.take_along_axis(keys, order, 1))
    answers = task.symbols + jnp.take_along_axis(values, order, 1)
    targets = jnp.zeros_like(stream).at[row, places].set(answers)
    scored = jnp.zeros(stream.shape, bool).at[row, places].set(True)
    return Rows(stream + OFFSET, targets + OFFSET, scored)


def draw_gaps(key: Array, count: int, least: int, most: int) -> Int[Array, "B"]:
    """Draw gaps of `least` to `most`, short ones more often: their logarithms are spread evenly."""
    spread = jax.random.uniform(key, (count,), jnp.float32) * math.log((most + 1) / least)
    return jnp.clip((least * jnp.exp(spread)).astype(jnp.int32), least, most)
