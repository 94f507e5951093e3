"""Kernels in fewer bits: packing, errors of rounding, bytes, and products of every layout."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from jaxblt.einsums import read_equation
from jaxblt.layers import Linear
from jaxblt.precision.weights import (
    GROUP,
    SCHEMES,
    dense_params,
    find_products,
    from_stored,
    pack,
    quantize,
    quantize_kernel,
    quantized_bytes,
    to_stored,
    unpack,
)
from jaxblt.testing.tolerances import bound, typical, worst
from pallas_kernels.runtime import compiling_for
from tests.adapters.update.test_site import H200
from tests.tolerances import assert_close

SHAPE = (192, 32)


@pytest.fixture(scope="module")
def kernel():
    """Channels of sizes that differ by a factor of 100, as trained ones do."""
    rng = np.random.default_rng(0)
    return (rng.standard_normal(SHAPE) * np.geomspace(0.01, 1, SHAPE[1])).astype(np.float32)


@settings(deadline=None, max_examples=50)
@given(arrays(np.int8, (6, 3), elements=st.integers(-8, 7)))
def test_what_is_packed_comes_back(values):
    packed = pack(jnp.asarray(values))
    assert packed.nbytes == values.size // 2
    np.testing.assert_array_equal(unpack(packed), values)


def test_an_entry_is_off_by_half_a_scale_at_the_most(kernel):
    """In int8, and in int4 what lies within -8 to 7 scales."""
    for scheme, least, most in (("int8", -127.001, 127.001), ("int4", -8, 7)):
        made = quantize_kernel(jnp.asarray(kernel), scheme, summed=1)
        scale = np.asarray(made.scale, np.float64)
        if scheme == "int4":
            scale = np.repeat(scale, GROUP, 0)[: len(kernel)]
        inside = (kernel / scale <= most) & (kernel / scale >= least)
        error = np.abs(np.asarray(made.dense(), np.float64) - kernel)
        assert np.all((error <= np.abs(scale) / 2 * (1 + 1e-5)) | ~inside)
        assert np.max((error / np.abs(scale))[inside]) > 0.45
        assert inside.all() if scheme == "int8" else inside.mean() > 0.95


def test_four_bits_are_clipped_where_that_is_closer(kernel):
    """Scales are closer than those that the largest entries of groups give."""
    groups = np.pad(kernel, [(0, -len(kernel) % GROUP), (0, 0)]).reshape(-1, GROUP, SHAPE[1])
    scale = np.abs(groups).max(1, keepdims=True) / 7
    largest = (np.round(groups / scale) * scale).reshape(-1, SHAPE[1])[: len(kernel)]
    found = quantize_kernel(jnp.asarray(kernel), "int4", summed=1).dense()
    assert typical(found, kernel) < 0.9 * typical(largest, kernel)


def test_fewer_bits_and_shared_scales_cost_more(kernel):
    """8 bits are closer than E4M3, and that than 4 bits; a scale of the whole matrix is worse than one a channel."""
    errors = [typical(quantize_kernel(jnp.asarray(kernel), s, summed=1).dense(), kernel) for s in SCHEMES]
    int8, int4, fp8, *_ = errors
    assert int8 < fp8 < int4
    scale = np.abs(kernel).max() / 127
    assert int8 < typical(np.round(kernel / scale) * scale, kernel)


def test_asymmetric_ranges_fit_channels_that_lie_to_one_side(kernel):
    """Half a scale is the error at the most, and the scale is that of the channel's own range."""
    shifted = kernel + 3 * kernel.std(0)
    made = quantize_kernel(jnp.asarray(shifted), "int8_asymmetric", summed=1)
    scale = np.asarray(made.scale, np.float64)
    np.testing.assert_allclose(scale, (shifted.max(0) - shifted.min(0)) / 254, rtol=1e-5)
    error = np.abs(np.asarray(made.dense(), np.float64) - shifted)
    assert np.all(error <= scale / 2 * (1 + 1e-4))
    symmetric = quantize_kernel(jnp.asarray(shifted), "int8", summed=1).dense()
    assert typical(made.dense(), shifted) < 0.7 * typical(symmetric, shifted)


def test_a_kernel_of_zeros_stays_one():
    for scheme in SCHEMES:
        assert not np.any(np.asarray(quantize_kernel(jnp.zeros((16, 16)), scheme, summed=1).dense()))


LAYOUTS = [
    ("btd,dhk->bthk", {"h": 4, "k": 8}, (2, 5, 192)),
    ("bthk,hkd->btd", {"d": 32}, (2, 5, 6, 32)),
    ("btd,de->bet", {"e": 32}, (2, 5, 192)),
    ("bct,cd->btd", {"d": 32}, (2, 192, 5)),
    ("...d,de->...e", {"e": 32}, (2, 5, 192)),
]


@pytest.mark.parametrize(("equation", "sizes", "shape"), LAYOUTS)
def test_products_are_those_of_the_rounded_kernel(equation, sizes, shape):
    """Of every order of axes; with activations in 8 bits too within the rounding of 127 steps."""
    rng = np.random.default_rng(1)
    x = jax.device_put(rng.standard_normal(shape).astype(np.float32))
    letters = equation.partition(",")[2].partition("->")[0]
    layer = Linear(equation, sizes, (None,) * len(letters))
    products, made = find_products(jnp.float32, lambda: jax.eval_shape(layer.init, jax.random.key(0), x))
    given = made["params"]["kernel"].value
    params = {"kernel": jax.device_put((rng.standard_normal(given.shape) / 14).astype(np.float32))}
    apply = jax.jit(lambda own, x: layer.apply({"params": own}, x))
    slope = jax.jit(jax.grad(lambda x, own: layer.apply({"params": own}, x).sum()))
    for scheme in SCHEMES:
        stored = quantize(params, products, scheme)
        assert stored["kernel"].shape == given.shape
        assert sum(leaf.nbytes for leaf in jax.tree.leaves(stored)) == quantized_bytes(products[()], scheme)
        dense = dense_params(stored, products)
        found, wanted = apply(stored, x), apply(dense, x)
        assert found.dtype == wanted.dtype
        if scheme == "w8a8":
            assert 0 < typical(found, wanted) < 0.01
            assert worst(slope(x, stored), slope(x, dense)) <= bound(jnp.float32, 192)
        else:
            assert worst(found, wanted) <= bound(jnp.float32, 192)


def test_a_product_in_integers_keeps_what_is_not_finite_in_its_token():
    layer = Linear("btd,de->bte", {"e": 16}, (None, None))
    made = quantize_kernel(jnp.ones((16, 16)), "w8a8", summed=1)
    for kernel in (made, made.replace(inputs=jnp.float32(0.1))):
        x = jnp.ones((1, 3, 16)).at[0, 1, 2].set(jnp.nan)
        y = np.asarray(layer.apply({"params": {"kernel": kernel}}, x))
        assert np.isnan(y[0, 1]).all()
        assert np.isfinite(y[0, [0, 2]]).all()


def test_folders_say_the_scheme():
    tree = {"a": {"kernel": quantize_kernel(jnp.ones((16, 16)), "fp8", summed=1)}, "scale": jnp.ones(3)}
    stored = to_stored(tree)
    assert set(stored["a"]["kernel"]) == {"fp8"}
    assert jax.tree.structure(from_stored(stored)) == jax.tree.structure(tree)


def test_bad_arguments_are_named(kernel):
    products = {("a",): None}
    with pytest.raises(ValueError, match="no product to quantise"):
        quantize({}, {}, "int8")
    with pytest.raises(ValueError, match="calibrate 'w8a8' only"):
        quantize({}, products, "int8", inputs={})
    made = {"a": {"kernel": quantize_kernel(jnp.asarray(kernel), "int8", summed=1)}}
    with pytest.raises(ValueError, match="needs weights that are not quantised"):
        quantize(made, products, "int8")


@pytest.mark.parametrize(
    ("equation", "x", "kernel"),
    [("...d,de->...e", (1, 1, 64), (64, 32)), ("bthk,hkd->btd", (1, 1, 4, 16), (4, 16, 32))],
)
def test_one_token_is_a_product_of_several_rows_on_a_gpu(equation, x, kernel):
    """XLA makes a multiplication of the product of one row, and writes its results to memory in fp32."""
    letters = read_equation(equation)
    sizes = dict(zip(letters.summed + letters.new, kernel, strict=True))
    x, dense = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate((x, kernel)))
    stored = quantize_kernel(dense, "int8", summed=len(letters.summed))

    def multiply(dtype, x):
        return stored.multiply(Linear(equation, sizes, (None,) * len(sizes), dtype), x)

    with compiling_for(H200):
        kinds = (jnp.bfloat16, jnp.float32)
        # Leave fp32 to XLA: its products of several rows are rounded to 19 bits
        traced = [str(jax.make_jaxpr(partial(multiply, dtype))(x.astype(dtype))) for dtype in kinds]
        y = multiply(jnp.bfloat16, x.astype(jnp.bfloat16))
    assert ["bf16[8," in text for text in traced] == [True, False]
    expected = jnp.einsum(equation, x.astype(jnp.bfloat16).astype(jnp.float32), stored.dense())
    assert_close(y, expected, jnp.bfloat16, 64)
