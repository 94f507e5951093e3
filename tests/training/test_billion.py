"""The recipes of a billion parameters, planned from shapes: no array of theirs is made."""

from dataclasses import replace

import jax
import pytest

import configs
from jaxblt.precision import Fp8Config
from jaxblt.profiling.plan import device_bytes
from jaxblt.training.flops import count_params
from jaxblt.training.start.compile_ahead import settle
from jaxblt.training.start.frozen import param_shapes
from jaxblt.training.start.setup import make_setup
from jaxblt.training.state import ENTROPY, Frozen


@pytest.mark.slow(days=28, group="costly")
@pytest.mark.parametrize(
    ("name", "millions", "products"), [("books_1b_transformer", 1215, 168), ("books_1b", 1406, 216)]
)
def test_a_billion_parameters_are_planned(name, millions, products):
    """Parameters, masters with both moments, and the products that FP8 takes."""
    recipe = configs.get(name)
    frozen = {}
    if recipe.entropy_run is not None:
        recipe = replace(recipe, entropy_model=configs.get("books_1b_entropy").model)
        frozen = {ENTROPY: Frozen(param_shapes(recipe.entropy_model), "planned")}
    recipe, _ = settle(
        replace(recipe, train=replace(recipe.train, precision="fp8", fp8=Fp8Config(scaling="delayed")))
    )
    mesh = recipe.mesh.build(jax.devices()[:1])
    setup = make_setup(recipe, mesh, frozen)
    total, plain = count_params(setup.whole)
    assert round(plain / 1e6) == millions
    assert len(setup.sites) == products
    assert device_bytes(setup.abstract.params) == 4 * total
    assert device_bytes(setup.abstract.opt_state) == pytest.approx(8 * total, rel=1e-6)
    assert device_bytes(setup.abstract.scaling) == len(setup.sites) * 3 * 16 * 4
