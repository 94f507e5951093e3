"""Programs of a step: what each returns, and where the results lie."""

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.benchmark.models import dispatch


def step(state: Any, batch: Any) -> Any:
    """Stand in for a train step."""
    return {"w": state["w"] + batch}, {"loss": jnp.sum(state["w"])}


def test_a_donated_step_copies_no_state_and_all_programs_agree() -> None:
    state, batch = {"w": jnp.ones((8, 128))}, jnp.ones((8, 128))
    called, compiled = dispatch.programs(SimpleNamespace(__wrapped__=step), state, batch)
    sizes = {name: dispatch.new_bytes(one) for name, one in compiled.items()}
    assert sizes["kept"] - sizes["donated"] == state["w"].nbytes
    assert sizes["donated"] < 64
    for name, call in called.items():
        advance = dispatch.stepping(call, state, batch)
        advance()
        turns = dispatch.TURNS if name == "scanned" else 1
        np.testing.assert_array_equal(advance()[0]["w"], jnp.full((8, 128), 1.0 + 2 * turns), err_msg=name)
    held = {"w": jnp.ones((8, 128))}
    place = held["w"].unsafe_buffer_pointer()
    after, _ = compiled["donated"](held, batch)
    assert (held["w"].is_deleted(), after["w"].unsafe_buffer_pointer()) == (True, place)


@pytest.mark.slow(days=28, group="scripts leave their figures")
def test_a_train_step_gives_its_state_s_memory_to_the_next() -> None:
    found = dispatch.of_model(16, 1, 16, 20, by_op=False)
    assert found["new_bytes"]["donated"] < 0.01 * found["state_bytes"] < found["new_bytes"]["kept"]
    assert set(found["above_scanned"]) == {"jitted", "ahead", "jitted, donated", "ahead, donated"}
