"""Positions that enter a stack again, before chosen blocks."""

import dataclasses
from typing import Any, ClassVar, Literal

import flax.linen as nn
import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxblt.layers import dense
from jaxblt.mixers.driver.base import Clock, start_clock
from jaxblt.mixers.driver.counted import Counted
from jaxblt.mixers.driver.sequence import check_kind, read
from jaxblt.models.positions import PositionConfig, waves
from jaxblt.models.stack import StackConfig
from jaxblt.show import show
from jaxblt.validation import check_bounds, check_fields, whole

NAME = "positions"
"""The name of such a layer in a pattern."""
START = 0.03
"""Scale of the projection at the start: sinusoids are about as large as bytes' vectors. At 1 they drown them."""
Layers = Literal["all", "ends"] | int
"""Blocks before which positions enter: all, the first and the last, or every n-th from the first on."""


@dataclasses.dataclass(frozen=True)
class PositionLayerConfig:
    """y_t = W (sin, cos)(2 pi t / period) over all periods, t the token's place in its document.

    It is a mixer that reads nothing of its input, so a block adds positions to what passes. No MLP follows it.

    Attributes:
      dim: width D.
      causal: a place is the same in a bidirectional stack.
      periods: of the sinusoids, in tokens; `PositionConfig.genomic().periods` are those of genomes.
    """

    dim: int
    causal: bool = True
    periods: tuple[int, ...] = PositionConfig().periods

    bare: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "dim", "periods", least=1)
        if not self.periods:
            raise ValueError(
                "PositionLayerConfig.periods is (), which tells no place: give at least one, such as (8, 64)"
            )

    def build(self, *, dtype: Any = jnp.float32, name: str | None = None) -> "PositionLayer":
        """Build the module; phases are taken of whole numbers, the product is in `dtype`."""
        return PositionLayer(self, dtype, name=name)

    def init_state(self, batch_size: int, *, capacity: int, dtype: Any = jnp.float32) -> "PositionState":
        """Return the place before the first token."""
        return PositionState(start_clock(batch_size))


@flax.struct.dataclass
class PositionState:
    """The clock of each row."""

    clock: Clock

    __repr__ = show


class PositionLayer(nn.Module):
    """The layer of `PositionLayerConfig`."""

    config: PositionLayerConfig
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        state: PositionState | None = None,
    ) -> tuple[Float[Array, "B T D"], PositionState | None]:
        """Return what is added to the tokens, and the next state (None in training)."""
        check_kind(PositionState, state)
        config, clock = self.config, None if state is None else state.clock
        rows = read(x.astype(self.dtype), segment_ids, positions, clock, width=config.dim)
        place = positions if rows.tokens is None else rows.tokens.positions
        if place is None:
            place = rows.run(Counted(), jnp.zeros(x.shape[:2], jnp.int32))[0]
        project = dense(config.dim, axes=("features", "embed"), dtype=self.dtype, name="project", scale=START)
        y = rows.restore(project(waves(place, config.periods).astype(self.dtype)))
        return y, None if rows.clock is None else PositionState(rows.clock)


def with_positions(
    stack: StackConfig, layers: Layers, *, periods: tuple[int, ...] = PositionConfig().periods
) -> StackConfig:
    """Return the stack with a layer of sinusoidal positions before chosen blocks, each with its own projection.

    Args:
      stack: a stack over bytes or over the slots of patches; positions count these.
      layers: the blocks: "all", "ends" for the first and the last, or n for every n-th block from the first on.
      periods: periods of the sinusoids.

    Raises:
      ValueError: n is no whole number from 1, or the pattern has positions already.
    """
    if NAME in stack.pattern:
        raise ValueError(
            f"the stack has positions already, in pattern {stack.pattern!r}: give the one without"
        )
    if not isinstance(layers, str):
        whole("layers", layers, least=1, why=": every n-th block, or 'all' or 'ends'")
    last, names, acts = stack.num_layers - 1, [], []
    for i in range(stack.num_layers):
        chosen = (
            {"all": True, "ends": i in (0, last)}.get(layers) if isinstance(layers, str) else i % layers == 0
        )
        names += [NAME] * bool(chosen) + [stack.pattern[i % len(stack.pattern)]]
        acts += [stack.activation_of(i)] * (1 + bool(chosen))
    both = list(zip(names, acts, strict=True))
    period = next(n for n in range(1, len(both) + 1) if all(x == both[i % n] for i, x in enumerate(both)))
    return dataclasses.replace(
        stack,
        num_layers=len(names),
        pattern=tuple(names[:period]),
        activation=tuple(acts[:period]) if isinstance(stack.activation, tuple) else stack.activation,
        mixers={**stack.mixers, NAME: PositionLayerConfig(dim=stack.dim, periods=periods)},
    )
