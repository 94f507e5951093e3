"""A mixer under test: parameters, compiled passes, and rows of documents to feed it."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxblt.mixers.driver.base import MixerConfig, State, init_state
from jaxblt.mixers.driver.choices import COLLECTION
from jaxblt.random_keys import make_key
from jaxblt.side_outputs import SIDE_OUTPUTS
from jaxblt.testing.tolerances import bound, worst

ROWS = 3

LONG = 300
"""Tokens of a long row: more than two blocks of 128, as kernels cut rows, and no multiple of one."""


class Subject:
    """The common part of all properties, so that each pass compiles once.

    Attributes:
      config: the mixer's.
      rows, length: shape of the inputs; `length` is at least 3 of the config's `segment_alignment`.
      x: inputs, [rows, length, D] fp32.
      params: parameters, unboxed.
    """

    def __init__(self, config: MixerConfig, *, length: int = 24, seed: int = 0, params: Any = None) -> None:
        self.config, self.seed, self.rows = config, seed, ROWS
        self.length = max(length, 3 * self.alignment)
        self.x = self.noise(1, (self.rows, self.length, config.dim))
        self.module = config.build()
        if params is None:
            made = nn.meta.unbox(jax.jit(self.module.init)(make_key(seed), self.x))
            params = {name: made[name] for name in made if name not in SIDE_OUTPUTS}
        self.params = params

    @functools.cached_property
    def long(self) -> "Subject":
        """Have the same mixer and parameters with rows of at least `LONG` tokens."""
        if self.length >= LONG:
            return self
        return Subject(self.config, length=LONG, seed=self.seed, params=self.params)

    @property
    def alignment(self) -> int:
        """Documents start at multiples of this."""
        return getattr(self.config, "segment_alignment", 1)

    @property
    def packed(self) -> bool:
        """True if rows may hold several documents."""
        return getattr(self.config, "packed", True)

    @property
    def limit(self) -> float:
        """The fp32 tolerance: the longest reduction is over a row's numbers."""
        return bound(jnp.float32, self.length * self.config.dim)

    def noise(self, salt: int, shape: tuple[int, ...]) -> np.ndarray:
        """Return standard normal fp32 numbers, fixed by the seed and `salt`."""
        return np.random.default_rng([self.seed, salt]).standard_normal(shape).astype(np.float32)

    @functools.cached_property
    def parallel(self) -> Callable[..., jax.Array]:
        """(params, x, segment_ids, positions=None) -> y: the training pass."""

        def forward(
            params: Any, x: jax.Array, ids: jax.Array | None, positions: jax.Array | None = None
        ) -> jax.Array:
            return self.module.apply(params, x, segment_ids=ids, positions=positions)[0]

        return jax.jit(forward)

    @functools.cached_property
    def gradient(self) -> Callable[..., Any]:
        """(params, x, segment_ids, dy) -> gradients of <dy, y> by parameters and inputs."""

        def gradients(params: Any, x: jax.Array, ids: jax.Array, dy: jax.Array) -> Any:
            _, back = jax.vjp(lambda p, x: self.module.apply(p, x, segment_ids=ids)[0], params, x)
            return back(dy)

        return jax.jit(gradients)

    @functools.cached_property
    def choices(self) -> dict[str, Any]:
        """Find the hard choices for the inputs as documents with holes, to be given beside the parameters.

        See `jaxblt.mixers.driver.choices`.
        """
        ids = jnp.asarray(self.with_holes(self.documents()))

        def decide(params: Any, x: jax.Array) -> Any:
            return self.module.apply(params, x, segment_ids=ids, mutable=[COLLECTION])[1]

        given = self.params, jnp.asarray(self.x)
        return dict(jax.jit(decide)(*given)) if jax.eval_shape(decide, *given) else {}

    @functools.cached_property
    def step(self) -> Callable[..., tuple[jax.Array, State]]:
        """(params, x, segment_ids, state) -> (y, state): the streaming pass."""
        return jax.jit(
            lambda params, x, ids, state: self.module.apply(params, x, segment_ids=ids, state=state)
        )

    def start(self) -> State:
        """Return the state before the first token."""
        return init_state(self.config, self.rows, capacity=self.length)

    def run(self, x: Any = None, ids: Any = None) -> np.ndarray:
        """Run the training pass on the host; all of one document by default."""
        x = self.x if x is None else x
        ids = np.ones(x.shape[:2], np.int32) if ids is None else ids
        return np.asarray(self.parallel(self.params, x, ids))

    def feed(self, x: np.ndarray, ids: np.ndarray, sizes: Iterable[int]) -> np.ndarray:
        """Return outputs of the streaming pass in calls of the given sizes.

        The last call is filled up with non-tokens.
        """
        state, outputs, at = self.start(), [], 0
        for size in sizes:
            chunk, chunk_ids = x[:, at : at + size], ids[:, at : at + size]
            missing = size - chunk.shape[1]
            chunk = np.pad(chunk, ((0, 0), (0, missing), (0, 0)), constant_values=np.nan)
            chunk_ids = np.pad(chunk_ids, ((0, 0), (0, missing)))
            y, state = self.step(self.params, chunk, chunk_ids, state)
            outputs.append(np.asarray(y)[:, : size - missing])
            at += size
        return np.concatenate(outputs, 1)

    def apart(self, x: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Return the training pass's outputs of each document in a row of its own.

        They are put back in their places.
        """
        places = [(row, s) for row in range(len(ids)) for s in np.unique(np.abs(ids[row])) if s]
        out = np.zeros_like(x)
        for i in range(0, len(places), self.rows):
            alone, alone_ids = np.zeros_like(self.x), np.zeros((self.rows, self.length), np.int32)
            spans = [(row, np.flatnonzero(np.abs(ids[row]) == s)) for row, s in places[i : i + self.rows]]
            for j, (row, span) in enumerate(spans):
                alone[j, : len(span)], alone_ids[j, : len(span)] = x[row, span], np.sign(ids[row, span])
            y = self.run(alone, alone_ids)
            for j, (row, span) in enumerate(spans):
                out[row, span] = y[j, : len(span)]
        return out

    def documents(self) -> np.ndarray:
        """Return segment ids: several documents a row and padding, or one document if not packed."""
        ids, length = np.zeros((self.rows, self.length), np.int32), self.length
        for row in range(self.rows):
            if not self.packed:
                ids[row, : length - 2 * row] = row + 1
                continue
            starts = sorted({self._aligned(f * length) for f in ((0, 0.2, 0.7), (0,), (0, 0.04, 0.5))[row]})
            for s, (begin, end) in enumerate(zip(starts, [*starts[1:], length - row], strict=True)):
                gap = 1 if self.alignment > 1 else 0
                ids[row, begin : end - gap] = s + 1
        return ids

    def _aligned(self, index: float) -> int:
        return -(-int(np.ceil(index)) // self.alignment) * self.alignment

    def with_holes(self, ids: np.ndarray) -> np.ndarray:
        """Return `ids` with a third of the tokens made holes, never a whole document."""
        hole = np.random.default_rng([self.seed, 2]).random(ids.shape) < 1 / 3
        ends = ids != np.concatenate([ids[:, 1:], np.zeros_like(ids[:, :1])], 1)
        return np.where(hole & ~ends, -ids, ids)


def expect_close(what: str, actual: Any, expected: Any, limit: float) -> None:
    """Raise AssertionError with the size of the error unless `worst` is within `limit`."""
    error = worst(actual, expected)
    if error > limit:
        raise AssertionError(f"{what}: error {error:.2e} is beyond the tolerance {limit:.2e}")


def expect_moved(what: str, actual: Any, expected: Any, limit: float) -> None:
    """Raise AssertionError unless the two differ by more than the tolerance."""
    error = worst(actual, expected)
    if not error > limit:
        raise AssertionError(f"{what}: a difference of {error:.2e} is within the tolerance {limit:.2e}")
