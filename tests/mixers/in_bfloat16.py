"""Properties of the mixers' suite that hold of a mixer computed in bfloat16, with the table's tolerance for it."""

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.mixers.driver.base import MixerConfig
from jaxblt.testing import PROPERTIES, Subject, subject
from jaxblt.testing.parallel import check_causal
from jaxblt.testing.tolerances import bound, typical

HELD = (
    *("output", "mixes", "packed", "holes", "odd_lengths", "batch", "positions"),
    *("chunked", "continued", "documents_streamed", "holes_streamed", "rows_advance_alone", "state"),
    *("finite_gradients", "every_parameter"),
)
"""Without "gradients", whose differences want fp32, and what splits a row or a batch over devices."""


@dataclass(frozen=True)
class Narrow:
    """A mixer that is computed in bfloat16 and, as the suite asks, takes and gives fp32."""

    inner: Any

    @property
    def dim(self) -> int:
        return self.inner.dim

    @property
    def causal(self) -> bool:
        return self.inner.causal

    @property
    def packed(self) -> bool:
        return self.inner.packed

    def build(self, *, dtype: Any = jnp.float32, name: str | None = None) -> nn.Module:
        return NarrowMixer(self.inner, name=name)

    def init_state(self, batch_size: int, *, capacity: int, dtype: Any = jnp.float32) -> Any:
        return self.inner.init_state(batch_size, capacity=capacity, dtype=jnp.bfloat16)


class NarrowMixer(nn.Module):
    inner: Any

    @nn.compact
    def __call__(self, x: Any, *, segment_ids: Any = None, positions: Any = None, state: Any = None) -> Any:
        mixer: Any = self.inner.build(dtype=jnp.bfloat16, name="inner")
        given = {"segment_ids": segment_ids, "positions": positions, "state": state}
        y, after = mixer(x.astype(jnp.bfloat16), **given)
        assert y.dtype == jnp.bfloat16
        return y.astype(x.dtype), after


WINDOW = 16
"""Tokens of which a root mean square is taken: one wrong token among hundreds hides in that of all."""


def typical_of_windows(actual: Any, expected: Any) -> float:
    """The largest root mean square error of a window of tokens of all rows, in units of that of all of `expected`."""
    actual, expected = (np.asarray(z).astype(np.float64) for z in (actual, expected))
    if actual.shape != expected.shape:
        raise AssertionError(f"shape {actual.shape} where {expected.shape} was expected")
    if actual.ndim < 3:
        return typical(actual, expected)
    squares = ((actual - expected) ** 2).mean((0, *range(2, actual.ndim)))
    windows = [squares[first : first + WINDOW].mean() for first in range(0, len(squares), WINDOW)]
    scale = float(np.sqrt(np.mean(expected**2))) or 1.0
    difference = float(np.sqrt(np.max(windows))) / scale
    return difference if np.isfinite(difference) else float("inf")


def check_in_bfloat16(config: MixerConfig, monkeypatch: pytest.MonkeyPatch, *, length: int) -> None:
    """Runs `HELD` on the mixer, and "causal" for tokens of a row's second half.

    Errors are root mean squares, as of the property "bfloat16", here of windows: single ones are beyond four roundings
    with fp32 FFTs too. Steps of a row share one scale, so outputs far smaller than their row's have no tolerance.
    """
    monkeypatch.setattr(subject, "worst", typical_of_windows)
    limit = property(lambda given: bound(jnp.bfloat16, given.length * given.config.dim))
    monkeypatch.setattr(Subject, "limit", limit)
    given = Subject(Narrow(config), length=length)
    for prop in PROPERTIES:
        if prop.name in HELD and prop.applies(given.config):
            try:
                prop.check(given)
            except AssertionError as error:
                raise AssertionError(f"{prop.name}: {error}") from error
    if config.causal:
        check_causal(given, cuts=(length // 2, 3 * length // 4, length - 1))
