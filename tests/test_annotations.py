"""The library's annotations are checked in tests: a wrong shape, dtype or type does not pass."""

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

from jaxblt.mixers.base import Clock
from jaxblt.mixers.rotary import rotate
from jaxblt.models import StackConfig
from pallas_kernels.short_conv.reference import short_conv_reference

X = jnp.ones((2, 3, 4, 6))


@pytest.mark.parametrize("angles", [(2, 5, 3), (2, 3), (5, 3, 3)])
def test_a_wrong_shape_is_refused(angles):
    with pytest.raises(TypeCheckError, match="angles"):
        rotate(X, jnp.ones(angles))


def test_a_wrong_shape_is_refused_while_tracing():
    with pytest.raises(TypeCheckError, match="angles"):
        jax.eval_shape(rotate, X, jnp.ones((2, 5, 3)))


def test_a_wrong_dtype_is_refused():
    with pytest.raises(TypeCheckError, match="segment_ids"):
        short_conv_reference(X[0], jnp.ones((3, 2)), segment_ids=jnp.ones((3, 6)))


def test_a_config_of_wrong_types_is_refused():
    with pytest.raises(TypeCheckError, match="num_layers"):
        StackConfig(num_layers="four")


def test_pytrees_may_hold_anything():
    clock = Clock(*map(jnp.int32, (0, 0, 0)))
    assert jax.tree.map(lambda x: "a sharding", clock).time == "a sharding"
