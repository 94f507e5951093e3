"""N-grams of the released models: polynomials in 64-bit integers, computed in words of 32 bits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int, UInt32

from jaxblt.models.embeddings import HashConfig
from jaxblt.validation import check_bounds

PRIMES = (
    1000000007,
    5915587277,
    1500450271,
    3267000013,
    5754853343,
    4093082899,
    9576890767,
    3628273133,
    2860486313,
    5463458053,
    3367900313,
)
"""The base of each hash function; further functions begin again."""

MOST_GRAM, MOST_IDS, MOST_ROWS = 64, 1024, 1 << 21
"""Bytes of an n-gram, ids of a vocabulary and rows of a table for which sums of partial products fit 32 bits."""


@dataclass(frozen=True)
class PolynomialHash(HashConfig):
    """Tables whose row is sum_{i<n} id_{t-n+1+i} p^i in signed 64-bit integers, modulo the table.

    Windows begin with zeros at a document's start, as if its first bytes came behind bytes of id 0. The sum of the rows
    is not divided. Attributes are those of `HashConfig`.
    """

    table_size: int = 500_002

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self, "sizes", most=MOST_GRAM)
        check_bounds(self, "table_size", most=MOST_ROWS)

    @property
    def divisor(self) -> float:
        """The number that the sum of rows is divided by: none."""
        return 1.0

    def rows(self, ids: Any, history: Any, run: Any) -> Int[Array, "B T G"]:
        """Return the row of each table; arguments are those of `HashConfig.rows`."""
        reach, length = self.reach, ids.shape[1]
        run = jnp.zeros_like(ids) if run is None else run
        # Take a byte that is not there, 0 in the history, for id 0
        past = jnp.maximum(history.astype(jnp.int32) - 1, 0)
        padded = jnp.concatenate([past, ids], 1).astype(jnp.uint32)
        runs = jnp.concatenate([jnp.zeros_like(past), run], 1)
        back = [slice(reach - i, reach - i + length) for i in range(reach + 1)]
        terms = [jnp.where(runs[:, here] == run, padded[:, here], jnp.uint32(0)) for here in back]
        found = [
            hash_gram(terms[:n][::-1], PRIMES[f % len(PRIMES)], self.table_size)
            for f in range(self.functions)
            for n in self.sizes
        ]
        return jnp.stack(found, -1).astype(jnp.int32)


def hash_gram(grams: Sequence[UInt32[Array, "B T"]], prime: int, size: int) -> UInt32[Array, "B T"]:
    """Return sum_i g_i p^i modulo `size`, of a sum that wraps to a signed 64-bit integer.

    Powers are split into four limbs of 16 bits, whose products with ids are summed in 32 bits. The sum's eight bytes
    are then weighed by 256^b modulo `size`.
    """
    limbs = [jnp.zeros_like(grams[0]) for _ in range(4)]
    for i, gram in enumerate(grams):
        power = pow(prime, i, 1 << 64)
        limbs = [limb + gram * jnp.uint32(power >> 16 * j & 0xFFFF) for j, limb in enumerate(limbs)]
    total = low = carry = jnp.zeros_like(limbs[0])
    for j, limb in enumerate(limbs):
        # Split before the carry is added: the sum would not fit 32 bits
        low = (limb & jnp.uint32(0xFFFF)) + carry
        carry = (limb >> jnp.uint32(16)) + (low >> jnp.uint32(16))
        for b in range(2):
            byte = low >> jnp.uint32(8 * b) & jnp.uint32(0xFF)
            total = total + byte * jnp.uint32(pow(256, 2 * j + b, size))
    negative = low & jnp.uint32(0x8000)
    return (total + jnp.where(negative > 0, jnp.uint32(-(1 << 64) % size), jnp.uint32(0))) % jnp.uint32(size)
