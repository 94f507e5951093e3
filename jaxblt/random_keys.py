"""Random keys whose generator does not depend on the process's settings."""

from typing import Any

import jax
from jaxtyping import Key

GENERATOR = "threefry2x32"
"""Under `vmap` each of its keys draws by itself. Those of JAX_DEFAULT_PRNG_IMPL=rbg draw all rows from one key."""


def make_key(seed: Any) -> Key[jax.Array, ""]:
    """Return the key of a seed.

    The numbers are the same in every process, on every mesh and beside every other row.
    """
    return jax.random.key(seed, impl=GENERATOR)


def check_keys(keys: Key[jax.Array, "..."]) -> None:
    """Raise ValueError unless rows that draw by `keys` draw independently of each other."""
    found = str(jax.random.key_impl(keys))
    if found != GENERATOR:
        raise ValueError(
            f"keys of generator {found!r} draw the rows of a batch from one key: make them with "
            f"jax.random.key(seed, impl={GENERATOR!r})"
        )
