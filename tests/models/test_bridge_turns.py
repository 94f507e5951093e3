"""Bridges some blocks at a time, beside what FP8 remembers."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.layers import FP8, dense
from jaxblt.models.bridge_turns import in_turns
from jaxblt.precision.config import Fp8Config
from jaxblt.precision.sites import first_amax, in_fp8

CONFIG = Fp8Config(scaling="delayed")


class Up(nn.Module):
    """A product of blocks."""

    chunk: int | None

    def setup(self) -> None:
        self.up = dense(16, axes=("embed", "latent"), dtype=jnp.bfloat16, name="up")

    def __call__(self, x: Any) -> Any:
        return in_turns(lambda module, x: module.up(x), self, (x,), chunk=self.chunk)


@pytest.mark.slow(days=28, group="costly", turn="models/test_bridge_turns")
def test_turns_observe_the_largest_entry_of_all() -> None:
    x = jax.random.normal(jax.random.key(0), (2, 4, 3, 16), jnp.bfloat16)
    boxed = Up(None).init(jax.random.key(0), x)["params"]
    amax = jax.tree.map(lambda a: a.at[:, 0].set(3), first_amax(CONFIG, [("up",)], boxed))

    def observed(chunk: int | None) -> Any:
        def loss(amax: Any) -> Any:
            with in_fp8(CONFIG):
                y: Any = Up(chunk).apply({"params": nn.meta.unbox(boxed), FP8: amax}, x)
            return jnp.sum(jnp.square(y.astype(jnp.float32)))

        return jax.grad(loss)(amax)["up"]["amax"]

    np.testing.assert_array_equal(observed(1), observed(None))
