"""Assertions with the one table of tolerances, `jaxblt.testing.tolerances`."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from jaxblt.testing.tolerances import bound


def tol(dtype: Any, n: int = 1) -> dict[str, float]:
    """`rtol` and `atol` for a result of `dtype` whose terms are of the result's own size.

    Args:
      dtype: of the result under test, not of the reference.
      n: length of its longest reduction.
    """
    limit = bound(dtype, n)
    return {"rtol": limit, "atol": limit}


def relative_error(a: Any, b: Any) -> float:
    """|a - b| / |b| in f64, Euclidean norms over all elements; b is the reference. 0 if both are zero."""
    a, b = np.asarray(a).astype(np.float64), np.asarray(b).astype(np.float64)
    if a.shape != b.shape:
        raise ValueError(f"shapes differ: {a.shape} against {b.shape}")
    difference, size = np.linalg.norm(a - b), np.linalg.norm(b)
    if size == 0:
        return 0.0 if difference == 0 else float("inf")
    return float(difference / size)


def assert_close(actual: Any, expected: Any, dtype: Any = None, n: int = 1, what: str = "") -> None:
    """Every element within `tol`, its `atol` in units of the root mean square of `expected`.

    Args:
      actual: result under test.
      expected: the reference.
      dtype: of the computation; that of `actual` if None.
      n: length of the longest reduction.
      what: said in the failure.
    """
    limit = tol(actual.dtype if dtype is None else dtype, n)
    actual, expected = np.asarray(actual).astype(np.float64), np.asarray(expected).astype(np.float64)
    scale = float(np.sqrt(np.mean(expected**2))) if expected.size else 0.0
    atol = limit["atol"] * (scale or 1.0)
    np.testing.assert_allclose(actual, expected, rtol=limit["rtol"], atol=atol, err_msg=what)


def assert_norms_close(
    actual: Any, expected: Any, parts: Iterable[Any], dtype: Any, n: int = 1, what: str = ""
) -> None:
    """`assert_close` of norms, of each part: for gradients that cuDNN makes of bf16 numbers that nearly cancel.

    Where a query sees few keys its gradient is what is left of large terms, o rounded to bf16 among them, and beside
    many queries with small gradients no single element has to be within the tolerance.

    Args:
      actual, expected, dtype, n, what: as of `assert_close`.
      parts: indices, such as the rows, or masks of documents.
    """
    actual, expected = np.asarray(actual).astype(np.float64), np.asarray(expected).astype(np.float64)
    limit, scale = tol(dtype, n), float(np.sqrt(np.mean(expected**2)))
    for i, part in enumerate(parts):
        error, size = np.linalg.norm(actual[part] - expected[part]), np.linalg.norm(expected[part])
        allowed = limit["rtol"] * size + limit["atol"] * scale * expected[part].size ** 0.5
        assert error <= allowed, f"{what}, part {i}: {error:.3g} of {size:.3g}, allowed {allowed:.3g}"
