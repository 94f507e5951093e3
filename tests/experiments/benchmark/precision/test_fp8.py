"""The benchmarks of FP8: their forms, and what they make of times."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmark.precision import fp8_loss, fp8_products, step_kernels
from jaxblt import recipes


def test_the_crossover_is_the_smallest_square_from_which_all_larger_are_faster():
    def row(side, fp8, outer=None):
        times = {"bfloat16": {"median": 1.0}, "delayed": {"median": fp8}}
        return {"shape": [side, side, outer or side], "taken": {"forward_backward": times}}

    rows = [row(1024, 0.9), row(2048, 1.1), row(4096, 0.9), row(8192, 0.6), row(16384, 2.0, 64)]
    assert fp8_products.crossover(rows) == 4096
    assert fp8_products.crossover([*rows, row(16384, 1.0)]) is None


def test_all_forms_multiply_alike():
    x, kernel = (jax.random.normal(jax.random.key(i), (64, 64)).astype(jnp.bfloat16) for i in range(2))
    found = fp8_products.errors(fp8_products.forms((4.0, 4.0, 1.0)), x, kernel)
    assert set(found) == {"bfloat16", "current", "delayed"}
    assert found.pop("bfloat16") < 0.01 < min(found.values()) <= max(found.values()) < 0.06
    y = fp8_products.plain(*fp8_products.plain_operands(x, kernel / 8)) * 8 / 64
    assert np.linalg.norm(y - x @ kernel) < 0.06 * np.linalg.norm(x @ kernel)


def test_recipes_of_losses_need_no_entropy_run():
    recipe = fp8_loss.without_entropies(recipes.get("books"), ("texts/*/*.txt",), 400)
    assert (recipe.train.steps, recipe.patcher.mode, recipe.entropy_run) == (400, "static", None)
    assert recipe.data == replace(recipes.get("books").data, paths=("texts/*/*.txt",))
    seeded = fp8_loss.with_seed(fp8_loss.without_entropies(recipe, (), 400, rows=3), 7)
    assert (seeded.data.batch_size, seeded.data.seed, seeded.train.seed) == (3, 7, 7)
    assert step_kernels.with_form(recipe, "float16").train.dtype == "float16"
    assert step_kernels.with_form(recipe, "delayed").train.fp8.scaling == "delayed"
    assert step_kernels.with_form(recipe, "dtype") == recipe
