"""What a notebook prints of an object is a few lines, whatever it holds."""

import dataclasses
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
import pytest

import configs
from jaxblt.data import BytesSource, DataConfig
from jaxblt.mixers import init_state
from jaxblt.models.mixer_table import STORED, WORDS
from jaxblt.patching import PatcherConfig
from jaxblt.run import Run
from jaxblt.show import MOST, show
from jaxblt.training.start.setup import make_task
from tests.training.tiny import tiny_recipe

MANY = 2_000
"""Characters that no object is shown in."""


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass(frozen=True)
class Holder:
    one: Any
    two: Any = 3
    kept: Any = dataclasses.field(default=None, repr=False)

    __repr__ = show


@pytest.mark.parametrize(
    ("holder", "text"),
    [
        (Holder(1), "Holder(one=1)"),
        (Holder("a" * 500, two=4), f"Holder(one='{'a' * 115} ..., two=4)"),
        (Holder(np.zeros((2, 3), np.float32), np.zeros(2)), "Holder(one=float32[2,3], two=float64[2])"),
        (Holder(Pair((), int), [0] * 9), "Holder(one=Pair(left=(), right=int), two=[0, 0, 0, 0, 0, 0, ... 3 more])"),
        (Holder({"a": {str(i): np.zeros(9) for i in range(7)}}, kept=9), "Holder(one=<7 arrays of 63 numbers>)"),
        (Holder(nn.Dense(3), {"x": np.float32(2)}), "Holder(one=Dense(...), two={'x': np.float32(2.0)})"),
    ],
)  # fmt: skip
def test_an_object_is_shown_as_the_call_that_makes_it(holder: Holder, text: str) -> None:
    assert repr(holder) == text
    assert len(repr(Holder([Holder(["a" * 99] * 6)] * 6))) == MOST


@pytest.mark.parametrize("name", configs.RECIPES)
def test_recipes_are_shown_by_what_they_set(name: str) -> None:
    recipe = configs.get(name)
    assert repr(recipe).startswith(f"Recipe(name={recipe.name!r}, model=")
    assert len(repr(recipe)) < MANY


@pytest.mark.parametrize(
    "config", [*WORDS.values(), STORED["N"], STORED["B"]], ids=[*WORDS, "ntm", "slot_memory"]
)
def test_states_and_their_parts_are_shown_without_their_numbers(config: Any) -> None:
    state = jax.eval_shape(lambda: init_state(config, 2, capacity=64))
    filled = jax.tree.map(lambda x: np.full(x.shape, 0.12345678).astype(x.dtype), state)
    check_short(filled)


def test_data_are_shown_by_their_number() -> None:
    check_short(DataConfig(paths=tuple(f"data/{i}.txt" for i in range(1000)), seq_len=8))
    check_short(BytesSource([b"ACGT" * 1000] * 100))


def test_a_run_is_shown_in_a_few_lines() -> None:
    patcher = PatcherConfig(mode="space", block_size=16, capacity=8)
    recipe = dataclasses.replace(tiny_recipe(), patcher=patcher)
    params = {f"layer_{i}": np.zeros((30, 30), np.float32) for i in range(40)}
    shown = repr(Run(recipe, 1200, make_task(recipe), params, {}))
    assert shown.startswith(f"Run {recipe.name!r} at step 1,200 of 24\n")
    assert "TinyConfig, 36,000 parameters" in shown
    assert "patcher    space, 8 slots of 16 bytes" in shown
    assert len(shown) < MANY


def check_short(value: Any) -> None:
    """Check what a value of ours, and each of its parts that is ours, is shown as."""
    if type(value).__module__.partition(".")[0] == "jaxblt":
        assert len(repr(value)) < MANY, type(value)
    if dataclasses.is_dataclass(value):
        parts: Any = [getattr(value, field.name) for field in dataclasses.fields(value)]
    else:
        parts = (
            value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
        )
    for part in parts:
        check_short(part)
