"""The governor: a bound on the size of weight updates that follows how often it is reached.

Norms of dW = s V diag(c) U come from the Gram matrices V^T V and U U^T [r, r]. No matrix of a weight's size is made.
"""

import dataclasses
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxblt.layers import named
from jaxblt.side_outputs import sow_metric, sow_next
from jaxblt.validation import check_bounds, check_fields

STEPS = 48
"""Of the power iteration: its norm is within 1e-3 of the largest singular value."""
HIGHEST = jax.lax.Precision.HIGHEST


@dataclasses.dataclass(frozen=True)
class Governor:
    """Bound on updates: codes are scaled by min(1, tau / norm of dW), at each site and token.

    tau is a number beside V and U. A train step moves it by the share of tokens over the bound. It is multiplied by
    `grow` if the share is above `high`, by `shrink` if below `low`. The new tau holds from the next step on. No
    gradient reaches it.

    Attributes:
      norm: "frobenius", or "spectral" for the largest singular value.
      start: tau before training.
      least, most: bounds of tau.
      low, high: shares of tokens between which tau stays.
      shrink, grow: factors.
    """

    norm: Literal["frobenius", "spectral"] = "frobenius"
    start: float = 1.0
    least: float = 0.1
    most: float = 5.0
    low: float = 0.02
    high: float = 0.1
    shrink: float = 0.99
    grow: float = 1.05

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "least", above=0)
        check_bounds(self, "start", least=self.least, most="most")
        check_bounds(self, "low", least=0, below="high", why=": they are shares of tokens")
        check_bounds(self, "high", most=1)
        check_bounds(self, "shrink", above=0, below=1)
        check_bounds(self, "grow", above=1)

    def next_tau(self, tau: Float[Array, "..."], rate: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return tau after a step in which the share `rate` of tokens was over the bound."""
        factor = jnp.where(rate > self.high, self.grow, jnp.where(rate < self.low, self.shrink, 1.0))
        return jnp.clip(tau * factor, self.least, self.most)


def grams(
    v: Float[Array, "K r"], u: Float[Array, "r N"], scale: float
) -> tuple[Float[Array, "r r"], Float[Array, "r r"]]:
    """Return s^2 V^T V and U U^T, in fp32."""
    v, u = v.astype(jnp.float32), u.astype(jnp.float32)
    left = jnp.matmul(v.T, v, precision=HIGHEST) * jnp.float32(scale**2)
    return left, jnp.matmul(u, u.T, precision=HIGHEST)


def square_norm(
    governor: Governor, code: Float[Array, "B T E"], left: Float[Array, "r r"], right: Float[Array, "r r"]
) -> Float[Array, "B T"]:
    """Return the square of the norm of dW at each code, whose numbers repeat to r."""
    if governor.norm == "frobenius":
        count = code.shape[-1]
        both = left * right
        folded = both.reshape(count, both.shape[0] // count, count, -1).sum((1, 3))
        return jnp.einsum("bte,ef,btf->bt", code, folded, code, precision=HIGHEST)
    return _largest(jnp.repeat(code, left.shape[0] // code.shape[-1], axis=-1), left, right)


def _largest(
    code: Float[Array, "B T r"], left: Float[Array, "r r"], right: Float[Array, "r r"]
) -> Float[Array, "B T"]:
    """Return the largest eigenvalue of diag(c) L diag(c) R, by power iteration, with the quotient's gradient."""

    def times(matrix: Array, x: Array) -> Array:
        return jnp.einsum("rs,bts->btr", matrix, x, precision=HIGHEST)

    def quotient(x: Array) -> Array:
        y = times(right, x)
        above, below = jnp.sum(code * y * times(left, code * y), -1), jnp.sum(x * y, -1)
        return above / jnp.where(below > 0, below, 1.0)

    still_code, still_left, still_right = jax.lax.stop_gradient((code, left, right))

    def step(_: Any, x: Array) -> Array:
        x = still_code * times(still_left, still_code * times(still_right, x))
        return x / jnp.maximum(jnp.max(jnp.abs(x), -1, keepdims=True), jnp.finfo(jnp.float32).tiny)

    rank = left.shape[0]
    start = jnp.cos(jnp.arange(rank, dtype=jnp.float32)) + 2  # in no plane that codes or grams lie in
    return quotient(jax.lax.fori_loop(0, STEPS, step, jnp.broadcast_to(start[None, None], code.shape)))


def bounded(
    governor: Governor,
    tau: Float[Array, ""],
    code: Float[Array, "B T E"],
    left: Float[Array, "r r"],
    right: Float[Array, "r r"],
) -> tuple[Float[Array, "B T E"], Float[Array, ""]]:
    """Return codes within the bound, and the share of those over it among codes that are not 0."""
    square, tau = square_norm(governor, code, left, right), jax.lax.stop_gradient(tau)
    over = square > tau * tau
    # Keep the root away from 0, where its derivative is infinite
    factor = jnp.where(over, tau / jnp.sqrt(jnp.where(over, square, 1.0)), 1.0)
    told = jnp.any(code != 0, -1)
    rate = jnp.sum(over & told, dtype=jnp.float32) / jnp.maximum(jnp.sum(told, dtype=jnp.float32), 1)
    return code * factor[..., None], rate


def govern(
    site: nn.Module,
    governor: Governor,
    v: Float[Array, "K r"],
    u: Float[Array, "r N"],
    scale: float,
    code: Float[Array, "B T E"] | None,
) -> Float[Array, "B T E"]:
    """Return a site's code within its bound; sow metrics "violations" and the next "tau"."""
    tau = site.param("tau", named(nn.initializers.constant(governor.start), None), (1,), jnp.float32)[0]
    code = jnp.ones((1, 1, 1), jnp.float32) if code is None else code
    code, rate = bounded(governor, tau, code, *grams(v, u, scale))
    sow_metric(site, "violations", rate)
    sow_next(site, "tau", governor.next_tau(tau, rate))
    return code
