"""Optimiser state in the host's memory."""

from typing import Any

import jax
import optax


def offload(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return the optimiser with its state in the host's pinned memory between updates.

    An update copies the state to the device, runs, and copies the new state back. Updates are those of `optimizer`,
    and each device holds the moments of its own share. Between steps the device holds no moments: with AdamW 8 of 12
    bytes a parameter. During an update it holds those of the arrays that XLA has in flight. So the peak falls where
    parameters are many arrays, and not where a scanned stack is one large array.

    Call `init` outside of `jax.jit`, where moments lie as their parameters do. Steps of `make_train_step` keep the old
    state if a gradient is not finite, and therefore read it on the device: use it in loops of your own.
    """

    def init(params: Any) -> Any:
        return _moved(optimizer.init(params), jax.memory.Space.Host)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = optimizer.update(updates, _moved(state, jax.memory.Space.Device), params)
        return updates, _moved(state, jax.memory.Space.Host)

    return optax.GradientTransformation(init, update)


def _moved(state: Any, space: Any) -> Any:
    """Return the state in a memory, except for its counters: moving them would tie them to one device."""
    return jax.tree.map(lambda x: jax.device_put(x, space) if x.ndim else x, state)
