"""The reference model of a recipe, taken from the run that trained it."""

from dataclasses import replace

import flax.linen as nn
import jax
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh

from jaxblt.models.products import products_in
from jaxblt.training.recipe import Recipe
from jaxblt.training.start.base import rounded
from jaxblt.training.start.initial_params import stored_params
from jaxblt.training.start.setup import boxed_params, make_task
from jaxblt.training.state import REFERENCE, Frozen, freeze
from jaxblt.training.stored.resolved import has_rule_of, read_resolved


def load_reference(recipe: Recipe, mesh: Mesh) -> tuple[Recipe, dict[str, Frozen]]:
    """Load the reference by its name among frozen trees; return the recipe with its config too.

    Parameters are stored as a base's are: what the model rounds is kept in the compute dtype. Empty for a recipe
    without a reference, or with its base as one.

    Raises:
      FileNotFoundError: the run is not there.
      ValueError: its model has other ids, or other patches.
    """
    reference = recipe.reference
    if reference is None or reference.run is None:
        return recipe, {}
    trained = read_resolved(reference.run).recipe
    ids = [getattr(model, "vocab_size", None) for model in (trained.model, recipe.model)]
    if ids[0] != ids[1]:
        raise ValueError(
            f"reference.run={reference.run!r} predicts {ids[0]} ids, and the recipe's model {ids[1]}"
        )
    if (trained.patcher is None) != (recipe.patcher is None) or not has_rule_of(recipe, trained):
        raise ValueError(
            f"reference.run={reference.run!r} cuts patches by another rule than the recipe: use a run with the same "
            "patcher and entropy model"
        )
    if not trained.model.causal:
        raise ValueError(f"reference.run={reference.run!r} sees the bytes to predict: use a causal model")
    recipe = replace(recipe, reference=replace(reference, model=trained.model))
    found = make_task(recipe).reference
    assert found is not None
    teacher = replace(make_task(recipe), model=found.model)
    dtype = recipe.train.compute_dtype
    products, boxed = products_in(dtype, lambda: boxed_params(teacher, recipe))
    names = flatten_dict(nn.meta.unbox(boxed), sep="/").keys()
    params = stored_params(reference.run, boxed, names, mesh)
    same = jax.tree.map(lambda _, x: x, nn.meta.unbox(boxed), params)
    return recipe, {REFERENCE: freeze(rounded(same, boxed, dtype, products))}
