"""The library's annotations are checked in tests: a wrong shape, dtype or type does not pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float, TypeCheckError

from jaxblt.data.permutation import hash64
from jaxblt.mixers.attention.rotary import rotate
from jaxblt.mixers.driver.base import Clock
from jaxblt.models import StackConfig
from pallas_kernels.short_conv.reference import short_conv_reference
from tests.annotations import checked

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
        short_conv_reference(X[0], jnp.ones((4, 2)), segment_ids=jnp.ones((3, 6)))


def test_a_function_inside_another_is_checked_each_time_it_is_defined():
    def scaled(factor):
        @checked
        def scale(x: Float[Array, "T"]) -> Float[Array, "T"]:
            return factor * x

        return scale

    for factor in (jnp.float32(2), jnp.float32(3)):
        scale = scaled(factor)
        np.testing.assert_array_equal(scale(jnp.ones(4)), factor * np.ones(4, np.float32))
        with pytest.raises(TypeCheckError, match="x="):
            scale(jnp.ones((4, 1)))


def test_a_function_without_arrays_is_checked_too():
    with pytest.raises(TypeCheckError, match="words"):
        hash64(1, "two")


def test_a_config_of_wrong_types_is_refused():
    with pytest.raises(TypeCheckError, match="num_layers"):
        StackConfig(num_layers="four")


def test_pytrees_may_hold_anything():
    clock = Clock(*map(jnp.int32, (0, 0, 0)))
    assert jax.tree.map(lambda x: "a sharding", clock).time == "a sharding"
