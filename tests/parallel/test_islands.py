from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.parallel import batch_axes, batch_sharding, make_mesh, over_batch
from tests.tolerances import assert_close


def convolve(x: jax.Array, taps: jax.Array) -> jax.Array:
    return jnp.fft.irfft(jnp.fft.rfft(x, axis=1) * jnp.fft.rfft(taps)[None], axis=1)


def test_without_a_mesh_it_is_a_plain_call() -> None:
    assert batch_axes() == ()
    x, taps = jnp.ones((3, 8)), jnp.arange(8.0)
    np.testing.assert_array_equal(over_batch(convolve, x, taps), convolve(x, taps))


def test_an_island_sees_its_own_rows_and_gathers_nothing() -> None:
    mesh = make_mesh(data=2, fsdp=2, devices=jax.devices()[:4])
    x, taps = np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32), jnp.arange(16.0)
    seen = []

    def fn(x: jax.Array, taps: jax.Array) -> jax.Array:
        seen.append((x.shape, batch_axes()))
        return convolve(x, taps)

    with jax.set_mesh(mesh):
        step = jax.jit(lambda x, taps: over_batch(fn, x, taps))
        placed = jax.device_put(x, batch_sharding(mesh))
        text = step.lower(placed, taps).compile().as_text()
        out = step(placed, taps)
    assert seen[0] == ((2, 16), ())
    assert "all-gather" not in text
    assert_close(out, convolve(jnp.asarray(x), taps), n=16)


def test_gradients_of_what_is_shared_add_up_over_devices() -> None:
    mesh = make_mesh(fsdp=4)
    x, taps = np.random.default_rng(1).standard_normal((8, 16)).astype(np.float32), jnp.arange(16.0)

    def loss(taps: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(over_batch(convolve, x, taps) ** 2)

    want = jax.grad(loss)(taps, jnp.asarray(x))
    with jax.set_mesh(mesh):
        got = jax.jit(jax.grad(loss))(taps, jax.device_put(x, batch_sharding(mesh)))
    assert_close(got, want, n=8 * 16)


def test_rows_that_do_not_divide_are_an_error() -> None:
    with (
        jax.set_mesh(make_mesh()),
        pytest.raises(ValueError, match=r"6.* rows do not divide among 8 devices"),
    ):
        jax.jit(lambda x: over_batch(lambda a, _: a, x))(jnp.ones((6, 2)))


@pytest.mark.parametrize(("heads", "held"), [(4, 2), (3, 3)])
def test_heads_are_split_over_tensor_where_it_divides_them(heads: int, held: int) -> None:
    rng = np.random.default_rng(2)
    x, ids = (
        rng.standard_normal((4, 6, heads, 5)).astype(np.float32),
        np.arange(24, dtype=np.float32).reshape(4, 6),
    )
    scale, seen = np.arange(1.0, heads + 1, dtype=np.float32), []

    def fn(batched: Any, scale: jax.Array) -> jax.Array:
        x, ids = batched
        seen.append((x.shape, ids.shape, scale.shape))
        return x * scale[None, None, :, None] + ids[..., None, None]

    def split(x: jax.Array, ids: jax.Array, scale: jax.Array) -> jax.Array:
        return over_batch(fn, (x, ids), scale, heads=(True, False))

    mesh = make_mesh(data=2, tensor=2, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        out, gradient = jax.jit(lambda *a: (split(*a), jax.grad(lambda *a: jnp.sum(split(*a) ** 2), 2)(*a)))(
            x, ids, scale
        )
    assert set(seen) == {((2, 6, held, 5), (2, 6), (held,))}
    expected = x * scale[:, None] + ids[..., None, None]
    assert_close(out, expected, n=1)
    assert_close(gradient, np.sum(2 * expected * x, (0, 1, 3)), n=x[:, :, 0].size)
