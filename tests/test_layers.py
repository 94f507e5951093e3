"""Layers: channel-major products row by row on GPUs; dropout by hashed entries, also behind a norm."""

import functools
from contextlib import nullcontext
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.errors import ScopeParamShapeError
from jax.sharding import NamedSharding, PartitionSpec
from numpy.testing import assert_array_equal

from jaxblt.einsums import multiply, read_equation
from jaxblt.layers import JOINED_POSITIONS, MLP, Dropout, Linear, NormDropoutReLU, RMSNorm, apart
from jaxblt.models.remat import remat
from jaxblt.parallel import MeshConfig
from jaxblt.random_keys import make_key
from jaxblt.testing.collectives import collectives
from pallas_kernels.runtime import compiling_for
from tests.adapters.update.test_site import H200
from tests.pallas_kernels.op_suite import value_and_grads
from tests.tolerances import assert_close

ROWS, LENGTH, INNER = 4, 16, 6
HEADS = {"h": 2, "k": 4}
CPU = jax.devices("cpu")[0]
CASES = ("btd,dhk->bhkt", "bdt,dhk->bthk", "bhkt,hkd->btd", "bdt,dhk->bhkt")


def arrays(equation, rows=ROWS, length=LENGTH):
    """x, a kernel and a cotangent."""
    sizes = {"b": rows, "t": length, "d": INNER} | HEADS
    given, summed, new, result = read_equation(equation)
    rng = np.random.default_rng(0)
    shapes = ([sizes[c] for c in letters] for letters in (given, summed + new, result))
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


def passes(equation):
    """y and the gradients, as a function that is traced anew."""

    def run(x, kernel, dy):
        y, pull = jax.vjp(functools.partial(multiply, equation), x, kernel)
        return y, *pull(dy)

    return run


def products(fn, *args):
    """For each product of the program, whether it is one of rows."""
    return [", ([0], [0]))" in text[:80] for text in str(jax.make_jaxpr(fn)(*args)).split("dot_general")[1:]]


@pytest.mark.parametrize("equation", CASES)
def test_rows_equal_the_einsum(equation):
    args = arrays(equation)
    expected = jax.jit(passes(equation))(*args)
    with compiling_for(H200):
        found = jax.jit(passes(equation))(*args)
    for name, a, b in zip(("y", "dx", "dw"), found, expected, strict=True):
        assert_close(a, b, n=ROWS * LENGTH, what=name)


@pytest.mark.parametrize("equation", CASES)
@pytest.mark.parametrize(
    ("split", "by_row"), [({"data": 2}, [True] * 3), ({"seq": 2}, [False, True, True])], ids=str
)
def test_kernels_gradient_is_one_product_of_all_rows_where_devices_split_time(equation, split, by_row):
    args = arrays(equation)
    with compiling_for(H200), jax.set_mesh(MeshConfig(**split).build(jax.devices()[:2])):
        assert sorted(products(passes(equation), *args)) == by_row


def test_kernels_gradient_of_many_rows_is_added_up_in_fp32():
    """Of zeros and ones a row's product is exact in bf16, and the sum of all is not."""
    x, kernel, dy = ((a > 0).astype(jnp.bfloat16) for a in arrays("btd,dhk->bhkt", rows=256))
    with compiling_for(H200):
        found = jax.jit(passes("btd,dhk->bhkt"))(x, kernel, dy)[2]
    exact = np.einsum("btd,bhkt->dhk", *(np.asarray(a, np.float32) for a in (x, dy)))
    np.testing.assert_array_equal(found, exact.astype(jnp.bfloat16))


@pytest.mark.parametrize(
    ("equation", "rows", "length", "device"),
    [
        pytest.param("btd,dhk->bhkt", 1, LENGTH, H200, id="one row"),
        pytest.param("btd,dhk->bhkt", ROWS, 2, H200, id="short rows"),
        pytest.param("btd,dhk->bthk", ROWS, LENGTH, H200, id="time first"),
        pytest.param("btd,dhk->bhkt", ROWS, LENGTH, CPU, id="CPU"),
    ],
)
def test_einsum_where_rows_gain_nothing(equation, rows, length, device):
    x, kernel, _ = arrays(equation, rows, length)
    with compiling_for(device):
        assert products(functools.partial(multiply, equation), x, kernel) == [False]


@pytest.mark.parametrize("equation", ["btd,dhk->bhkt", "bhkt,hkd->btd"])
@pytest.mark.parametrize("split", [{"data": 4, "tensor": 2}, {"data": 2, "seq": 2, "tensor": 2}], ids=str)
def test_devices_exchange_what_they_do_for_the_einsum(split, equation):
    mesh, args = MeshConfig(**split).build(), arrays(equation)
    given, summed, new, result = read_equation(equation)
    axes = {"b": "data", "h": "tensor"} | ({"t": "seq"} if "seq" in split else {})
    places = [
        NamedSharding(mesh, PartitionSpec(*map(axes.get, letters)))
        for letters in (given, summed + new, result)
    ]
    x, kernel, y = places

    def exchanged(device):
        with compiling_for(device), jax.set_mesh(mesh):
            run = jax.jit(passes(equation), in_shardings=places, out_shardings=(y, x, kernel))
            lowered = run.lower(*args)
        return sorted((c.kind, c.bytes) for c in collectives(lowered.compile()))

    assert exchanged(H200) == exchanged(CPU)


class Waved(nn.Module):
    """The sine of channel-major y."""

    @nn.compact
    def __call__(self, x):
        sizes, names = {"h": 2, "k": 4}, ("embed", "heads", "head_dim")
        return jnp.sin(Linear("btd,dhk->bhkt", sizes, names)(x))


def test_remat_of_dots_keeps_the_product():
    x = jnp.ones((ROWS, LENGTH, INNER))
    params = nn.meta.unbox(jax.eval_shape(Waved().init, jax.random.key(0), x))
    params = jax.tree.map(lambda p: jnp.ones(p.shape, p.dtype), params)

    def count(module):
        with compiling_for(H200):
            return len(products(jax.grad(lambda p, x: module.apply(p, x).sum()), params, x))

    modules = (Waved(), remat(Waved, "dots")(), remat(Waved, "full")())
    assert list(map(count, modules)) == [2, 2, 3]


def gated_mlp(tokens):
    """A gated MLP, its parameters and bf16 rows of so many tokens."""
    mlp = MLP(24, jnp.bfloat16)
    rng = np.random.default_rng(3)
    x = jnp.asarray(rng.standard_normal((1, tokens, 16)), jnp.bfloat16)
    params = nn.meta.unbox(mlp.init(make_key(0), x[:, :2]))
    return mlp, params, x


def test_products_of_gate_and_up_are_one_on_a_gpu_if_tokens_are_many():
    def count(tokens, device, policy="none"):
        mlp, params, x = gated_mlp(tokens)
        module = mlp if policy == "none" else remat(MLP, policy)(24, jnp.bfloat16)
        with compiling_for(device):
            return len(products(jax.grad(lambda p: jnp.sum(module.apply(p, x).astype(jnp.float32))), params))

    many = JOINED_POSITIONS
    # Two forward, two for kernels, one for the hidden layer
    assert [count(many, H200), count(many, H200, "dots")] == [5, 5]
    assert [count(many - 1, H200), count(many, CPU)] == [7, 7]


def test_joined_products_equal_those_of_each_kernel():
    mlp, params, x = gated_mlp(JOINED_POSITIONS)

    @partial(jax.value_and_grad, argnums=(0, 1))
    def run(params, x):
        return jnp.mean(jnp.square(mlp.apply(params, x).astype(jnp.float32)))

    each = run(params, x)
    with compiling_for(H200):
        traced = jax.make_jaxpr(run)(params, x)
    joined = jax.core.eval_jaxpr(traced.jaxpr, traced.consts, *jax.tree.leaves((params, x)))
    for ours, theirs in zip(joined, jax.tree.leaves(each), strict=True):
        assert_close(ours, theirs, jnp.bfloat16, JOINED_POSITIONS)


@pytest.mark.parametrize("equation", ["btd,dhk->bthk", "bthk,hkd->btd"])
def test_gradients_of_heads_are_matrices_on_a_gpu(equation):
    """XLA would transpose a gradient of three axes, and both moments with it."""
    args = arrays(equation)

    def run(device):
        with compiling_for(device):
            traced = jax.make_jaxpr(passes(equation))(*args)
        made = [eqn.outvars[0].aval.ndim for eqn in traced.eqns if eqn.primitive.name == "dot_general"]
        return min(made), jax.core.eval_jaxpr(traced.jaxpr, traced.consts, *args)

    (ours, found), (theirs, expected) = map(run, (H200, CPU))
    assert (ours, theirs) == (2, 3)
    for name, a, b in zip(("y", "dx", "dw"), found, expected, strict=True):
        assert_close(a, b, n=ROWS * LENGTH, what=name)


def test_products_are_apart_where_they_have_a_gradient():
    def add(x):
        return x + apart(2 * x)

    x = jnp.arange(3.0)
    passes = add, jax.grad(lambda x: add(x).sum()), jax.checkpoint(add)
    # One forward, none backward: a gradient is fused with its readers
    assert [str(jax.make_jaxpr(run)(x)).count("optimization_barrier") for run in passes] == [0, 1, 0]
    assert_array_equal(jax.grad(lambda x: add(x).sum())(x), jnp.full(3, 3.0))


def test_frozen_kernel_adds_no_product():
    x, kernel, _ = arrays("btd,dhk->bhkt")
    with compiling_for(H200):
        assert products(jax.grad(lambda x: multiply("btd,dhk->bhkt", x, kernel).sum()), x) == [True, True]


@pytest.mark.parametrize(
    ("equation", "x", "kernel"),
    [
        ("...d,de->...e", (1, 1, 256), (256, 24)),
        ("btd,dhk->bthk", (1, 1, 256), (256, 4, 8)),
        ("bthk,hkd->btd", (1, 1, 4, 64), (4, 64, 24)),
        ("btd,de->bet", (1, 1, 256), (256, 24)),
        ("bct,cd->btd", (1, 256, 1), (256, 24)),
    ],
)
def test_one_token_is_multiplied_in_parts(equation, x, kernel):
    x, kernel = (
        jnp.asarray(np.random.default_rng(i).standard_normal(shape), jnp.bfloat16)
        for i, shape in enumerate((x, kernel))
    )
    with compiling_for(H200):
        assert products(functools.partial(multiply, equation), x, kernel) == []
        found = multiply(equation, x, kernel)
        exact = multiply(equation, x, kernel, preferred_element_type=jnp.float32)
        assert products(functools.partial(multiply, equation), *(a.astype(jnp.float32) for a in (x, kernel)))
    wide = [np.asarray(a, np.float64) for a in (x, kernel)]
    assert_close(exact, np.einsum(equation, *wide).astype(np.float32), n=256)
    np.testing.assert_array_equal(found, exact.astype(jnp.bfloat16))


@pytest.mark.parametrize(
    ("equation", "x", "kernel"),
    [("btd,de->bet", (1, 40, 256), (256, 8)), ("bct,cd->btd", (1, 256, 40), (256, 8))],
)
def test_a_cpu_adds_up_channel_major_products_in_fp32(equation, x, kernel):
    """XLA itself keeps their sums in 16 bits there, 11 times as far off over 256 channels."""
    x, kernel = (
        jax.random.normal(jax.random.key(i), size, jnp.bfloat16) for i, size in enumerate((x, kernel))
    )
    wide = multiply(equation, x.astype(jnp.float32), kernel.astype(jnp.float32))
    assert_array_equal(jax.jit(multiply, static_argnums=0)(equation, x, kernel), wide.astype(jnp.bfloat16))


def test_dropout_drops_the_same_entries_in_both_passes_and_on_any_mesh():
    """A share of `rate`, apart for two keys; what is left is scaled so that the mean stays."""
    x, rate = jnp.ones((8, 64, 32)), 0.3

    def run(x, seed):
        return Dropout(rate).apply({}, x, rngs={"dropout": make_key(seed)})

    y, back = jax.vjp(lambda x: run(x, 1), x)
    kept, others = y > 0, run(x, 2) > 0
    assert abs(float(kept.mean()) - (1 - rate)) < 5 * (rate * (1 - rate) / x.size) ** 0.5
    both = (1 - rate) ** 2
    assert abs(float((kept & others).mean()) - both) < 5 * (both * (1 - both) / x.size) ** 0.5
    np.testing.assert_array_equal(y, jnp.where(kept, 1 / jnp.float32(1 - rate), 0))
    np.testing.assert_array_equal(back(x)[0], y)
    with jax.set_mesh(MeshConfig(data=4, seq=2).build(jax.devices())):
        np.testing.assert_array_equal(jax.jit(run, static_argnums=1)(x, 1), y)
    assert Dropout(rate).apply({}, x) is x


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


def test_that_a_kernel_that_is_there_is_not_drawn_again():
    """Flax's `param` traces the initialiser in each call, to compare shapes."""
    drawn = []

    def init(key, shape, dtype):
        drawn.append(shape)
        return jnp.ones(shape, dtype)

    x = jnp.ones((2, INNER))
    layer = Linear("bd,de->be", {"e": 3}, ("embed", "mlp"), kernel_init=init)
    params = layer.init(make_key(0), x)
    assert drawn == [(INNER, 3)]
    layer.apply(params, x)
    assert drawn == [(INNER, 3)]
    with pytest.raises(ScopeParamShapeError, match=r"shape \(6, 4\), but .* has shape \(6, 3\)"):
        layer.clone(sizes={"e": 4}).apply(params, x)
