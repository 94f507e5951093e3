"""Does a stored recipe fit the checkpoint beside it: asked before anything large is traced or allocated."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxblt.training.recipe import Recipe
from jaxblt.training.stored.integrity import StateMismatch
from jaxblt.training.stored.safe_files import one_line

MAX_NUMBER = 1 << 26
"""The largest whole number in the config of a model or patcher, and of bytes in a row: tables of such lengths are made
in the host's memory while a model is traced."""


def check_recipe(recipe: Recipe, *, frozen: bool) -> None:
    """Raise ValueError naming what keeps a run from being loaded, as far as the recipe by itself shows.

    Args:
      recipe: as stored.
      frozen: whether the run says that its checkpoints carry an entropy model.
    """
    needed = [("model", recipe.model)] + [("entropy_model", recipe.entropy_model)] * frozen
    for name, config in needed:
        if not hasattr(config, "build"):
            raise ValueError(f"recipe.{name} is a {type(config).__name__}, expected the config of a model")
    patcher = recipe.patcher
    if frozen and (patcher is None or (patcher.threshold is None and not patcher.reads_entropies)):
        raise ValueError("the run has a frozen entropy model, but its recipe has no patcher with a threshold")
    data = {"seq_len": recipe.data.seq_len, "batch_size": recipe.data.batch_size}
    parts = {
        "model": recipe.model,
        "entropy_model": recipe.entropy_model,
        "patcher": recipe.patcher,
        "data": data,
    }
    for where, number in _numbers(parts, "recipe"):
        if abs(number) > MAX_NUMBER:
            raise ValueError(f"{where} is {number}, expected a number of at most {MAX_NUMBER}")


def _numbers(value: Any, where: str) -> Iterator[tuple[str, int]]:
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, tuple):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _numbers(item, f"{where}.{name}")
    elif isinstance(value, int):
        yield where, value


def fitting_shapes(init: Callable[[], Any], apply: Callable[[Any], Any], stored: Any) -> Any:
    """Return shapes of the parameters that `init` makes, unboxed, once `apply` is known to run with the stored ones.

    A pass with stored parameters ends at the first one that is missing or of another shape. So it costs no more than
    the checkpoint holds, whatever number of layers the config asks for. Only then is `init` traced.

    Args:
      init: makes the model's parameters.
      apply: a pass of the model with given parameters.
      stored: names, shapes and dtypes of a checkpoint's parameters.

    Raises:
      StateMismatch: the model asks for a parameter that is not stored, or for one of another shape.
      ValueError: the config describes no model that can be built.
    """

    def as_read(leaf: Any) -> jax.ShapeDtypeStruct:
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        return jax.ShapeDtypeStruct(leaf.shape, jnp.float32 if floating else leaf.dtype)

    try:
        jax.eval_shape(apply, jax.tree.map(as_read, stored))
        return nn.meta.unbox(jax.eval_shape(init))
    except flax.errors.FlaxError as error:
        raise StateMismatch(
            f"the checkpoint is not of the model in config.json: {one_line(error)}"
        ) from error
    except Exception as error:
        raise ValueError(f"the model in config.json cannot be built: {one_line(error)}") from error
