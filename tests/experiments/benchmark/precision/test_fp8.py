"""The forms of steps in FP8 and float16, and the recipes that they are trained with."""

from dataclasses import replace

from experiments.benchmark.precision import fp8_loss, step_kernels
from jaxblt import recipes


def test_recipes_of_losses_need_no_entropy_run():
    recipe = fp8_loss.without_entropies(recipes.get("books"), ("texts/*/*.txt",), 400)
    assert (recipe.train.steps, recipe.patcher.mode, recipe.entropy_run) == (400, "static", None)
    assert recipe.data == replace(recipes.get("books").data, paths=("texts/*/*.txt",))
    seeded = fp8_loss.with_seed(fp8_loss.without_entropies(recipe, (), 400, rows=3), 7)
    assert (seeded.data.batch_size, seeded.data.seed, seeded.train.seed) == (3, 7, 7)
    assert step_kernels.with_form(recipe, "float16").train.dtype == "float16"
    assert step_kernels.with_form(recipe, "delayed").train.fp8.scaling == "delayed"
    assert step_kernels.with_form(recipe, "attention").train.fp8.attention
    assert step_kernels.with_form(recipe, "dtype") == recipe
