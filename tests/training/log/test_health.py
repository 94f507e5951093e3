import jax.numpy as jnp
import pytest

from jaxblt.training.log.health import BadSteps, TrainingFailed, check_health, spans
from tests.training.tiny import tiny_recipe


def test_bad_steps_are_those_before_every_step_is_skipped() -> None:
    bad = BadSteps(max_skips=2)
    for step, count in enumerate((0, 1, 0, 1, 2, 3, 4), start=10):
        bad.add(step, {"skipped_in_a_row": jnp.float32(count)})
    assert bad.fetch() == [11, 13, 14]
    assert bad.fetch() == []


def test_steps_in_words() -> None:
    assert spans([3, 4, 5, 9, 11, 12]) == "3-5, 9, 11-12"
    assert spans([]) == ""


def test_the_error_names_the_steps() -> None:
    recipe = tiny_recipe(max_skips=3)
    check_health({"skipped_in_a_row": 2.0}, 20, recipe)
    with pytest.raises(TrainingFailed, match=r"^steps 11-13 were not finite.*max_skips = 3"):
        check_health({"skipped_in_a_row": 10.0}, 20, recipe)


def test_steps_without_a_target_are_told_apart() -> None:
    with pytest.raises(TrainingFailed, match=r"^steps 11-13 had no target to learn.*data\.scored"):
        check_health({"skipped_in_a_row": 10.0, "scored_bytes": 0.0}, 20, tiny_recipe(max_skips=3))
