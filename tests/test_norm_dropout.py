"""The layer of norm, dropout and ReLU: the library's own layers one after the other, on any mesh."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.layers import NormDropoutReLU, RMSNorm
from jaxblt.parallel import MeshConfig
from jaxblt.random_keys import make_key
from tests.pallas_kernels.op_suite import value_and_grads
from tests.tolerances import assert_close

X, SCALE = jax.random.normal(make_key(0), (8, 6, 32)), 1 + 0.1 * jax.random.normal(make_key(1), (32,))


def apply(layer: Any, arrays: dict[str, Any], **options: Any) -> Any:
    return layer.apply({"params": {"scale": arrays["scale"]}}, arrays["x"], **options)


def test_without_a_key_it_is_the_norm_and_relu() -> None:
    arrays = {"x": X, "scale": SCALE}
    found = value_and_grads(lambda a: apply(NormDropoutReLU(rate=0.5), a), arrays)
    expected = value_and_grads(lambda a: jax.nn.relu(apply(RMSNorm(), a)), arrays)
    jax.tree.map(lambda a, b: assert_close(a, b, n=80), found, expected)
    layer = NormDropoutReLU(rate=0.5)
    assert jax.tree.map(jnp.shape, layer.init(make_key(0), X)) == jax.tree.map(
        jnp.shape, RMSNorm().init(make_key(0), X)
    )


@pytest.mark.parametrize("split", [{"data": 4}, {"data": 2, "seq": 2}], ids=str)
def test_a_key_drops_the_same_entries_on_any_mesh(split: dict[str, int]) -> None:
    arrays, key = {"x": X, "scale": SCALE}, make_key(2)

    def run(a: dict[str, Any]) -> Any:
        return apply(NormDropoutReLU(rate=0.5), a, rngs={"dropout": key})

    whole = value_and_grads(run, arrays)
    with jax.set_mesh(MeshConfig(**split).build(jax.devices()[:4])):
        found = value_and_grads(lambda a: run(a), arrays)
    jax.tree.map(lambda a, b: assert_close(a, b, n=80), found, whole)
    normal = np.asarray(apply(RMSNorm(), arrays))
    kept = np.asarray(whole[0]) != 0
    assert 0.4 < kept[normal > 0].mean() < 0.6
    assert_close(np.asarray(whole[0]), np.where(kept, 2 * normal, 0), n=32)
