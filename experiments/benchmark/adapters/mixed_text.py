"""Rows whose domain changes without a mark, drawn on the device: a host that draws them would set the pace."""

from math import factorial
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt8

from jaxblt.data.vocab import OFFSET

LETTERS = 26
FREQUENT = bytes(letter - ord("a") for letter in b"etaoinshrdlcumwfgypbvkjxqz")
"""Numbers of the letters, the most frequent one of English first."""


@flax.struct.dataclass
class Mix:
    """One text of several domains; a span goes on where the one before it stopped.

    Attributes:
      text: of all of them.
      table: what each domain writes for a byte.
    """

    text: UInt8[Array, "N"]
    table: UInt8[Array, "E 256"]

    @property
    def domains(self) -> int:
        """Return how many there are."""
        return self.table.shape[0]


class Rows(NamedTuple):
    """Full rows: a byte's domain is that of its span; `since` counts the bytes of the span before it."""

    inputs: Int[Array, "B T"]
    targets: Int[Array, "B T"]
    domain: Int[Array, "B T"]
    target_domain: Int[Array, "B T"]
    since: Int[Array, "B T"]


def check_text(mix: Mix, length: int) -> None:
    """Raise ValueError unless the text holds a row: a draw would begin before it."""
    if mix.text.size < length + 1:
        raise ValueError(
            f"the text has {mix.text.size} bytes, and {length + 1} are read at once: add text, or set "
            "--settings.length lower"
        )


def draw_rows(mix: Mix, key: Array, rows: int, length: int, spans: tuple[int, int]) -> Rows:
    """Draw rows of spans that follow each other, neighbours of different domains.

    Lengths of spans are drawn so that every octave is as likely. Row i of n begins in the i-th of n equal parts of a
    domain's text, so rows of one batch hardly overlap.

    Args:
      mix: the domains.
      key: of the draw.
      rows: of the batch.
      length: T of a row.
      spans: the shortest and the longest span in bytes.
    """
    most = length // spans[0] + 2
    keys = jax.random.split(key, 4)
    low, high = np.log(spans[0]), np.log(spans[1])
    sizes = jnp.exp(jax.random.uniform(keys[0], (rows, most), minval=low, maxval=high)).astype(jnp.int32)
    ends = jnp.cumsum(sizes, 1)
    steps = jax.random.randint(keys[1], (rows, most), 1, mix.domains)
    begin = jax.random.randint(keys[2], (rows, 1), 0, mix.domains)
    of_span = (begin + jnp.cumsum(steps, 1)) % mix.domains
    t = jnp.arange(length + 1, dtype=jnp.int32)[None]
    span = jnp.sum(ends[:, None, :] <= t[..., None], -1, dtype=jnp.int32)
    domain, since = _take(of_span, span), t - _take(ends - sizes, span)
    starts = (_stratified(keys[3], rows) * (mix.text.size - length - 1)).astype(jnp.int32)
    index = starts + t
    written = mix.table[domain, mix.text[index]].astype(jnp.int32) + OFFSET
    return Rows(written[:, :-1], written[:, 1:], domain[:, :-1], domain[:, 1:], since[:, 1:])


def _take(values: Int[Array, "B S"], index: Int[Array, "B T"]) -> Int[Array, "B T"]:
    return jnp.take_along_axis(values, index, 1)


def _stratified(key: Array, rows: int) -> Float[Array, "B 1"]:
    """Draw numbers uniform in [i/n, (i+1)/n) for row i of n."""
    row = jnp.arange(rows, dtype=jnp.float32)[:, None]
    return (row + jax.random.uniform(key, (rows, 1), jnp.float32)) / jnp.float32(rows)


def ciphers(count: int, seed: int = 0, letters: int = LETTERS) -> np.ndarray:
    """Return UInt8[count, 256]: permutations of the bytes that permute letters and keep case.

    The first changes nothing.

    All bytes that are no letters stay, so that a permuted text is as hard to read as any other, and words keep their
    ends. A cipher is undone by a change of rank `letters` - 1 at most.

    Args:
      count: of the ciphers, all of them different.
      seed: of the draw.
      letters: that are permuted, the most frequent ones of English.

    Raises:
      ValueError: so few letters have not as many permutations.
    """
    if count > factorial(letters):
        raise ValueError(
            f"{letters} letters have {factorial(letters)} permutations, and {count} are asked for: use more letters"
        )
    rng = np.random.default_rng(seed)
    places = np.sort(np.frombuffer(FREQUENT, np.uint8)[:letters])
    orders = [tuple(range(letters))]
    while len(orders) < count:
        order = tuple(rng.permutation(letters).tolist())
        orders += [order] if order not in orders else []
    tables = np.tile(np.arange(256, dtype=np.uint8), (count, 1))
    for table, order in zip(tables, orders, strict=True):
        for first in (ord("A"), ord("a")):
            table[first + places] = first + places[list(order)]
    return tables


def conflict_mix(text: bytes, domains: int, seed: int = 0, letters: int = LETTERS) -> Mix:
    """Return one text under permutations of its letters: what is right for a domain is wrong for the others."""
    table = ciphers(domains, seed, letters)
    return Mix(jnp.asarray(np.frombuffer(text, np.uint8)), jnp.asarray(table))
