"""What a router may read of a document so far. A read is a part of `RouterConfig.reads`, and may be one of your own.

A read does not know how often codes come: it hands features to each level, and the router takes those that it needs.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxblt.adapters.code.levels import Level, levels_of
from jaxblt.adapters.code.pools import Smooth
from jaxblt.mixers.driver.sequence import Rows

Features = Mapping[Level, Float[Array, "B T _"]]
"""What each level reads at each token; nothing for a level that is not in it."""


@dataclasses.dataclass(frozen=True)
class RouterInput:
    """Input of a router's reads in one call.

    Attributes:
      config: the `RouterConfig`.
      rows: of the call; `rows.x` is the input, `rows.run` runs a core of the sequence driver.
      time: of each token in its document.
      bare: the input over its root mean square, as an index holds it.
      inverse_rms: 1 over that root mean square.
      scale: of the router's norm.
      base_vector: mean of `bare` over the chunk that lies `lag` chunks before the token's; 0 before it is complete.
      beside: arrays that the call passes beside x, by name: "side" features, and keys of "documents".
      aligned: whether rows are whole and chunks of documents are chunks of rows.
    """

    config: Any
    rows: Rows
    time: Int[Array, "B T"]
    bare: Float[Array, "B T D"]
    inverse_rms: Float[Array, "B T 1"]
    scale: Float[Array, "1 1 D"]
    base_vector: Float[Array, "B T D"]
    beside: Mapping[str, Array]
    aligned: bool

    @property
    def content(self) -> Bool[Array, "B T"]:
        """True for tokens, False for holes and padding."""
        return jnp.ones(self.time.shape, bool) if self.rows.content is None else self.rows.content

    @property
    def normed(self) -> Float[Array, "B T D"]:
        """The input behind the router's norm."""
        return self.bare * self.scale

    @property
    def chunk_mean(self) -> Float[Array, "B T D"]:
        """Mean of the normed input over the chunk that lies `lag` chunks before the token's."""
        return self.base_vector * self.scale

    @property
    def chunk(self) -> Int[Array, "B T"]:
        """Number of the token's chunk in its document."""
        return self.time // self.config.chunk

    @property
    def starts_chunk(self) -> Bool[Array, "B T"]:
        """True for the first token of each chunk."""
        return self.time % self.config.chunk == 0

    def hold_from_chunk_start(
        self, x: Float[Array, "B T F"], state: Any
    ) -> tuple[Float[Array, "B T F"], Any]:
        """Return, at each token, x of the first token of its chunk, and the state behind the call."""
        starts = self.starts_chunk[..., None]
        streams = jnp.where(starts, 0.0, 1.0), jnp.where(starts, x, 0.0)
        return self.rows.run(Smooth(), streams, state)


class Read(ABC):
    """A part of what a router reads: a frozen dataclass that says what it adds, and what it carries along a document.

    Attributes:
      name: of its state; no two reads of a router have the same, as names of parameters begin with it too.
    """

    name: ClassVar[str]

    @property
    def side(self) -> int:
        """Side features a token that it takes of the call."""
        return 0

    def check(self, config: Any) -> None:
        """Raise ValueError unless a router of this `RouterConfig` has use for the read."""
        levels = levels_of(config)
        if not any(self.width(config, 1, level) for level in levels):
            raise ValueError(
                f"RouterConfig.reads names {self}, which has nothing for level {' and '.join(levels)}: leave it out"
            )

    def zero(self, config: Any, batch_size: int, dim: int) -> Any:
        """Return the state at a document's start; arrays have the batch as leading axis."""
        return ()

    @abstractmethod
    def width(self, config: Any, dim: int, level: Level) -> int:
        """Return how many features a level's network gets, of rows of width `dim`; 0 for none."""

    @abstractmethod
    def hear(self, router: nn.Module, call: RouterInput, state: Any) -> tuple[Features, Any]:
        """Return what the call's tokens add, and the state behind them.

        Called inside the router's compact call, so `router.param` makes parameters. Features at a token may depend on
        this token and on earlier ones of its document. Those of level "chunk" may depend only on tokens up to the
        chunk's first.

        Args:
          router: the module.
          call: what it reads.
          state: None in a call without one, such as in training; the state behind the call counts for nothing then.
        """


@dataclasses.dataclass(frozen=True)
class ChunkMean(Read):
    """The mean of the normed input over the chunk that lies `lag` chunks before the token's."""

    name: ClassVar[str] = "chunk"

    def check(self, config: Any) -> None:
        """Pass: it costs nothing where no level reads it, and the default reads hold it."""

    def width(self, config: Any, dim: int, level: Level) -> int:
        """Return the width of the rows, 0 for a prefix."""
        return 0 if level == "prefix" else dim

    def hear(self, router: nn.Module, call: RouterInput, state: Any) -> tuple[Features, Any]:
        """Return the mean, which the router has pooled."""
        return {"chunk": call.chunk_mean, "token": call.chunk_mean}, ()
