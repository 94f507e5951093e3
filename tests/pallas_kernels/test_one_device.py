"""Code that knows no mesh axes, inside `shard_map`: a kernel with a rule for gradients, under every transformation."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import AxisType, PartitionSpec

from pallas_kernels._linear_state.one_device import on_one_device

kernel_p = Primitive("kernel")
kernel_p.def_abstract_eval(lambda x, y: ShapedArray(x.shape, x.dtype))  # as of Pallas' kernels: no mesh axes
mlir.register_lowering(kernel_p, mlir.lower_fun(lambda x, y: x * y, multiple_results=False))
batching.defvectorized(kernel_p)


@jax.custom_vjp
def product(x: Any, y: Any) -> Any:
    return kernel_p.bind(x, y)


def _forward(x: Any, y: Any) -> Any:
    return kernel_p.bind(x, y), (x, y)


def _backward(kept: Any, do: Any) -> Any:
    x, y = kept
    return kernel_p.bind(do, y), kernel_p.bind(do, x)


product.defvjp(_forward, _backward)


def package(floats: dict[str, Any], others: Any) -> tuple[Any, Any]:
    """Two results, one of them an argument, with and without a shift by whole numbers."""
    found = product(floats["x"], floats["y"])
    return found if others is None else found + others.astype(found.dtype), floats["x"]


def alone(x: Any, y: Any, ids: Any) -> tuple[Any, Any]:
    return on_one_device(package, {"x": x, "y": y, "absent": None}, ids)


def stepped(x: Any, y: Any, ids: Any) -> tuple[Any, Any]:
    """Twice, in a scan."""
    _, found = jax.lax.scan(lambda carry, row: (carry, alone(*row)), None, (x, y, ids))
    return found


TRANSFORMED: dict[str, Callable[..., Any]] = {
    "plain": alone,
    "vmap": jax.vmap(alone),
    "vmap of one": jax.vmap(alone, in_axes=(0, 0, None)),
    "remat": jax.checkpoint(alone),
    "scan": stepped,
}
X, Y = (np.random.default_rng(seed).standard_normal((2, 4)).astype(np.float32) for seed in (0, 1))
IDS = np.arange(8, dtype=np.int32).reshape(2, 4)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", TRANSFORMED)
def test_values_and_gradients_on_a_mesh(name: str, shared: bool) -> None:
    """Gradients of an array that all devices share are summed over them."""
    over = PartitionSpec(None, "data")
    y, spec = (Y[:, :2], PartitionSpec()) if shared else (Y, over)
    ids, id_spec = (IDS[0], PartitionSpec("data")) if name == "vmap of one" else (IDS, over)
    wide = np.tile(y, 2) if shared else y
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    run = jax.shard_map(TRANSFORMED[name], mesh=mesh, in_specs=(over, spec, id_spec), out_specs=over)

    @jax.jit
    def both(x: Any, y: Any, ids: Any) -> Any:
        found, pullback = jax.vjp(lambda x, y: run(x, y, ids), x, y)
        return found, pullback((X, 2 * X))

    (found, kept), (dx, dy) = both(X, y, ids)
    np.testing.assert_allclose(found, X * wide + ids, rtol=1e-6)
    np.testing.assert_array_equal(kept, X)
    np.testing.assert_allclose(dx, X * wide + 2 * X, rtol=1e-6)
    expected = X * X
    np.testing.assert_allclose(dy, expected[:, :2] + expected[:, 2:] if shared else expected, rtol=1e-6)


def test_what_is_kept_of_an_argument_is_the_argument() -> None:
    """Two results and no residual of their own: a scan stacks no second copy of x and y.

    They are other objects of the same values (`same_value`).
    """
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def local(x: Any, y: Any) -> Any:
        _, pullback = jax.vjp(lambda x, y: alone(x, y, None)[0], x, y)
        kept = [leaf for leaf in jax.tree.leaves(pullback) if isinstance(leaf, jax.Array)]
        assert {id(leaf.val) for leaf in kept} <= {id(x.val), id(y.val)}
        return x

    spec = PartitionSpec("data")
    jax.eval_shape(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec), X, jnp.asarray(Y))


def test_such_code_is_refused_otherwise() -> None:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def local(x: Any, y: Any) -> Any:
        found, pullback = jax.vjp(product, x, y)
        return pullback(found * x)

    spec = PartitionSpec("data")
    with pytest.raises(ValueError, match="unexpected JAX type"):
        jax.eval_shape(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec), X, Y)
