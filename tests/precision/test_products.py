"""Products in FP8 against fp64: values, both gradients, what they observe, and what is not finite."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxblt.layers import MLP, Linear
from jaxblt.precision import E4M3, E5M2, Fp8Config, Past, fp8_by_ratio, fp8_product, quantise, scale_for
from jaxblt.precision.sites import in_fp8, runs_in_fp8
from tests.parameters import drawn

EQUATION = "btd,dhk->bthk"
ROUNDING = {"y": 2 * 2.0**-4, "dx": 2.0**-4 + 2.0**-3, "dkernel": 2.0**-4 + 2.0**-3}
"""The most relative rounding of a term: a half step of each operand, E4M3 or E5M2."""


def arrays():
    keys = jax.random.split(jax.random.key(0), 3)
    x, kernel, g = (
        jax.random.normal(key, shape, jnp.float32)
        for key, shape in zip(keys, ((2, 64, 128), (128, 4, 32), (2, 64, 4, 32)), strict=True)
    )
    return x.astype(jnp.bfloat16), (kernel / 8).astype(jnp.bfloat16), (g * 1e-4).astype(jnp.bfloat16)


def both(product, x, kernel, g):
    y, back = jax.vjp(lambda x, kernel: product(EQUATION, x, kernel), x, kernel)
    return dict(zip(("y", "dx", "dkernel"), (y, *back(g)), strict=True))


def exact(x, kernel, g):
    x, kernel, g = (np.asarray(a, np.float64) for a in (x, kernel, g))
    return {
        "y": np.einsum(EQUATION, x, kernel),
        "dx": np.einsum("bthk,dhk->btd", g, kernel),
        "dkernel": np.einsum("btd,bthk->dhk", x, g),
    }


def test_errors_are_those_of_rounding_the_operands():
    given = arrays()
    found, wanted = jax.jit(lambda *a: both(fp8_product, *a))(*given), exact(*given)
    terms = exact(*(jnp.abs(a) for a in given))
    for name, value in found.items():
        error = np.abs(np.asarray(value, np.float64) - wanted[name])
        # the second part is bf16's of the result, and of small entries that FP8 holds as subnormals
        assert np.all(error <= 1.05 * ROUNDING[name] * terms[name] + 2.0**-8 * np.abs(wanted[name])), name
        assert 0.02 < np.linalg.norm(error) / np.linalg.norm(wanted[name]) < 0.06, name


def test_a_product_is_that_of_the_rounded_operands():
    """Sums are fp32, so that the result is the fp64 product of FP8 operands rounded to bf16."""
    x, kernel, _ = arrays()
    parts = []
    for a in (x, kernel):
        scale = scale_for(jnp.max(jnp.abs(a)).astype(jnp.float32), E4M3)
        parts.append(np.asarray(quantise(a, scale, E4M3), np.float64) / float(scale))
    wanted = np.einsum(EQUATION, *parts)
    found = np.asarray(fp8_product(EQUATION, x, kernel), np.float64)
    assert np.max(np.abs(found - wanted)) <= 2.0**-8 * np.max(np.abs(wanted))


def by_ratio(x: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """Quantise both by 448 over the largest entry, multiply, and undo the scales, in NumPy."""
    top = np.float32(448)
    scales = [top / np.abs(a).max() for a in (x, kernel)]
    parts = [
        np.clip(a * s, -top, top).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
        for a, s in zip((x, kernel), scales, strict=True)
    ]
    inverse = np.float32(1) / scales[0] / scales[1]
    return np.einsum("btd,de->bet", *parts).astype(np.float32) * inverse


def test_products_by_ratio_are_bit_for_bit_those_of_numpy():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 8, 32)).astype(ml_dtypes.bfloat16)
    # One term a sum, so that no order of adding matters; and dense sums, in fp32
    single = np.eye(32)[rng.permutation(32)] * rng.lognormal(0, 3, 32)
    kernels = [a.astype(ml_dtypes.bfloat16) for a in (single, rng.standard_normal((32, 32)))]
    product = jax.jit(lambda x, kernel: fp8_by_ratio("btd,de->bet", x, kernel))
    wide = [a.astype(np.float32) for a in (x, *kernels)]
    wanted = [by_ratio(wide[0], kernel) for kernel in wide[1:]]
    one, dense = (np.asarray(product(jnp.asarray(x), jnp.asarray(kernel))) for kernel in kernels)
    np.testing.assert_array_equal(one, wanted[0].astype(ml_dtypes.bfloat16))
    np.testing.assert_allclose(dense.astype(np.float32), wanted[1], rtol=2.0**-8, atol=1e-6)
    # Zeros that fill rows up to a multiple of 16 change no bit
    padded = np.asarray(product(jnp.asarray(np.pad(x, ((0, 0), (0, 8), (0, 0)))), jnp.asarray(kernels[1])))
    np.testing.assert_array_equal(padded[..., :8], dense)


def test_a_layer_with_a_product_of_its_own_keeps_it_in_training():
    layer = Linear("btd,de->bet", {"e": 16}, ("embed", "channels"), jnp.bfloat16)
    x = jnp.zeros((1, 4, 16), jnp.bfloat16)
    assert runs_in_fp8(layer, x, Fp8Config())
    assert not runs_in_fp8(layer.clone(product=fp8_by_ratio), x, Fp8Config())


@pytest.mark.parametrize("equation", ["...d,de->...e", "btd,de->bet", "bet,ed->btd"])
def test_letters_come_in_any_order(equation):
    x, _, _ = arrays()
    x = x.swapaxes(1, 2) if equation.startswith("bet") else x
    kernel = jnp.eye(128, dtype=jnp.bfloat16)
    y = fp8_product(equation, x, kernel)
    moved = x.swapaxes(1, 2) if "...d" not in equation else x
    np.testing.assert_allclose(
        np.asarray(y, np.float32), np.asarray(moved, np.float32), rtol=2.0**-4, atol=2.0**-9
    )


def test_a_channel_major_gradient_is_transposed_once_for_both_products():
    """If each product transposed it, XLA would fuse that with the transpose that cuBLAS wants for the second."""
    x, kernel, g = arrays()
    back = jax.vjp(partial(fp8_product, "btd,de->bet"), x, kernel.reshape(128, -1))[1]
    program = jax.make_jaxpr(back)(g.reshape(2, 64, -1).swapaxes(1, 2)).jaxpr
    used = [
        var
        for eqn in program.eqns
        if eqn.primitive.name == "dot_general"
        for var in eqn.invars
        if var.aval.dtype == E5M2.dtype
    ]
    assert len(used) == 2
    assert used[0] is used[1]
    assert used[0].aval.shape == (2, 64, 128)
    (held,) = (eqn for eqn in program.eqns if used[0] in eqn.outvars)
    assert held.primitive.name == "optimization_barrier"


def test_rounding_a_gradient_in_fp32_changes_no_bit():
    given = arrays()
    narrow, wide = (
        jax.jit(lambda *a, wide=wide: both(partial(fp8_product, wide=wide), *a))(*given)
        for wide in (False, True)
    )
    for name, value in narrow.items():
        np.testing.assert_array_equal(np.asarray(value), np.asarray(wide[name]), err_msg=name)


def test_gradients_of_a_gated_mlp_reach_fp8_in_fp32():
    """A gradient that is bf16 in between would be written, and read again to be rounded."""
    mlp, x = MLP(32, jnp.bfloat16), arrays()[0]
    params = drawn(mlp, x)

    def loss(params):
        with in_fp8(Fp8Config(scaling="current")):
            return jnp.sum(mlp.apply(params, x).astype(jnp.float32))

    text = jax.jit(jax.grad(loss)).lower(params).as_text()
    made = re.findall(r"stablehlo.convert .*tensor<[x\d]*(\w+)>\) -> tensor<[x\d]*f8E5M2>", text)
    assert sorted(made) == ["bf16", "f32", "f32"]


def test_delayed_scales_are_of_the_past_and_the_cotangent_is_what_was_seen():
    x, kernel, g = arrays()
    past = Past(*(jnp.asarray([0.0, float(jnp.max(jnp.abs(a))), 0.0], jnp.float32) for a in (x, kernel, g)))

    @jax.jit
    def run(x, past):
        y, back = jax.vjp(lambda x, past: fp8_product(EQUATION, x, kernel, past=past), x, past)
        return y, back(g)

    y, (dx, seen) = run(x, past)
    now = both(fp8_product, x, kernel, g)
    np.testing.assert_array_equal(y, now["y"])
    np.testing.assert_array_equal(dx, now["dx"])
    for entries, a in zip(seen, (x, kernel, g), strict=True):
        np.testing.assert_array_equal(entries, [float(jnp.max(jnp.abs(a))), 0, 0])
    spiked, (_, seen) = run(x.at[0, 0, 0].mul(4096), past)
    assert seen.x[0] > 256 * past.x[1]
    # 448 at the scale of the past is at most twice the past's largest entry
    assert float(jnp.max(jnp.abs(spiked - y))) <= 4 * float(past.x[1]) * float(jnp.max(jnp.abs(kernel)))
    assert np.all(np.isnan(np.asarray(run(x.at[0, 0, 0].set(jnp.inf), past)[0], np.float32)))


def test_devices_agree_on_scales():
    """The largest entry is that of all devices, so that a split batch gives the values of a whole one."""
    x, kernel, g = arrays()
    x = x.at[1].mul(32)
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    split = NamedSharding(mesh, PartitionSpec("data"))
    program = jax.jit(lambda *a: both(fp8_product, *a))
    whole, parts = program(x, kernel, g), program(jax.device_put(x, split), kernel, jax.device_put(g, split))
    np.testing.assert_array_equal(whole["y"], parts["y"])
    np.testing.assert_allclose(
        np.asarray(whole["dkernel"], np.float64),
        np.asarray(parts["dkernel"], np.float64),
        rtol=2.0**-7,
        atol=1e-5,
    )


def test_gradients_use_the_wider_format():
    """Gradients 2^20 apart both survive: E5M2 spans them, E4M3 does not."""
    g = jnp.asarray([[1.0, 2.0**-20]], jnp.bfloat16)
    assert np.all(np.asarray(quantise(g, scale_for(jnp.float32(1), E5M2), E5M2), np.float32) > 0)
    _, back = jax.vjp(lambda x: fp8_product("td,de->te", x, jnp.eye(2, dtype=jnp.bfloat16)), g)
    (dx,) = back(g)
    np.testing.assert_array_equal(np.asarray(dx, np.float32), np.asarray(g, np.float32))
