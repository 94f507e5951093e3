"""Codes that are not finite: in calls with a state the fallback stands for them, and the state counts the tokens."""

import warnings
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int

from jaxblt.adapters.code.router import RouterState
from jaxblt.models.finite import explain_nonfinite


class CodeFallbackWarning(UserWarning):
    """Warning that a router's code was not finite: its adapter has the fallback there."""


def count_replaced(state: Any) -> Int[Array, "B"] | None:
    """Return tokens of each row whose code was not finite, over all routers in a state; None without a router."""
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, RouterState))
    # Axes in front of rows are layers of a scan
    found = [
        node.replaced.reshape(-1, node.replaced.shape[-1]).sum(0)
        for node in nodes
        if isinstance(node, RouterState)
    ]
    return sum(found[1:], found[0]) if found else None


def warn_replaced(counts: np.ndarray, params: Any) -> None:
    """Warn, with rows, tokens and the parameters that hold NaN, if any of `count_replaced` is not 0."""
    rows = np.flatnonzero(counts)
    if not len(rows):
        return
    warnings.warn(
        f"codes of {len(rows)} of {len(counts)} rows were not finite, at {counts.sum():,} tokens of rows "
        f"{rows.tolist()}: the router's fallback stands for them; {explain_nonfinite(params)}",
        CodeFallbackWarning,
        stacklevel=3,
    )
