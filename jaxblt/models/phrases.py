"""Words of text and phrases of them, as rows of hash tables."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, UInt32

from jaxblt.data.vocab import OFFSET, VOCAB_SIZE

NONE, LETTER, ALONE, MORE = range(4)
MULTIPLIER, JOINED = 0x9E3779B1, 0x85EBCA6B
"""Odd, so that powers of the first have inverses mod 2^32."""


def byte_kinds() -> np.ndarray:
    """Return what each id is to words, Int32[vocabulary].

    Letters, digits, "'" and characters of two bytes make words with their neighbours. Each other character is a word
    alone, except spaces and control characters, which are none. Further bytes of a character belong to its first.
    """
    kinds = np.full(VOCAB_SIZE, NONE, np.int32)
    for byte in range(256):
        if byte < 0x80:
            kind = LETTER if chr(byte).isalnum() or byte == ord("'") else ALONE if byte > ord(" ") else NONE
        else:
            kind = MORE if byte < 0xC0 else LETTER if byte < 0xE0 else ALONE
        kinds[OFFSET + byte] = kind
    return kinds


def phrase_rows(
    digits: Int[Array, "B T"], ids: Int[Array, "B T"], there: Bool[Array, "B T"], *, longest: int, bits: int
) -> Int[Array, "B T K"]:
    """Return the rows, of 2^bits, of the phrases of 1 to `longest` words that end at each byte; -1 where none ends.

    A word's hash is Σ_i (digit_{t-i} + 1) a^i mod 2^32 over its bytes, by prefix sums; that of a phrase joins the hash
    of all its words but the last to the last one's.

    Args:
      digits: of the bytes; bytes with equal digits are equal.
      ids: of the bytes, which say where words begin.
      there: bytes of the record; what lies across others is no word, but may be a phrase.
      longest: words of the longest phrase.
      bits: of a row.
    """
    at = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
    begins, ends = _edges(jnp.where(there, jnp.asarray(byte_kinds())[ids], NONE))
    start = jax.lax.cummax(jnp.where(begins, at, 0), axis=1)
    last = jax.lax.cummax(jnp.where(ends, at, -1), axis=1)
    before = jnp.where(start > 0, _take(last, start - 1), -1)  # the end of the word before
    word = _hashes(digits, start)
    phrase, is_whole, rows = word, ends, []
    for length in range(longest):
        if length:
            head = _take(phrase, before)
            phrase = (head ^ (head >> jnp.uint32(15))) * jnp.uint32(JOINED) + word
            is_whole = ends & (before >= 0) & _take(is_whole, before)
        row = (phrase ^ (phrase >> jnp.uint32(16))) * jnp.uint32(MULTIPLIER) >> jnp.uint32(32 - bits)
        rows.append(jnp.where(is_whole, row.astype(jnp.int32), -1))
    return jnp.stack(rows, -1)


def _edges(kind: Int[Array, "B T"]) -> tuple[Bool[Array, "B T"], Bool[Array, "B T"]]:
    """Return where words begin and end."""
    at = jnp.arange(kind.shape[1], dtype=jnp.int32)[None]
    lead = jax.lax.cummax(jnp.where(kind == MORE, -1, at), axis=1)
    own = jnp.where(lead < 0, NONE, _take(kind, lead))
    behind = jnp.pad(own, ((0, 0), (1, 0)))[:, :-1]
    joins = (own != NONE) & ((kind == MORE) | ((own == LETTER) & (behind == LETTER)))
    follows = jnp.pad(joins, ((0, 0), (0, 1)))[:, 1:]
    return (own != NONE) & ~joins, (own != NONE) & ~follows


def _hashes(digits: Int[Array, "B T"], start: Int[Array, "B T"]) -> UInt32[Array, "B T"]:
    """Return the hash of the bytes from `start` to each byte."""
    length = digits.shape[1]
    inverse = np.uint32(pow(MULTIPLIER, -1, 1 << 32))
    powers = np.cumprod(np.append(np.uint32(1), np.full(length, MULTIPLIER, np.uint32)), dtype=np.uint32)
    falling = np.cumprod(np.append(np.uint32(1), np.full(length - 1, inverse)), dtype=np.uint32)
    terms = (digits + 1).astype(jnp.uint32) * jnp.asarray(falling)[None]
    sums = jnp.cumsum(terms, 1, dtype=jnp.uint32)
    before = jnp.where(start > 0, _take(sums, start - 1), jnp.uint32(0))
    return (sums - before) * jnp.asarray(powers[:length])[None]


def _take(values: Array, places: Int[Array, "B T"]) -> Array:
    return jnp.take_along_axis(values, jnp.maximum(places, 0), 1)
