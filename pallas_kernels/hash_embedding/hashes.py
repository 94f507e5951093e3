"""The row of its table that each n-gram of a byte sequence has."""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Int, UInt32

from pallas_kernels._mix import mix

# odd multipliers of the rolling polynomial, one a hash function
_MULTIPLIERS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F)


def ngram_rows(
    ids: Int[Array, "B T"],
    history: UInt32[Array, "B R"],
    run: Int[Array, "B T"] | None,
    *,
    sizes: Sequence[int],
    table_size: int,
    functions: int = 1,
    history_run: Int[Array, "B R"] | None = None,
) -> Int[Array, "B T G"]:
    """Hash the n-grams before each byte, for each hash function and each n of `sizes`.

    The hash is sum_{i<n} (id_{t-i} + 1) a^i mod 2^32, mixed, mod table_size. Bytes before the document count as 0, so
    an n-gram never reaches into another document. Powers and prefix sums are shared by all n, so the longest n-gram
    costs as much as all of them.

    Args:
      ids: byte ids.
      history: id + 1 of the R = max(sizes) - 1 bytes before, oldest first, 0 where there is none.
      run: a number for the document of each byte, 0 for the one that `history` is of; None for one document.
      sizes: the n of the n-grams, each ending at the byte.
      table_size: rows of each table.
      functions: hash functions, each with tables of its own.
      history_run: the document of each byte of `history`, if not 0.

    Raises:
      ValueError: `history` is not as long as the longest n-gram reaches back.

    Source: Byte Latent Transformer (2412.09871), sec. 3.2.1; the mixing is MurmurHash3's finaliser.
    """
    reach, length = max(sizes) - 1, ids.shape[1]
    if history.shape != (ids.shape[0], reach):
        raise ValueError(
            f"hash_embedding: {max(sizes)}-grams need the {reach} bytes before each row, {(ids.shape[0], reach)}, "
            f"got a history of shape {history.shape}"
        )
    run = jnp.zeros_like(ids) if run is None else run
    history_run = jnp.zeros_like(history, jnp.int32) if history_run is None else history_run
    padded = jnp.concatenate([history, (ids + 1).astype(jnp.uint32)], 1)
    runs = jnp.concatenate([history_run, run], 1)
    back = [slice(reach - i, reach - i + length) for i in range(reach + 1)]
    terms = [jnp.where(runs[:, here] == run, padded[:, here], jnp.uint32(0)) for here in back]
    rows = []
    for f in range(functions):
        multiplier = _MULTIPLIERS[f % len(_MULTIPLIERS)] + 2 * (f // len(_MULTIPLIERS))
        total, power = jnp.zeros_like(terms[0]), 1
        for i, term in enumerate(terms):
            total = total + term * jnp.uint32(power)
            power = power * multiplier % 2**32
            if i + 1 in sizes:
                rows.append(mix(total) % jnp.uint32(table_size))
    return jnp.stack(rows, -1).astype(jnp.int32)
