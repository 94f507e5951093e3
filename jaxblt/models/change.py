"""Parts of a state that change under a condition, where they lie.

A loop, of at most one turn but for `repeat_in`: XLA changes what a loop carries in place, and a condition copies it in
both branches. Small arrays are carried together, as each would be cut out and copied by a kernel of its own. There is
no reverse-mode gradient.

Whether a loop goes on is a number, which its condition compares with 0. A condition that only hands over a carried
boolean launches nothing, and in a CUDA graph XLA then orders neither the loop nor its turns behind what they read.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from jaxblt.models.packed import pack_small


def change_if[S](due: Bool[Array, ""], change: Callable[[S], S], state: S) -> S:
    """Return `change(state)` if it is due, else the state."""

    def turn(carry: tuple[Array, Any]) -> tuple[Array, Any]:
        return jnp.int32(0), pack_small(change(carry[1].unpack()))

    return jax.lax.while_loop(_is_due, turn, (due.astype(jnp.int32), pack_small(state)))[1].unpack()


def change_in[S](module: nn.Module, due: Bool[Array, ""], change: Callable[[Any, S], S], state: S) -> S:
    """Return `change(module, state)` if it is due, else the state; `change` may call the module's parts."""

    def once(module: nn.Module, state: S) -> tuple[Array, S]:
        return jnp.zeros((), bool), change(module, state)

    return repeat_in(module, due, once, state)


def repeat_in[S](
    module: nn.Module, due: Bool[Array, ""], change: Callable[[Any, S], tuple[Any, S]], state: S
) -> S:
    """Change the state as long as it is due; `change` returns whether it goes on, and the next state."""

    def turn(module: nn.Module, carry: tuple[Array, Any]) -> tuple[Array, Any]:
        goes_on, state = change(module, carry[1].unpack())
        return goes_on.astype(jnp.int32), pack_small(state)

    goes_on: Any = lambda _, carry: _is_due(carry)  # noqa: E731
    return nn.while_loop(goes_on, turn, module, (due.astype(jnp.int32), pack_small(state)))[1].unpack()


def _is_due(carry: tuple[Array, Any]) -> Array:
    return carry[0] > 0
