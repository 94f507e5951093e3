"""Keys name their generator, so that no setting of the process makes rows draw together."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.inference import SamplingConfig, sample
from jaxblt.random_keys import make_key

LIBRARY = Path(__file__).parents[1] / "jaxblt"


def test_no_key_of_the_library_leaves_its_generator_to_the_process():
    made = re.compile(r"random\.key\(|PRNGKey\(")
    files = {path.name for path in LIBRARY.rglob("*.py") if made.search(path.read_text(encoding="utf-8"))}
    assert files == {"random_keys.py"}


def test_a_key_is_the_same_under_another_default():
    with jax.default_prng_impl("rbg"):
        key = make_key(3)
    np.testing.assert_array_equal(jax.random.key_data(key), jax.random.key_data(make_key(3)))


def test_keys_that_draw_rows_together_are_refused():
    keys = jax.random.split(jax.random.key(0, impl="rbg"), 2)
    with pytest.raises(
        ValueError, match=r"'rbg' draw the rows of a batch from one key: make them with jax\.random"
    ):
        sample(SamplingConfig(), keys, jnp.zeros((2, 260)))
