"""The tokens that each device of a split sequence holds, and their change of places."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, Shaped

from jaxblt.parallel.sequence import SeqAxis
from jaxblt.validation import check_fields


@dataclass(frozen=True)
class SequenceLayout:
    """The order of the tokens along the sequence axis of n devices.

    - "contiguous": device i holds the i-th of n equal stretches. Everything but attention needs this order.
    - "zigzag": device i holds the i-th and the (2n - 1 - i)-th of 2n equal stretches. A causal mask then gives
      every device the same work, where contiguous stretches give the last one 2n / (n + 1) times the average.
    """

    kind: Literal["contiguous", "zigzag"] = "contiguous"

    def __post_init__(self) -> None:
        check_fields(self)

    def order(self, length: int, devices: int) -> Int[np.ndarray, " T"]:
        """Return the token at each place.

        `x[:, order]` lays rows out on the host, and `y[:, np.argsort(order)]` undoes it.

        Raises:
          ValueError: the length does not divide into equal stretches.
        """
        self.check(length, devices)
        if self.kind == "contiguous":
            return np.arange(length)
        stretches = np.arange(length).reshape(2 * devices, -1)
        pairs = [stretches[[i, 2 * devices - 1 - i]] for i in range(devices)]
        return np.concatenate(pairs).reshape(-1)

    def places(self, length: int, axis: SeqAxis | None) -> Int[Array, "T"]:
        """Return the place in their row of the `length` tokens in hand, which `axis` splits."""
        if axis is None:
            return jnp.arange(length, dtype=jnp.int32)
        order = jnp.asarray(self.order(axis.whole(length), axis.size), jnp.int32)
        return order.reshape(axis.size, -1)[lax.axis_index(axis.name)] if axis.manual else order

    def check(self, length: int, devices: int) -> None:
        """Raise ValueError, naming the length and the fix, unless it divides into equal stretches."""
        parts = devices * (2 if self.kind == "zigzag" else 1)
        if length % parts:
            raise ValueError(
                f"a sequence of T = {length} tokens does not divide into the {parts} equal stretches of the "
                f"{self.kind} layout over {devices} devices: "
                f"pad it to {-(-length // parts) * parts}, or choose data.seq_len so"
            )


CONTIGUOUS = SequenceLayout("contiguous")
"""Tokens lie on the devices in their order."""
ZIGZAG = SequenceLayout("zigzag")
"""Each device has one early and one late piece, so that causal attention is equal work everywhere."""


def layout_of(model: Any) -> SequenceLayout:
    """Return the order in which the model of a config wants its bytes where a mesh splits the sequence."""
    return getattr(model, "layout", CONTIGUOUS)


def to_zigzag(x: Shaped[Array, "B T ..."], axis: SeqAxis) -> Shaped[Array, "B T ..."]:
    """Swap the device's contiguous tokens for its zig-zag ones, by one pair of `ppermute`s.

    Call it inside an island.
    """
    first, second = jnp.split(x, 2, axis=1)
    even_route, odd_route = _routes(axis.size)
    low = lax.ppermute(first, axis.name, even_route)
    high = lax.ppermute(second, axis.name, odd_route)
    return jnp.concatenate(_by_parity(low, high, axis), 1)


def to_contiguous(x: Shaped[Array, "B T ..."], axis: SeqAxis) -> Shaped[Array, "B T ..."]:
    """Undo `to_zigzag`."""
    early, late = jnp.split(x, 2, axis=1)
    low, high = _by_parity(early, late, axis)
    even_route, odd_route = ([(there, here) for here, there in route] for route in _routes(axis.size))
    first = lax.ppermute(low, axis.name, even_route)
    second = lax.ppermute(high, axis.name, odd_route)
    return jnp.concatenate([first, second], 1)


def in_zigzag[T](run: Callable[..., T], *given: Any, axis: SeqAxis, swaps: bool) -> T:
    """Return `run(*given)`, pytrees of arrays [B, T, ...] in order, where `run` wants them in the zig-zag layout.

    Without `swaps` it takes them as they are.
    """
    if not swaps:
        return run(*given)
    y = run(*jax.tree.map(lambda leaf: to_zigzag(leaf, axis), given))
    return jax.tree.map(lambda leaf: to_contiguous(leaf, axis), y)


def _routes(devices: int) -> tuple[Sequence[tuple[int, int]], Sequence[tuple[int, int]]]:
    """Return where each device's first half (stretch 2i) and second half lie in zig-zag order.

    The second half is stretch 2i + 1. Even stretches reach every device once, and so do odd ones. Device m gets stretch
    m by the route of m's parity. It gets stretch 2n - 1 - m, of the other parity, by the other route.
    """
    home = [min(stretch, 2 * devices - 1 - stretch) for stretch in range(2 * devices)]
    return list(enumerate(home[0::2])), list(enumerate(home[1::2]))


def _by_parity(a: Array, b: Array, axis: SeqAxis) -> tuple[Array, Array]:
    """Return (a, b) on even devices, (b, a) on odd ones."""
    even = lax.axis_index(axis.name) % 2 == 0
    return jax.lax.select_n(even, b, a), jax.lax.select_n(even, a, b)
