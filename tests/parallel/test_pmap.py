"""`jax.pmap`, for programs that still use it: a step on local rows needs no mesh."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxblt.models import ByteLMConfig, StackConfig
from jaxblt.parallel import batch_sharding, make_mesh
from jaxblt.training.metrics import cross_entropy
from tests.parameters import drawn
from tests.tolerances import assert_close

DEVICES, ROWS, LENGTH = 8, 16, 24
MODEL = ByteLMConfig(
    stack=StackConfig(dim=16, num_layers=3, pattern=("H", "A", "recurrence"), mlp_dim=24)
).build()
OPTIMIZER = optax.adam(1e-2)


def loss(params: Any, ids: jax.Array) -> jax.Array:
    logits: Any = MODEL.apply({"params": params}, ids)[0]
    return jnp.mean(cross_entropy(logits[:, :-1], ids[:, 1:]))


def update(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
    with jax.numpy_dtype_promotion("standard"):
        updates, state = OPTIMIZER.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def mesh_losses(params: Any, ids: np.ndarray, steps: int) -> tuple[list[float], Any]:
    mesh, found = make_mesh(data=DEVICES), []

    @jax.jit
    def step(params: Any, state: Any, ids: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, ids)
        return *update(params, state, grads), value

    with jax.set_mesh(mesh):
        whole = NamedSharding(mesh, PartitionSpec())
        params, state = jax.device_put((params, OPTIMIZER.init(params)), whole)
        rows = jax.device_put(ids, batch_sharding(mesh))
        for _ in range(steps):
            params, state, value = step(params, state, rows)
            found.append(float(value))
    return found, params


def pmap_losses(params: Any, ids: np.ndarray, steps: int) -> tuple[list[float], Any]:
    def step(params: Any, state: Any, ids: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, ids)
        value, grads = jax.lax.pmean((value, grads), "rows")
        return *update(params, state, grads), value

    step, found = jax.pmap(step, axis_name="rows"), []
    stack = lambda x: np.broadcast_to(x, (DEVICES, *np.shape(x)))  # noqa: E731
    params, state = jax.tree.map(stack, (params, OPTIMIZER.init(params)))
    for _ in range(steps):
        params, state, value = step(params, state, jnp.asarray(ids).reshape(DEVICES, -1, LENGTH))
        found.append(float(value[0]))
    return found, jax.tree.map(lambda x: np.asarray(x)[0], params)


@pytest.mark.slow(days=28, group="models over a split axis")
def test_a_local_step_under_pmap_equals_the_one_on_a_mesh() -> None:
    ids = np.random.default_rng(0).integers(4, 12, (ROWS, LENGTH)).astype(np.int32)
    params = jax.device_get(drawn(MODEL, ids)["params"])
    expected, after = mesh_losses(params, ids, steps=3)
    found, same = pmap_losses(params, ids, steps=3)
    assert expected[2] < expected[0]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    jax.tree.map(lambda a, b: assert_close(a, b, n=ROWS * LENGTH * 16), same, after)
