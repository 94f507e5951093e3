"""These tests compile many programs and run each a few times: a quick compiler serves them best."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def compile_quickly():
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
