"""Errors of attention and its gradients, and the gate that benchmarks have before anything is timed."""

from collections.abc import Sequence

import numpy as np


def errors(got: Sequence[np.ndarray], exact: Sequence[np.ndarray]) -> dict[str, float]:
    """Return |got - exact| / |exact| of o, dq, dk, dv."""
    pairs = zip(("o", "dq", "dk", "dv"), got, exact, strict=True)
    return {name: float(np.linalg.norm(a.astype(np.float64) - b) / np.linalg.norm(b)) for name, a, b in pairs}


def hold(name: str, found: dict[str, float], other: str, base: dict[str, float], within: float) -> None:
    """Let errors pass that are at most `within` times those of `base`; NaN is not.

    Raises:
      RuntimeError: one does not pass.
    """
    if wrong := {x: error for x, error in found.items() if not error <= within * base[x]}:
        raise RuntimeError(f"{name} errs by {wrong}, {other} by {base}: {within} times that is allowed")
