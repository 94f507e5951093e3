"""The global norm, and clipping to it."""

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxblt.parallel import MeshConfig
from jaxblt.random_keys import make_key
from jaxblt.training.optimisers.norm import clip_by_global_norm, global_norm
from tests.tolerances import assert_close


@pytest.mark.slow(days=28, group="costly")
def test_norm_and_clipping_are_those_of_optax() -> None:
    shapes = {"scalar": (), "scale": (5,), "matrix": (7, 3), "heads": (4, 2, 6), "none": (0, 3)}
    tree = {name: jax.random.normal(make_key(i), shape) for i, (name, shape) in enumerate(shapes.items())}
    wanted = optax.tree.norm(tree)
    assert_close(global_norm(tree), wanted, n=200)
    with jax.set_mesh(MeshConfig(data=2).build(jax.devices()[:2])):
        assert_close(jax.jit(global_norm)(tree), wanted, n=200)
    assert float(global_norm({})) == 0
    for most in (0.5, 100.0):
        clips = [make(most) for make in (clip_by_global_norm, optax.clip_by_global_norm)]
        (ours, state), (theirs, other) = (clip.update(tree, clip.init(tree)) for clip in clips)
        jax.tree.map(lambda a, b: assert_close(a, b, n=200), ours, theirs)
        assert state == other
    infinite = {"a": jnp.array([jnp.inf, 1.0])}
    assert not jnp.isfinite(global_norm(infinite))
