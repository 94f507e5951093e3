"""Functions of scores: what becomes of scale q.k, less ALiBi's penalty, before the softmax."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Score = Callable[[Any, Any, Any, Any], Any]
"""score(s, h, q, k): elementwise, of a score, its head and the positions of its query and key; differentiated by s."""


@dataclass(frozen=True)
class SoftCap:
    """Scores bent into -cap..cap: cap tanh(s / cap) (Gemma 2, 2408.00118).

    Raises:
      ValueError: cap is not positive.
    """

    cap: float

    def __post_init__(self) -> None:
        if not self.cap > 0:
            raise ValueError(f"SoftCap.cap must be above 0, got {self.cap!r}")

    def __call__(self, s: Float[Array, "..."], h: Any, q: Any, k: Any) -> Float[Array, "..."]:
        return self.cap * jnp.tanh(s / self.cap)


def check_score(score: Score | None) -> None:
    """Raise ValueError unless a function of scores gives one fp32 number for each."""
    if score is None:
        return
    s, h, q, k = ((1, 2, 1, 3, 5), (1, 2, 1, 1, 1), (1, 1, 1, 3, 1), (1, 1, 1, 1, 5))
    places = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in (h, q, k)]
    found = jax.eval_shape(score, jax.ShapeDtypeStruct(s, jnp.float32), *places)
    if getattr(found, "shape", None) != s or found.dtype != jnp.float32:
        raise ValueError(
            f"score(s, h, q, k) must give one fp32 number for each score, and {score!r} gave {found} for "
            f"fp32{list(s)}: use elementwise functions of s"
        )
