"""Seeds of dropout in the blocks of an unrolled stack, drawn at once.

A draw by Threefry is about 200 operations whatever the number of seeds, and XLA looks at each in tens of passes.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.core.scope import LazyRng

from jaxblt.random_keys import GENERATOR

A_BLOCK = 2
"""Calls of dropout in a block: behind the mixer and behind the MLP."""


def draw_seeds(stack: nn.Module, blocks: Mapping[str, Sequence[str]]) -> list[jax.Array] | None:
    """Return for each block the UInt32[2, 2] that its two `Dropout`s would draw by `make_rng("dropout")`.

    None without such an rng. None also for keys of a generator other than Threefry, which may draw other bits under
    `vmap`.

    Args:
      stack: the stack that holds the blocks.
      blocks: the names of the blocks in each period, by the name of the period.
    """
    if not stack.has_rng("dropout"):
        return None
    assert stack.scope is not None
    above = LazyRng.create(stack.scope.rngs["dropout"])
    typed = jnp.issubdtype(above.rng.dtype, jax.dtypes.prng_key)
    if not typed or str(jax.random.key_impl(above.rng)) != GENERATOR:
        return None
    stack.scope.rng_counters["dropout"] += 1
    call = stack.scope.rng_counters["dropout"]
    paths = [(period, block) for period, own in blocks.items() for block in own]
    numbers = [
        [_number((*above.suffix, *path, f"Dropout_{i}", call)) for i in range(A_BLOCK)] for path in paths
    ]

    def draw(number: Any) -> jax.Array:
        return jax.random.bits(jax.random.fold_in(above.rng, number), (2,), jnp.uint32)

    drawn = jax.vmap(jax.vmap(draw))(np.array(numbers, np.uint32))
    # XLA would draw the seeds again in each block without this barrier
    return list(jnp.unstack(jax.lax.optimization_barrier(drawn)))


def _number(suffix: Sequence[str | int]) -> int:
    """Return what Flax folds into a key for a path and the number of a draw there."""
    digest = hashlib.sha1()
    for part in suffix:
        if flax.config.flax_fix_rng_separator:
            digest.update(b"\00")
        digest.update(part.encode() if isinstance(part, str) else part.to_bytes((part.bit_length() + 7) // 8))
    return int.from_bytes(digest.digest()[:4])
