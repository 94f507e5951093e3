"""Codes from a learned codebook: a router may say one of so many codes only."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxblt.adapters.code.transforms import Stateless
from jaxblt.layers import named
from jaxblt.side_outputs import sow_loss, sow_metric
from jaxblt.validation import check_bounds, check_fields

HIGHEST = jax.lax.Precision.HIGHEST
SPREAD = 0.1
"""Standard deviation of entries about the code that training starts from."""


@dataclasses.dataclass(frozen=True)
class Codebook(Stateless):
    """The entry of a codebook that is nearest to the code (VQ-VAE, 1711.00937), from the first code on.

    Gradients of the entry are those of the code (straight through). Training pays |sg(c) - e|^2, which draws entries
    to codes, and `commitment` |c - sg(e)|^2, which draws codes to entries: means over the tokens that have a code.
    Sows the metric "entries_used", the exponential of the entropy of how often each entry is taken.

    Attributes:
      entries: of the codebook, which has as many numbers as the code.
      commitment: weight of the second part of the loss.
      weight: of both parts.
    """

    entries: int = 512
    commitment: float = 0.25
    weight: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "entries", least=2)
        check_bounds(self, "commitment", least=0)
        check_bounds(self, "weight", above=0)

    def apply(
        self, router: nn.Module, name: str, code: Float[Array, "B T E"], moment: Any, rows: Any, state: Any
    ) -> tuple[Float[Array, "B T E"], Any]:
        """Return the nearest entry; the fallback where there is no code yet."""
        start = router.adapter.start  # pyright: ignore[reportAttributeAccessIssue]

        def draw(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
            return start + SPREAD * jax.random.normal(key, shape, dtype)

        shape = (self.entries, code.shape[-1])
        book = router.param(f"{name}_entries", named(draw, None, None), shape, jnp.float32)
        # Leave out |c|^2, which is the same for all entries
        apart = jnp.sum(book * book, -1)[None, None] - 2 * jnp.einsum(
            "bte,ne->btn", code, book, precision=HIGHEST
        )
        chosen = jax.nn.one_hot(jnp.argmin(apart, -1), self.entries, dtype=jnp.float32)
        entry = jnp.einsum("btn,ne->bte", chosen, book, precision=HIGHEST)
        told = moment.known if rows.content is None else moment.known & rows.content
        tokens = told.astype(jnp.float32)
        self._sow(router, name, code, entry, chosen, tokens)
        kept = jnp.where(moment.known[..., None], entry, code)
        return code + jax.lax.stop_gradient(kept - code), state

    def _sow(
        self,
        router: nn.Module,
        name: str,
        code: Float[Array, "B T E"],
        entry: Float[Array, "B T E"],
        chosen: Float[Array, "B T N"],
        tokens: Float[Array, "B T"],
    ) -> None:
        count = jnp.maximum(jnp.sum(tokens), 1)
        still = jax.lax.stop_gradient

        def mean_square(x: Array) -> Float[Array, ""]:
            return jnp.sum(jnp.sum(x * x, -1) * tokens) / count

        both = mean_square(still(code) - entry) + self.commitment * mean_square(code - still(entry))
        sow_loss(router, name, jnp.float32(self.weight) * both)
        shares = jnp.einsum("btn,bt->n", chosen, tokens) / count
        sow_metric(router, "entries_used", jnp.exp(jnp.sum(jax.scipy.special.entr(shares))))
