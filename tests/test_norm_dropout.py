"""The layer of norm, dropout and ReLU: the library's own layers one after the other, on any mesh."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxblt.layers import NormDropoutReLU, RMSNorm
from jaxblt.parallel import MeshConfig
from jaxblt.random_keys import make_key
from tests.pallas_kernels.op_suite import value_and_grads
from tests.tolerances import assert_close

X = jax.random.normal(make_key(0), (8, 6, 32))
RATE = 0.25


def composed(kept: Any, a: dict[str, Any]) -> Any:
    """Apply the norm, a mask and ReLU."""
    y: Any = RMSNorm().apply({"params": {"scale": a["scale"]}}, a["x"])
    return jax.nn.relu(jnp.where(kept, y / (1 - RATE), 0) if kept is not None else y)


def fused(rngs: dict[str, Any], a: dict[str, Any]) -> Any:
    """Apply the layer to the same parameters."""
    return NormDropoutReLU(RATE).apply({"params": {"scale": a["scale"]}}, a["x"], rngs=rngs)


@pytest.mark.slow(days=28, group="properties of kernels", every="*seq*-dropped")
@pytest.mark.parametrize("rngs", [{}, {"dropout": make_key(2)}], ids=["whole", "dropped"])
@pytest.mark.parametrize("split", [{}, {"data": 2, "seq": 2}], ids=str)
def test_values_and_gradients_are_those_of_the_composition(
    split: dict[str, int], rngs: dict[str, Any]
) -> None:
    """Positive entries show which are kept; a mesh keeps the same ones."""
    arrays, positive = {"x": X, "scale": 1 + 0.1 * X[0, 0]}, {"x": jnp.abs(X), "scale": jnp.ones(32)}
    kept = fused(rngs, positive) > 0 if rngs else None
    assert kept is None or abs(float(kept.mean()) - (1 - RATE)) < 0.05
    with jax.set_mesh(MeshConfig(**split).build(jax.devices()[:4])) if split else nullcontext():
        found = value_and_grads(partial(fused, rngs), arrays)
    jax.tree.map(partial(assert_close, n=80), found, value_and_grads(partial(composed, kept), arrays))


def test_it_takes_the_parameters_of_the_norm() -> None:
    ours, norms = (jax.eval_shape(layer.init, make_key(0), X) for layer in (NormDropoutReLU(), RMSNorm()))
    assert ours == norms
