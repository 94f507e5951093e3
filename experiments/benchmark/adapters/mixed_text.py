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
    """Text of several domains.

    Attributes:
      text: of all of them.
      first, size: where each domain's text begins, and how long it is.
      table: what each domain writes for a byte.
      continues: a span goes on where the one before it stopped; else it begins at a place of its own.
    """

    text: UInt8[Array, "N"]
    first: Int[Array, "E"]
    size: Int[Array, "E"]
    table: UInt8[Array, "E 256"]
    continues: bool = flax.struct.field(pytree_node=False)

    @property
    def domains(self) -> int:
        """Return how many there are."""
        return self.table.shape[0]

    def reach(self, length: int, spans: tuple[int, int]) -> int:
        """Return how many bytes are read from one place on, at most."""
        return length + 1 if self.continues else min(spans[1], length + 1)


class Rows(NamedTuple):
    """Full rows: a byte's domain is that of its span; `since` counts the bytes of the span before it."""

    inputs: Int[Array, "B T"]
    targets: Int[Array, "B T"]
    domain: Int[Array, "B T"]
    target_domain: Int[Array, "B T"]
    since: Int[Array, "B T"]


def check_texts(mix: Mix, names: list[str], length: int, spans: tuple[int, int]) -> None:
    """Raise ValueError unless the text of each domain holds a row or a span: a draw would begin before it."""
    reach = mix.reach(length, spans)
    for name, size in zip(names, np.asarray(mix.size).tolist(), strict=True):
        if size < reach:
            raise ValueError(
                f"the text of {name!r} has {size} bytes, and {reach} are read at once: add text, or set "
                "--settings.length or --settings.spans lower"
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
    reach = mix.reach(length, spans)
    place = _stratified(keys[3], rows, 1 if mix.continues else most)
    starts = (place * (mix.size[of_span] - reach).astype(jnp.float32)).astype(jnp.int32) + mix.first[of_span]
    index = starts[:, :1] + t if mix.continues else _take(starts, span) + since
    written = mix.table[domain, mix.text[index]].astype(jnp.int32) + OFFSET
    return Rows(written[:, :-1], written[:, 1:], domain[:, :-1], domain[:, 1:], since[:, 1:])


def _take(values: Int[Array, "B S"], index: Int[Array, "B T"]) -> Int[Array, "B T"]:
    return jnp.take_along_axis(values, index, 1)


def _stratified(key: Array, rows: int, columns: int) -> Float[Array, "B S"]:
    """Draw numbers uniform in [i/n, (i+1)/n) for row i of n."""
    row = jnp.arange(rows, dtype=jnp.float32)[:, None]
    return (row + jax.random.uniform(key, (rows, columns), jnp.float32)) / jnp.float32(rows)


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
    size = np.full(domains, len(text), np.int32)
    return _mix(text, np.zeros(domains, np.int32), size, ciphers(domains, seed, letters), continues=True)


def natural_mix(texts: dict[str, bytes]) -> Mix:
    """Return domains that have a text each."""
    size = np.array([len(text) for text in texts.values()], np.int32)
    first = np.concatenate([[0], np.cumsum(size)[:-1]]).astype(np.int32)
    same = np.tile(np.arange(256, dtype=np.uint8), (len(texts), 1))
    return _mix(b"".join(texts.values()), first, size, same, continues=False)


def _mix(text: bytes, first: np.ndarray, size: np.ndarray, table: np.ndarray, *, continues: bool) -> Mix:
    arrays = (np.frombuffer(text, np.uint8), first, size, table)
    return Mix(*(jnp.asarray(array) for array in arrays), continues=continues)
