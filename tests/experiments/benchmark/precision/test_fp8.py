"""The forms of steps in FP8 and float16, and the recipes that they are trained with."""

from dataclasses import replace

import pytest

from experiments.benchmark.precision import fp8_loss, step_kernels
from jaxblt import recipes
from jaxblt.mixers import AttentionConfig
from jaxblt.models import ByteLMConfig, StackConfig
from tests.training.tiny import tiny_recipe


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


def test_heads_of_a_width_replace_those_of_the_recipe():
    """Heads of their own width or of grouped keys would else stay, and FP8 attention refuse them."""
    attention = AttentionConfig(dim=64, num_heads=8, num_kv_heads=2, head_dim=4)
    stack = StackConfig(dim=64, num_layers=1, pattern=("attention",), mixers={"attention": attention})
    recipe = tiny_recipe(model=ByteLMConfig(stack=stack))
    changed = fp8_loss.with_heads(recipe, 32).model.stack.mixers["attention"]
    assert (changed.num_heads, changed.groups, changed.width) == (2, 2, 32)
    assert fp8_loss.with_heads(recipe, None) == recipe
    with pytest.raises(ValueError, match="--head 48 does not divide the width 64 of recipe 'tiny'"):
        fp8_loss.with_heads(recipe, 48)
    with pytest.raises(ValueError, match="--head 32 is for byte models, and recipe 'books' is none"):
        fp8_loss.with_heads(recipes.get("books"), 32)
