"""A step that is compiled ahead is the one that runs, and what fails on the other thread is raised where it runs."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxblt.training.start import step_ahead
from jaxblt.training.start.setup import init_state, make_setup, open_data, to_devices
from jaxblt.training.start.startup import Startup
from jaxblt.training.start.step_ahead import StepAhead
from tests.training.tiny import Letters, tiny_recipe


@pytest.mark.slow(days=28, group="costly")
def test_the_program_that_is_compiled_ahead_runs(caplog: pytest.LogCaptureFixture) -> None:
    """On all devices, for a state that is drawn later. JAX logs the compilations of this thread alone."""
    recipe = tiny_recipe(mesh={"data": 2, "fsdp": -1})
    mesh = recipe.mesh.build()
    with jax.set_mesh(mesh), ThreadPoolExecutor(1) as pool, jax.log_compiles():
        data, setup = open_data(recipe, mesh, source=Letters()), make_setup(recipe, mesh, {})
        step = StepAhead(data, pool, Startup())
        step.prepare(setup, 0)
        state = init_state(setup, {})
        batch = to_devices(data.batch(0), mesh, recipe.data.batch_size, setup.layout)
        state, _ = step(state, batch)
        step.prepare(setup, 1)
        state, _ = step(state, batch)
    assert int(state.step) == 2
    compiled = [text for text in caplog.messages if "Finished XLA compilation" in text]
    assert compiled
    assert not [text for text in compiled if "train_step" in text]


def test_what_fails_while_it_compiles_is_raised_by_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("out of registers")

    def lower(*_: Any) -> SimpleNamespace:
        return SimpleNamespace(compile=fail)

    made = SimpleNamespace(trace=lambda *_: None, lower=lower)
    monkeypatch.setattr(step_ahead, "recipe_step", lambda setup: made)
    recipe = tiny_recipe()
    mesh = recipe.mesh.build()
    with jax.set_mesh(mesh), ThreadPoolExecutor(1) as pool:
        data, setup = open_data(recipe, mesh, source=Letters()), make_setup(recipe, mesh, {})
        step: Any = StepAhead(data, pool, Startup())
        step.prepare(setup, 0)
        with pytest.raises(RuntimeError, match="out of registers"):
            step(None, None)
