"""Functions that properties are given by name; a script shows those that its property uses."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np


def host(y: Any) -> np.ndarray:
    """Return an array of any framework in f64 on the host."""
    return np.asarray(y.detach().cpu().double() if hasattr(y, "detach") else y, np.float64)


def torch_gradient(function: Callable[[Any], Any], x: np.ndarray) -> np.ndarray:
    """Return the gradient of the sum of cubes of what a function of PyTorch returns."""
    leaf = function(x).new_tensor(x, requires_grad=True)
    (function(leaf).double() ** 3).sum().backward()
    return leaf.grad.cpu().double().numpy()


def jax_gradient(function: Callable[[Any], Any], x: np.ndarray) -> np.ndarray:
    """Return the gradient of the sum of cubes of what a function of JAX returns."""
    return np.asarray(jax.grad(lambda x: (function(x).astype("float32") ** 3).sum())(x), np.float64)


def form(state: Any) -> list[tuple[str, tuple[int, ...]]]:
    """Return dtypes and shapes of the arrays in a state of tuples, lists, dicts and classes."""
    if hasattr(state, "dtype"):
        return [(str(state.dtype), tuple(state.shape))]
    inside = getattr(state, "__dict__", state)
    parts = (
        inside.values() if isinstance(inside, dict) else inside if isinstance(inside, tuple | list) else ()
    )
    return [found for part in parts for found in form(part)]
