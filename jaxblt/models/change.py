"""Parts of a state that change under a condition, where they lie."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool


def change_if[S](due: Bool[Array, ""], change: Callable[[Any, S], S], module: nn.Module, state: S) -> S:
    """Return `change(module, state)` if it is due, else the state.

    A loop of at most one turn: XLA changes what a loop carries in place, and a condition copies it in both branches.
    There is no reverse-mode gradient.
    """

    def turn(module: nn.Module, carry: tuple[Array, S]) -> tuple[Array, S]:
        return jnp.zeros((), bool), change(module, carry[1])

    goes_on: Any = lambda _, carry: carry[0]  # noqa: E731
    return nn.while_loop(goes_on, turn, module, (due, state))[1]
