"""The parameters of a model that hold NaN or inf: for errors about results that are not finite."""

from typing import Any

import jax
import jax.numpy as jnp

SHOWN = 3
"""Parameters that an error names; it counts the others."""


def find_nonfinite(params: Any) -> list[str]:
    """Return the paths, such as "model/head/kernel", of the leaves that hold NaN or inf."""
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
    }
    finite = jax.device_get(_are_finite(tuple(leaves.values())))
    return [name for name, ok in zip(leaves, finite, strict=True) if not ok]


def explain_nonfinite(params: Any) -> str:
    """Say which parameters hold NaN or inf, or that none does, and what to do."""
    names = find_nonfinite(params)
    if not names:
        return "all parameters are finite, so the model overflows on these bytes: compute in float32"
    others = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    shown = ", ".join(names[:SHOWN])
    return f"parameters {shown}{others} hold NaN or inf: take those of an earlier checkpoint"


@jax.jit
def _are_finite(leaves: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(jnp.isfinite(leaf).all() for leaf in leaves)
