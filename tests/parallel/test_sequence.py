import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxblt.parallel import SeqAxis, batch_axes, batch_sharding, make_mesh, over_sequence, seq_axis
from tests.tolerances import assert_close


def test_the_axis_is_seen_only_where_it_splits() -> None:
    assert seq_axis() is None
    with jax.set_mesh(make_mesh()):
        assert seq_axis() is None
    with jax.set_mesh(make_mesh(data=2, seq=4)):
        assert seq_axis() == SeqAxis("seq", 4)
    with jax.set_mesh(jax.make_mesh((8,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))):
        assert seq_axis() is None


@pytest.mark.parametrize("time_axis", [1, 2])
def test_an_island_sees_its_rows_and_its_stretch(time_axis: int) -> None:
    mesh = make_mesh(data=2, seq=4)
    x = np.random.default_rng(0).standard_normal((4, 8, 16)).astype(np.float32)
    bias, scale = jnp.arange(4.0), jnp.float32(3.0)
    seen = []

    def fn(x: jax.Array, bias: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        seen.append((x.shape, bias.shape, batch_axes(), seq_axis()))
        total = lax.psum(jnp.sum(x, (1, 2)), "seq")
        return x * scale + bias[:, None, None], total

    with jax.set_mesh(mesh):
        step = jax.jit(lambda *a: over_sequence(fn, *a, time_axis=time_axis, outputs=(True, False)))
        spec = PartitionSpec("data", *(None,) * (time_axis - 1), "seq")
        placed = jax.device_put(x, NamedSharding(mesh, spec))
        text = step.lower(placed, bias, scale).compile().as_text()
        y, total = step(placed, bias, scale)
    local = (2, 2, 16) if time_axis == 1 else (2, 8, 4)
    assert seen[0] == (local, (2,), (), None)
    assert "all-gather" not in (text or "")
    assert y.sharding.spec == spec
    assert_close(y, 3 * x + np.arange(4.0)[:, None, None])
    assert_close(total, x.sum((1, 2)), n=128)


def test_gradients_of_what_is_shared_add_up() -> None:
    mesh = make_mesh(data=2, seq=4)
    x = np.random.default_rng(1).standard_normal((2, 16, 3)).astype(np.float32)

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(over_sequence(lambda x, _, w: jnp.sin(x @ w), x, (), w) ** 2)

    w = jnp.eye(3)
    with jax.set_mesh(mesh):
        got = jax.jit(jax.grad(loss))(w, jax.device_put(x, batch_sharding(mesh)))
    assert_close(got, jax.grad(lambda w: jnp.sum(jnp.sin(x @ w) ** 2))(w), n=32)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((2, 18), ["T = 18", "4 devices", "pad it to 20"]),
        ((3, 16), ["3", "rows", "2 devices"]),
    ],
)
def test_what_does_not_divide_is_an_error_before_compiling(shape: tuple[int, int], words: list[str]) -> None:
    with jax.set_mesh(make_mesh(data=2, seq=4)), pytest.raises(ValueError) as caught:
        jax.eval_shape(lambda x: over_sequence(lambda x, *_: x, x), jnp.ones(shape))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_without_a_split_sequence_it_says_so() -> None:
    with pytest.raises(ValueError, match="no axis 'seq'"):
        over_sequence(lambda x, *_: x, jnp.ones((2, 8)))
