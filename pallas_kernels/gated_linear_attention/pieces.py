"""Heads of any width as heads of 64 or 128 channels, which kernels take.

A state [K, V] is cut into pieces [K', V']. A piece of keys reads and writes only its rows, and outputs are sums over
them; a piece of values has columns of its own. So pieces are heads, exactly, and channels of zeros that fill them up do
nothing.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

NARROW, WIDE = 64, 128
"""Channels of a piece."""


class Pieces(NamedTuple):
    """The pieces that heads are cut into.

    Attributes:
      key_heads: J.
      group: heads of values to one of keys.
      keys, key_width: pieces of a head's keys, and channels of each.
      values, value_width: the same of values.
      repeated: whether every piece has keys of its own, as under gates by key channel. Else pieces share keys.
      is_whole: whether nothing is cut, filled up or repeated.
    """

    key_heads: int
    group: int
    keys: int
    key_width: int
    values: int
    value_width: int
    repeated: bool
    is_whole: bool

    @classmethod
    def of(cls, k: Any, v: Any, *, by_key: bool) -> "Pieces":
        """Return the pieces of keys [B, T, J, K] and values [B, T, H, V].

        `by_key` says whether gates are of key channels.
        """
        (key_heads, width), (heads, breadth) = k.shape[2:], v.shape[2:]
        (keys, key_width), (values, value_width) = _cut(width), _cut(breadth)
        if (
            by_key and heads * keys * values * key_width % WIDE
        ):  # channels of all heads are taken so many at a time
            key_width = WIDE
        group = heads // key_heads
        is_whole = (keys * key_width, values * value_width, keys * values) == (width, breadth, 1)
        repeated = by_key and group * values > 1
        return cls(
            key_heads, group, keys, key_width, values, value_width, repeated, is_whole and not repeated
        )

    def of_keys(self, x: Float[Array, "B T J K"]) -> Float[Array, "B T J2 K2"]:
        """Cut queries, keys or their gates."""
        if self.is_whole:
            return x
        x = _filled(x, 3, self.keys * self.key_width).reshape(*x.shape[:2], -1, self.key_width)
        return jnp.repeat(x, self.group * self.values, axis=2) if self.repeated else x

    def of_values(self, x: Float[Array, "B T H V"]) -> Float[Array, "B T H2 V2"]:
        """Cut values, each for all pieces of its keys."""
        if self.is_whole:
            return x
        x = _filled(x, 3, self.values * self.value_width)
        x = x.reshape(*x.shape[:2], self.key_heads, 1, self.group * self.values, self.value_width)
        return jnp.repeat(x, self.keys, axis=3).reshape(*x.shape[:2], -1, self.value_width)

    def of_heads(self, x: Float[Array, "B T H"]) -> Float[Array, "B T H2"]:
        """Repeat gates of heads for their pieces."""
        if self.is_whole:
            return x
        x = jnp.repeat(x, self.values, axis=2).reshape(*x.shape[:2], self.key_heads, 1, -1)
        return jnp.repeat(x, self.keys, axis=3).reshape(*x.shape[:2], -1)

    def of_states(self, x: Float[Array, "B H K V"]) -> Float[Array, "B H2 K2 V2"]:
        """Cut states."""
        if self.is_whole:
            return x
        x = _filled(_filled(x, 2, self.keys * self.key_width), 3, self.values * self.value_width)
        x = x.reshape(
            -1, self.key_heads, self.group, self.keys, self.key_width, self.values, self.value_width
        )
        x = x.transpose(0, 1, 3, 2, 5, 4, 6)
        return x.reshape(len(x), -1, self.key_width, self.value_width)

    def outputs(self, o: Float[Array, "B T H2 V2"], width: int) -> Float[Array, "B T H V"]:
        """Join outputs of whole heads with so many channels, summed over the pieces of keys."""
        if self.is_whole:
            return o
        o = o.reshape(*o.shape[:2], self.key_heads, self.keys, self.group, -1)[..., :width]
        return jnp.sum(o, 3, dtype=jnp.float32).astype(o.dtype).reshape(*o.shape[:2], -1, width)

    def states(self, x: Float[Array, "B H2 K2 V2"], keys: int, values: int) -> Float[Array, "B H K V"]:
        """Join states of whole heads with so many channels."""
        if self.is_whole:
            return x
        x = x.reshape(len(x), self.key_heads, self.keys, self.group, self.values, *x.shape[2:])
        x = x.transpose(0, 1, 3, 2, 5, 4, 6)
        x = x.reshape(len(x), self.key_heads * self.group, self.keys * self.key_width, -1)
        return x[:, :, :keys, :values]


def _cut(channels: int) -> tuple[int, int]:
    """Return pieces, and channels of each."""
    return (1, NARROW) if channels <= NARROW else (-(-channels // WIDE), WIDE)


def _filled(x: Any, axis: int, width: int) -> Any:
    """Fill x up with zeros behind it."""
    pads = [(0, 0)] * x.ndim
    pads[axis] = (0, width - x.shape[axis])
    return jnp.pad(x, pads) if width > x.shape[axis] else x
