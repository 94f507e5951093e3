"""The distance that two results may have: one table, by dtype and reduction length, never loosened.

Stored values are rounded to their dtype; sums of n terms are accumulated in fp32 (f64 for f64), where random rounding
errors grow as sqrt(n).
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

STORED = 4.0
"""Roundings to the stored dtype that a result may carry, in units of its epsilon."""

SUMMED = 16.0
"""Roundings of the accumulator, in units of its epsilon and of the square root of the number of terms."""

DIFFERENCED = 2e-3
"""Error of a difference of fourth order in fp32, in units of a typical directional derivative."""


def bound(dtype: Any, n: int = 1) -> float:
    """Return STORED * eps(dtype) + SUMMED * eps(accumulator) * sqrt(n).

    For sums of n terms that are of the sum's own size.
    """
    eps = float(jnp.finfo(dtype).eps)
    accumulator = min(eps, float(jnp.finfo(jnp.float32).eps))
    return STORED * eps + SUMMED * accumulator * n**0.5


def worst(actual: Any, expected: Any) -> float:
    """Return the largest |actual - expected| in units of the root mean square of `expected`.

    The unit is 1 if that is zero.
    """
    actual, expected = np.asarray(actual).astype(np.float64), np.asarray(expected).astype(np.float64)
    if actual.shape != expected.shape:
        raise AssertionError(f"shape {actual.shape} where {expected.shape} was expected")
    if not actual.size:
        return 0.0
    scale = float(np.sqrt(np.mean(expected**2))) or 1.0
    difference = float(np.max(np.abs(actual - expected))) / scale
    return difference if np.isfinite(difference) else float("inf")


def typical(actual: Any, expected: Any) -> float:
    """Return the root mean square of actual - expected in units of that of `expected`."""
    actual, expected = np.asarray(actual).astype(np.float64), np.asarray(expected).astype(np.float64)
    scale = float(np.sqrt(np.mean(expected**2))) or 1.0
    difference = float(np.sqrt(np.mean((actual - expected) ** 2))) / scale
    return difference if np.isfinite(difference) else float("inf")
