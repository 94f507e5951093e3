"""What a step over a frozen base costs: forward and dx of the base, three times the forward pass of adapters."""

import re

import flax.linen as nn
import jax
import pytest

from jaxblt.adapters import AdapterConfig, attach, detach
from jaxblt.data import make_dataset
from jaxblt.data.vocab import VOCAB_SIZE
from jaxblt.models import ByteLMConfig, StackConfig
from jaxblt.parallel import make_mesh
from jaxblt.training.log.report import costs_by_length
from jaxblt.training.start.setup import boxed_params, make_setup, make_task, recipe_step
from jaxblt.training.state import BASE, Frozen
from tests.answers.runs import SHORT_HYENA
from tests.training.tiny import Letters, random_batch, tiny_recipe

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
