"""The mixture of boundary scores: how clearly each parts its bytes in two decides how much it weighs."""

from typing import Any

SHARPNESS = 4.0
"""Logits of the gate for each unit of separation: one unit more weighs 50 times as much."""
MOST = 8.0
"""The largest separation that counts: beyond it the two kinds of bytes do not overlap in any case."""
DECAY = 0.9
"""What a running separation keeps of itself in a step."""
TINY = 1e-12
"""Added to variances, so that two exact values part by `MOST` and not by infinity."""


def measure_separation(s: Any, above: Any, inside: Any) -> Any:
    """Return how far apart the bytes above and below a threshold lie, by score, in 0..`MOST`.

    Ashman's D (1994, AJ 108, 2348) is sqrt(2) |mean_1 - mean_0| / sqrt(var_1 + var_0). It does not depend on a score's
    scale, and above 2 it tells two normal distributions apart. It is 0 where no byte is above, or none below.

    Args:
      s: scores [..., K], of NumPy or of JAX.
      above: those above their threshold, alike.
      inside: bytes that count, [..., 1].
    """
    axes = tuple(range(s.ndim - 1))

    def moments(chosen: Any) -> tuple[Any, Any, Any]:
        weight = chosen.astype(s.dtype)
        count = weight.sum(axes, keepdims=True)
        mean = (s * weight).sum(axes, keepdims=True) / count.clip(1)
        spread = ((s - mean) ** 2 * weight).sum(axes, keepdims=True) / count.clip(1)
        return count, mean, spread

    (many, high, wide), (others, low, narrow) = moments(above & inside), moments(~above & inside)
    apart = 2**0.5 * abs(high - low) / (wide + narrow + TINY) ** 0.5
    both = ((many > 0) & (others > 0)).astype(s.dtype)
    return (apart * both).clip(0, MOST).reshape(-1)
