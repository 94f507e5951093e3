import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.adapters import AdapterConfig, attach, detach
from jaxblt.data import make_dataset
from jaxblt.data.vocab import VOCAB_SIZE
from jaxblt.models import ByteLMConfig, StackConfig
from jaxblt.parallel import make_mesh
from jaxblt.parallel.islands import over_batch
from jaxblt.training.flops import count_params, matmul_flops, mfu, peak_flops
from jaxblt.training.log.report import costs_by_length
from jaxblt.training.start.setup import boxed_params, make_setup, make_task, recipe_step
from jaxblt.training.state import BASE, Frozen
from tests.answers.runs import SHORT_HYENA
from tests.training.tiny import Letters, random_batch, tiny_recipe

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


DIM, WIDE, RANK = 16, 20, 3
STACK = StackConfig(dim=DIM, num_layers=1, pattern="S", mlp_dim=WIDE, mixers={"S": SHORT_HYENA})
KERNELS = ((DIM, 3 * DIM), (DIM, DIM), (DIM, WIDE), (DIM, WIDE), (WIDE, DIM))
ADAPTED = attach(ByteLMConfig(stack=STACK), AdapterConfig(sites=("mixer/*", "mlp/*"), rank=RANK))


def setup_of(frozen: bool):
    """Of a run of this model with adapters, over a base or of all parameters."""
    recipe = tiny_recipe(model=ADAPTED, base_run="runs/base" if frozen else None)
    bare = tiny_recipe(model=detach(ADAPTED))
    base = {BASE: Frozen(nn.meta.unbox(boxed_params(make_task(bare), bare)), "")} if frozen else None
    return make_setup(recipe, make_mesh(devices=jax.devices()[:1]), base)


@pytest.mark.slow(days=28, group="costly", every="True")
@pytest.mark.parametrize("frozen", [True, False])
def test_the_cost_of_a_byte_by_hand(frozen: bool) -> None:
    setup = setup_of(frozen)
    data = make_dataset(setup.recipe.data, split="train", source=Letters())
    filters = DIM * setup.recipe.data.seq_len  # as a Toeplitz matrix
    base = 2 * (sum(k * n for k, n in KERNELS) + DIM * VOCAB_SIZE + filters)
    adapters = 2 * RANK * sum(k + n for k, n in KERNELS)
    cost = costs_by_length(setup, data)[setup.recipe.data.seq_len]
    assert cost.byte == (2 if frozen else 3) * base + 3 * adapters


@pytest.mark.slow(days=28, group="costly")
def test_a_compiled_step_makes_no_gradient_of_a_frozen_weight() -> None:
    """A product of the shape of a base's kernel is its gradient: of tokens there are 4 x 32."""
    assert products(setup_of(frozen=True)) == []
    assert set(products(setup_of(frozen=False))) == set(KERNELS)


def products(setup) -> list[tuple[int, ...]]:
    """Shapes of kernels, as often as a compiled step has a product of this shape."""
    step = recipe_step(setup).lower(setup.abstract, random_batch(0)).compile().as_text()
    shapes = [tuple(map(int, found.split(","))) for found in re.findall(r"= f32\[([\d,]+)\]\S* dot\(", step)]
    assert len(shapes) > len(KERNELS)
    return [kernel for kernel in KERNELS for shape in shapes if kernel in (shape, shape[::-1])]
