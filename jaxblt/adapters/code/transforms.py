"""Transforms of a router's code, in the order of `AdapterConfig.code`. Each keeps the code causal.

A transform is a frozen dataclass with `check(adapter)`, `init_state(batch_size, numbers)` and
`apply(router, name, code, moment, rows, state) -> (code, state)`. `router` is the module that its parameters belong to.
"""

import dataclasses
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxblt.adapters.code.pools import Smooth
from jaxblt.layers import Linear, named
from jaxblt.validation import check_bounds, check_fields


class Stateless:
    """Base of transforms without a state."""

    def check(self, adapter: Any) -> None:
        """Raise ValueError where the adapter's code cannot be transformed so."""

    def init_state(self, batch_size: int, numbers: int) -> tuple[()]:
        """Return no state."""
        return ()


@dataclasses.dataclass(frozen=True)
class Confidence(Stateless):
    """Code c0 + u (c - c0) with u = sigmoid(g / T): g a product of the router's hidden layer, log T learned.

    Attributes:
      start: u before training.
    """

    start: float = 0.9

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "start", above=0, below=1)

    def apply(
        self, router: nn.Module, name: str, code: Float[Array, "B T E"], moment: Any, rows: Any, state: Any
    ) -> tuple[Float[Array, "B T E"], Any]:
        """Return the code, drawn towards the fallback where the router is not sure."""
        bias = nn.initializers.constant(math.log(self.start / (1 - self.start)))
        sizes, zeros = {"e": 1}, nn.initializers.zeros
        head = Linear(
            "btd,de->bte", sizes, ("features", None), bias=bias, kernel_init=zeros, name=name, parent=router
        )
        log_temperature = router.param(f"{name}_log_t", named(zeros, None), (1,), jnp.float32)
        sure = jax.nn.sigmoid(head(moment.hidden) * jnp.exp(-log_temperature)[None, None])
        return moment.fallback + sure * (code - moment.fallback), state


@dataclasses.dataclass(frozen=True)
class Ema:
    """Moving average e_k = d e_{k-1} + (1 - d) c_k over a document's chunks or tokens, from the fallback on.

    Attributes:
      decay: d.
    """

    decay: float = 0.9

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "decay", least=0, below=1)

    def check(self, adapter: Any) -> None:
        """Raise ValueError for a level that gives a document one code."""
        if adapter.router.level == "prefix":
            raise ValueError(
                "Ema smooths codes along a document, and level 'prefix' gives it one: leave it out"
            )

    def init_state(self, batch_size: int, numbers: int) -> Float[Array, "B E"]:
        """Return e - c0 before the first token."""
        return jnp.zeros((batch_size, numbers), jnp.float32)

    def apply(
        self, router: nn.Module, name: str, code: Float[Array, "B T E"], moment: Any, rows: Any, state: Any
    ) -> tuple[Float[Array, "B T E"], Any]:
        """Return the smoothed code."""
        moves = moment.changes[..., None]
        keep = jnp.where(moves, jnp.float32(self.decay), 1.0)
        added = jnp.where(moves, jnp.float32(1 - self.decay) * (code - moment.fallback), 0.0)
        e, after = rows.run(Smooth(), (keep, added), state)
        return moment.fallback + e, after


@dataclasses.dataclass(frozen=True)
class Clamp(Stateless):
    """Code c min(1, most / RMS(c)), the root mean square over the numbers of a code: it does not depend on the rank.

    Attributes:
      most: bound of the RMS.
    """

    most: float = 3.0

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "most", above=0)

    def apply(
        self, router: nn.Module, name: str, code: Float[Array, "B T E"], moment: Any, rows: Any, state: Any
    ) -> tuple[Float[Array, "B T E"], Any]:
        """Return the code within the bound; the gradient at a code of 0 is finite."""
        square = jnp.mean(code * code, -1, keepdims=True)
        # Keep the root away from 0, where its derivative is infinite
        inside = square <= self.most**2
        root = jnp.sqrt(jnp.where(inside, jnp.float32(self.most**2), square))
        return code * (jnp.float32(self.most) / root), state


@dataclasses.dataclass(frozen=True)
class Sparse(Stateless):
    """Code with 0 for numbers below theta in size: a kernel may skip blocks whose number is 0.

    Attributes:
      theta: threshold.
    """

    theta: float = 0.01

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "theta", above=0)

    def apply(
        self, router: nn.Module, name: str, code: Float[Array, "B T E"], moment: Any, rows: Any, state: Any
    ) -> tuple[Float[Array, "B T E"], Any]:
        """Return the code; a number that is cut has no gradient."""
        return jnp.where(jnp.abs(code) < jnp.float32(self.theta), 0.0, code), state


@dataclasses.dataclass(frozen=True)
class TopK(Stateless):
    """Code of the k largest numbers of a bank, which sum to 1 again; of a free code the largest in size. Others are 0.

    Attributes:
      k: numbers that are kept; all of them leave the code as it is.
    """

    k: int = 1

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "k", least=1)

    def check(self, adapter: Any) -> None:
        """Raise ValueError for more numbers than the code has."""
        if self.k > adapter.numbers:
            raise ValueError(
                f"TopK.k = {self.k} numbers of a code that has {adapter.numbers}: use a smaller k"
            )

    def apply(
        self, router: nn.Module, name: str, code: Float[Array, "B T E"], moment: Any, rows: Any, state: Any
    ) -> tuple[Float[Array, "B T E"], Any]:
        """Return the code with exactly k numbers that may differ from 0."""
        # Compare by pairs: the partitioner would gather the batch for a sort
        size, index = jnp.abs(code), jnp.arange(code.shape[-1])
        one, other = size[..., :, None], size[..., None, :]
        earlier = (index[None, :] < index[:, None])[None, None]
        larger = (other > one) | ((other == one) & earlier)
        mask = jnp.sum(larger, -1, dtype=jnp.int32) < self.k
        kept = jnp.where(mask, code, 0.0)
        if router.adapter.blocks is not None:  # pyright: ignore[reportAttributeAccessIssue]
            total = jnp.sum(kept, -1, keepdims=True)
            kept = kept * (jnp.sum(code, -1, keepdims=True) / jnp.where(total == 0, 1.0, total))
        return kept, state
