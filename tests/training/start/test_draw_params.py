"""Drawing parameters by kinds: the same values, and no more programs for a deeper model."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxblt.mixers import AttentionConfig
from jaxblt.models import ByteLMConfig, StackConfig
from jaxblt.parallel import make_mesh
from jaxblt.training.start import setup
from jaxblt.training.start.draw_params import draw_traced
from jaxblt.training.start.setup import init_state, make_setup
from tests.training.tiny import tiny_recipe


def init_of(layers: int, *, scan: bool = False):
    """A function that draws the parameters of a model of attention."""
    stack = StackConfig(
        dim=8,
        num_layers=layers,
        pattern="A",
        mlp_dim=16,
        scan=scan,
        remat="full",
        mixers={"A": AttentionConfig(dim=8, num_heads=2)},
    )
    model = ByteLMConfig(stack=stack).build()
    return lambda: nn.meta.unbox(model.init(jax.random.key(3), jnp.zeros((1, 16), jnp.int32))["params"])


def draw(init, places):
    traced, shapes = jax.make_jaxpr(init, return_shape=True)()
    return jax.tree.unflatten(jax.tree.structure(shapes), draw_traced(traced, jax.tree.leaves(places)))


def placed(init):
    """Shardings of what it returns: all of it whole on each device."""
    everywhere = NamedSharding(make_mesh(), PartitionSpec())
    return jax.tree.map(lambda _: everywhere, jax.eval_shape(init))


@pytest.mark.slow(days=28, group="costly")
@pytest.mark.parametrize("scan", [False, True])
def test_values_are_those_of_one_program(scan):
    init = init_of(2, scan=scan)
    expected, found = jax.jit(init)(), draw(init, placed(init))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.slow(days=28, group="costly")
def test_a_deeper_model_takes_no_more_programs(monkeypatch):
    asked, jit = [], jax.jit

    def counted(*args, **options):
        asked.append(options)
        return jit(*args, **options)

    counts = []
    for layers in (2, 4):
        init = init_of(layers)
        places = placed(init)
        with monkeypatch.context() as patch:
            patch.setattr(jax, "jit", counted)
            draw(init, places)
        counts.append(sum("out_shardings" in options for options in asked))
        asked.clear()
    assert counts[0] == counts[1]


@pytest.mark.slow(days=28, group="costly")
def test_constants_and_repeated_results():
    taps, shift = np.arange(3.0, dtype=np.float32), jnp.arange(3.0)

    def init():
        keys = jax.random.split(jax.random.key(1))
        drawn = [jax.random.normal(key, (3,)) for key in keys]
        return {"a": drawn[0] + taps, "b": drawn[1] + shift, "c": drawn[1], "d": drawn[1], "e": jnp.zeros(())}

    jax.tree.map(np.testing.assert_array_equal, draw(init, placed(init)), jax.jit(init)())


def test_equal_programs_of_unequal_numbers_are_kept_apart():
    def init():
        key = jax.random.key(1)
        return [scale * jax.random.normal(key, (3,)) for scale in (1.0, 2.0, 2.0)]

    one, two, three = draw(init, placed(init))
    np.testing.assert_array_equal(two, 2 * one)
    np.testing.assert_array_equal(three, two)


@pytest.mark.slow(days=28, group="costly", turn="training/start/test_draw_params")
def test_a_run_starts_with_the_same_parameters_however_they_are_drawn(monkeypatch):
    mesh = make_mesh(devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        run = make_setup(tiny_recipe(), mesh)
        whole = init_state(run)
        monkeypatch.setattr(setup, "MANY", 1)
        by_kind = init_state(run)
    jax.tree.map(np.testing.assert_array_equal, by_kind.params, whole.params)
