import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.parallel.islands import over_batch
from jaxblt.training.flops import count_params, matmul_flops, mfu, peak_flops

X = jax.ShapeDtypeStruct((8, 16), jnp.float32)
W = jax.ShapeDtypeStruct((16, 16), jnp.float32)
ONE = 2 * 8 * 16 * 16


def scanned(x, w):
    return jax.lax.scan(lambda h, _: (h @ w, None), x, None, length=5)[0]


def looped(x, w):
    return jax.lax.fori_loop(0, 4, lambda _, h: h @ w, x)


def branched(x, w):
    return jax.lax.cond(x[0, 0] > 0, lambda: x @ w @ w, lambda: x @ w)


@jax.custom_vjp
def custom(x, w):
    return x @ w


custom.defvjp(lambda x, w: (x @ w, (x, w)), lambda r, g: (g @ r[1].T, r[0].T @ g))


@pytest.mark.parametrize(
    ("fn", "times"),
    [
        (lambda x, w: x @ w, 1),
        (lambda x, w: jnp.sin(x) + jnp.float32(1), 0),
        (scanned, 5),
        (looped, 4),
        (branched, 2),
        (jax.jit(scanned), 5),
        (jax.checkpoint(scanned), 5),
        (custom, 1),
        (jax.vmap(lambda x, w: w @ x, in_axes=(0, None)), 1),
        (lambda x, w: jnp.einsum("bi,ij->bj", x, w), 1),
        (lambda x, w: jnp.fft.irfft(jnp.fft.rfft(x), axis=-1) @ w, 1),
    ],
)
def test_counts_products_times_loops(fn, times):
    assert matmul_flops(fn, X, W) == times * ONE


def test_islands_count_for_all_devices():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        assert matmul_flops(lambda x, w: over_batch(lambda x, w: x @ w, x, w), X, W) == ONE


def test_devices_that_repeat_the_work_count_once():
    axes = ("data", "tensor")
    mesh = jax.make_mesh(
        (2, 2), axes, axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )
    with jax.set_mesh(mesh):
        assert matmul_flops(lambda x, w: over_batch(lambda x, w: x @ w, x, w), X, W) == ONE


def test_gradient_is_three_times_the_forward_pass():
    """Both operands of a product in the middle of a network need a gradient."""

    def loss(x, w, v):
        return jnp.sum(jnp.tanh(jnp.tanh(x) @ w) @ v)

    forward = matmul_flops(loss, X, W, W)
    assert matmul_flops(jax.grad(loss, argnums=(0, 1, 2)), X, W, W) == 3 * forward


def test_counts_parameters_with_and_without_hash_tables():
    box = nn.LogicallyPartitioned
    boxed = {
        "hash_ngrams": jnp.ones((7, 3)),
        "table": box(jnp.ones((5, 3)), ("hash", "embed")),
        "dense": {"kernel": box(jnp.ones((3, 4)), ("embed", "mlp")), "bias": np.ones(4)},
    }
    assert count_params(boxed) == (21 + 15 + 12 + 4, 12 + 4)


def test_peaks_and_utilisation():
    assert peak_flops("NVIDIA H200") == 790e12
    assert peak_flops("cpu") is None
    assert mfu(1e6, 2e6, 4e12) == 0.5
