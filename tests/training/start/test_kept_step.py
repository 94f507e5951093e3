"""A step that an earlier process kept is the same step, and one that anything else was made of is not taken."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jaxblt
from jaxblt import process_start
from jaxblt.models import ByteLMConfig, StackConfig
from jaxblt.training.recipe import Recipe
from jaxblt.training.start import kept_step, step_ahead
from jaxblt.training.start.kept_step import MOST_KEPT, STEP, KeptStep
from jaxblt.training.start.setup import Setup, init_state, make_setup, open_data, to_devices
from jaxblt.training.start.startup import Startup
from jaxblt.training.start.step_ahead import StepAhead
from tests.training.tiny import Letters, TinyConfig, tiny_recipe


@dataclass
class Started:
    """A prepared step with what it takes."""

    step: StepAhead
    state: Any
    batch: Any


@contextmanager
def _started(setup: Setup, drawn: Any) -> Iterator[Started]:
    """A step over a copy of the state that was drawn: a step takes its buffers."""
    recipe, mesh = setup.recipe, setup.mesh
    with jax.set_mesh(mesh), ThreadPoolExecutor(1) as pool:
        data = open_data(recipe, mesh, source=Letters())
        step = StepAhead(data, pool, Startup())
        step.prepare(setup, 0)
        batch = to_devices(data.batch(0), mesh, recipe.data.batch_size, setup.layout)
        yield Started(step, jax.device_put(drawn, setup.shardings), batch)


def _two_steps(began: Started) -> list[np.ndarray]:
    state, _ = began.step(began.state, began.batch)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(began.step(state, began.batch))]


def _recipe(tmp_path: Path) -> Recipe:
    stack = StackConfig(dim=16, num_layers=1, pattern=("recurrence",), mlp_dim=0)
    recipe = tiny_recipe(model=ByteLMConfig(stack=stack), mesh={"data": 2, "fsdp": -1})
    return replace(recipe, train=replace(recipe.train, compilation_cache=str(tmp_path)))


def test_a_kept_step_is_not_traced_and_takes_the_same_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit. Shorter rows go to the jitted step, and all do if the file is damaged, which removes it.

    The step that was used longest ago makes room.
    """
    recipe = _recipe(tmp_path)
    for number in range(MOST_KEPT):
        (tmp_path / "steps" / str(number)).mkdir(parents=True)
        os.utime(tmp_path / "steps" / str(number), (number, number))
    setup = make_setup(recipe, mesh := recipe.mesh.build(), {})
    with jax.set_mesh(mesh):
        drawn = jax.device_get(init_state(setup, {}))
    with _started(setup, drawn) as began:
        choices, first = began.step.choices, _two_steps(began)
    assert not (tmp_path / "steps" / "0").exists()
    assert (tmp_path / "steps" / "1").exists()
    taken: list[Any] = []

    def take(state: Any, batch: Any) -> tuple[Any, Any]:
        taken.append(batch)
        return state, {}

    monkeypatch.setattr(step_ahead, "recipe_step", lambda setup: take)
    with _started(setup, drawn) as began:
        began.step(began.state, jax.tree.map(lambda x: x[:, :16], began.batch))
        assert len(taken) == 1
        second = _two_steps(began)
        assert began.step.choices == choices
    assert len(taken) == 1
    for before, after in zip(first, second, strict=True):
        np.testing.assert_array_equal(before, after)
    (file,) = tmp_path.rglob(STEP)
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with _started(setup, drawn) as began:
        began.step(began.state, began.batch)
    assert len(taken) == 2
    assert not file.exists()


def test_a_step_of_anything_else_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = _recipe(tmp_path)
    mesh = recipe.mesh.build()

    def place(setup: Setup) -> Path | None:
        return KeptStep.of(setup, (setup.abstract,)).place

    def place_of(recipe: Recipe) -> Path | None:
        return place(make_setup(recipe, mesh, {}))

    setup = make_setup(recipe, mesh, {})
    kept = place(setup)
    assert kept == place_of(recipe)
    assert kept != place_of(replace(recipe, train=replace(recipe.train, seed=5)))
    with jax.default_matmul_precision("highest"):
        assert kept != place(setup)
    with monkeypatch.context() as patched:
        patched.setenv("XLA_FLAGS", "--xla_dump_to=x")
        assert kept != place(setup)
    with jaxblt.reference_ops():
        assert kept != place(setup)
    with jax.default_device(jax.devices()[0]):
        assert kept != place(setup)
    with monkeypatch.context() as patched:
        patched.setattr(kept_step, "_sources", lambda: "changed")
        assert kept != place(setup)
    with monkeypatch.context() as patched:
        patched.setattr(process_start, "BEGAN", 0.0)
        assert place(setup) is None
    assert place_of(replace(recipe, model=TinyConfig())) is None
    bare = replace(recipe, train=replace(recipe.train, compilation_cache=None))
    assert place_of(bare) is None
