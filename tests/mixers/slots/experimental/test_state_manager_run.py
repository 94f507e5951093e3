"""A manager inside a run: a planted dead slot is closed, and the others live."""

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.mixers import StateEngine, StateEngineConfig
from jaxblt.mixers.slots.experimental.state_manager import IMPORTANCE, StateManager
from jaxblt.models import ByteLMConfig, StackConfig
from jaxblt.side_outputs import SIDE_OUTPUTS, next_params, with_next
from jaxblt.training.loop import fit
from tests.training.tiny import Letters, tiny_recipe

HEADS, SLOTS = 2, 4
MANAGER = StateManager(decay=0.6, threshold=0.2)
DEAD = np.zeros((HEADS, SLOTS), bool)
DEAD[0, 1] = True


@dataclass(frozen=True)
class PlantedConfig(StateEngineConfig):
    """An engine that begins with a slot that nothing reads."""

    def build(self, *, dtype: Any = jnp.float32, name: str | None = None) -> "Planted":
        return Planted(self, dtype, name=name)


class Planted(StateEngine):
    def param(self, name: str, init: Any, *args: Any, **options: Any) -> Any:  # pyright: ignore
        if name == "read_bias":
            init = nn.with_logical_partitioning(lambda *_: jnp.where(DEAD, -9.0, 0.0), ("heads", None))
        return super().param(name, init, *args, **options)


ENGINE = StateEngineConfig(dim=8, num_heads=HEADS, head_dim=4, num_slots=SLOTS, manager=MANAGER, chunk_size=8)


@pytest.mark.slow(days=28, group="costly", turn="mixers/slots/experimental/test_state_manager_run")
def test_dead_slots_are_neither_written_nor_read_and_importance_follows_reads() -> None:
    module, x = ENGINE.build(), jax.random.normal(jax.random.key(0), (2, 16, 8))
    params = nn.meta.unbox(jax.jit(module.init)(jax.random.key(1), x))["params"]
    assert np.array_equal(params[IMPORTANCE], np.ones(HEADS * SLOTS))
    before = np.where(DEAD.reshape(-1), 0.1, 1.0)

    def sown(params: Any) -> Any:
        (y, _), side = module.apply({"params": params}, x, mutable=SIDE_OUTPUTS)
        return jnp.sum(y**2), side

    params = params | {IMPORTANCE: jnp.asarray(before, jnp.float32)}
    gradient, side = jax.jit(jax.grad(sown, has_aux=True))(params)
    metrics = {name: np.asarray(sown.value) for name, (sown,) in side["metrics"].items()}
    mass = metrics["state_read_mass"]
    np.testing.assert_array_equal(mass == 0, DEAD.reshape(-1))
    assert metrics["state_dead"] == 1
    np.testing.assert_allclose(metrics[IMPORTANCE], 0.6 * before + 0.4 * SLOTS * mass, rtol=1e-5)
    assert not np.any(gradient[IMPORTANCE])
    assert not np.any(np.asarray(gradient["route"]["bias"])[DEAD])
    stacked = {"block": {"mixer": params}, "other": params}
    after = with_next(stacked, {"block": {"mixer": next_params(side)}}, jnp.asarray(True))
    np.testing.assert_array_equal(after["block"]["mixer"][IMPORTANCE], metrics[IMPORTANCE])
    assert after["other"] is params


@pytest.mark.slow(days=28, group="costly", turn="mixers/slots/experimental/test_state_manager_run")
def test_a_planted_dead_slot_is_closed_in_a_run_and_the_others_live(tmp_path: Any) -> None:
    planted = PlantedConfig(**{name: getattr(ENGINE, name) for name in ENGINE.__dataclass_fields__})
    stack = StackConfig(dim=8, num_layers=2, pattern=("engine",), mixers={"engine": planted})
    recipe = tiny_recipe(
        model=ByteLMConfig(stack=stack), steps=12, log_every=1, eval_every=0, mesh={"data": 1}
    )
    fitted = fit(recipe, tmp_path / "run", source=Letters(), devices=jax.devices()[:1])
    engine: Any = fitted.state.params["stack"]["periods"]["block_0"]["mixer"]
    importance = jnp.asarray(engine[IMPORTANCE]).reshape(2, HEADS, SLOTS)
    np.testing.assert_array_equal(MANAGER.dead(importance), np.stack([DEAD, DEAD]))
    assert np.all(np.asarray(importance)[:, DEAD] < 0.01)
