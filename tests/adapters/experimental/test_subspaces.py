"""Disjoint subspaces: training one task changes no bit of another's update, and updates of tasks add up."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxblt.adapters import AdapterConfig, ChunkMean, RouterConfig, attach, fuse, join_params, split_params
from jaxblt.adapters.experimental.subspaces import mask_subspace, plan_subspaces, subspace_code
from jaxblt.mixers import AttentionConfig
from jaxblt.models import ByteLMConfig, StackConfig
from tests.parameters import drawn
from tests.tolerances import assert_close

BANK = AdapterConfig(rank=8, blocks=4, router=RouterConfig(chunk=4, reads=(ChunkMean(),), hidden=8))
STACK = StackConfig(
    dim=8, num_layers=2, pattern="A", mixers={"A": AttentionConfig(dim=8, num_heads=2)}, mlp_dim=12
)
CONFIG = attach(ByteLMConfig(stack=STACK), BANK)
PLAN = plan_subspaces(BANK, {"law": 1, "code": 2})


@pytest.fixture(scope="module")
def params() -> Any:
    return drawn(CONFIG.build(), jnp.zeros((1, 8), jnp.int32))["params"]


def merged(params: Any, *tasks: str) -> Any:
    """Return the merged kernels of the model in which tasks act."""
    code = sum((subspace_code(BANK, PLAN[task]) for task in tasks), np.zeros(4, np.float32))
    return fuse(CONFIG, params, code=jnp.asarray(code))[1]


@pytest.mark.slow(days=28, group="costly", every="False")
@pytest.mark.parametrize("masked", [True, False])
def test_a_task_that_is_trained_leaves_another_alone(params: Any, masked: bool) -> None:
    """Gradients of the others are 0 in both cases; without the mask the optimiser's decay moves them."""
    base, trained = split_params(params)
    optimizer = optax.adamw(1e-2, weight_decay=0.1)

    @jax.jit
    def step(trained: Any) -> Any:
        mask = mask_subspace(BANK, trained, PLAN["code"])
        gradient = jax.tree.map(lambda p, m: jnp.sin(100 * p) * m, trained, mask)
        with jax.numpy_dtype_promotion("standard"):
            updates, _ = optimizer.update(gradient, optimizer.init(trained), trained)
        if masked:
            updates = jax.tree.map(jnp.multiply, updates, mask)
        return optax.apply_updates(trained, updates)

    after = join_params(base, step(trained))
    law, code = (
        jax.tree.leaves(jax.tree.map(lambda a, b: np.array_equal(a, b), merged(params, t), merged(after, t)))
        for t in PLAN
    )
    assert all(law) is masked
    assert not all(code)


def test_updates_of_tasks_add_up(params: Any) -> None:
    base = split_params(params)[0]
    law, code, both = (merged(params, *tasks) for tasks in (("law",), ("code",), tuple(PLAN)))
    expected = jax.tree.map(lambda a, b, c: a + b - c, law, code, base)
    jax.tree.map(lambda a, b: assert_close(a, b, n=24), both, expected)
    assert PLAN == {"law": (0,), "code": (1, 2)}


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ask for \{'law': 3, 'code': 2\} experts, and the bank has 4"):
        plan_subspaces(BANK, {"law": 3, "code": 2})
