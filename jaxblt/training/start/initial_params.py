"""Parameters that a run takes from the run that it starts from: all, or all but those that are new."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh

from jaxblt.adapters import join_params
from jaxblt.parallel.rules import state_shardings
from jaxblt.precision.weights import from_stored, refuse_quantized
from jaxblt.training.optimisers.patterns import matching
from jaxblt.training.recipe import Recipe
from jaxblt.training.start.base import trained_part
from jaxblt.training.start.frozen import load_frozen
from jaxblt.training.start.setup import boxed_params, make_task
from jaxblt.training.state import BASE, Frozen, freeze, widen
from jaxblt.training.stored.checkpoint import restore
from jaxblt.training.stored.integrity import StateMismatch
from jaxblt.training.stored.remote_run import readable
from jaxblt.training.stored.renamed import with_current_names
from jaxblt.training.stored.resolved import Resolved, checkpoint_dir, read_resolved

SHOWN = 8
"""Names in an error or a line of the report, at most."""


@dataclass(frozen=True)
class Taken:
    """Parameters that a run takes from the run that it starts from.

    Attributes:
      params: to be trained.
      frozen: the base that is not, by its name among frozen trees; empty if all parameters are trained.
      notes: what was taken, what is new, and what was left, in lines.
    """

    params: Any = field(default_factory=dict)
    frozen: dict[str, Frozen] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def take(recipe: Recipe, mesh: Mesh) -> Taken:
    """Take from the run `recipe.init_from` what the recipe asks for, placed on the mesh.

    A parameter that `recipe.fresh` matches is new, every other one is taken. With `fresh`, parameters of the other run
    that the model lacks are left behind; without it they are an error.

    Raises:
      FileNotFoundError: there is no such run.
      StateMismatch: a parameter that is not new is missing there, or has another shape.
      ValueError: a pattern matches nothing, or a parameter is both new and frozen.
    """
    if recipe.init_from is None:
        return Taken()
    boxed = boxed_params(make_task(recipe), recipe)
    wanted = flatten_dict(boxed, sep="/")
    fresh = matching(recipe.fresh, wanted.keys(), "fresh")
    still = matching(recipe.freeze, wanted.keys(), "freeze")
    if both := sorted(fresh & still):
        raise ValueError(
            f"{both[0]} is new and frozen, so that nothing would ever train it: leave it out of freeze"
        )
    trained = flatten_dict(trained_part(recipe, boxed), sep="/")
    needed = wanted.keys() - fresh
    stored = flatten_dict(stored_params(recipe.init_from, boxed, needed, mesh), sep="/")
    _check(recipe.init_from, wanted, stored, fresh)
    taken = {name: stored[name] for name in wanted if name not in fresh}
    base = {name: leaf for name, leaf in taken.items() if name in still}
    rest = {name: leaf for name, leaf in taken.items() if name in trained}
    return Taken(
        unflatten_dict(rest, sep="/"),
        {BASE: freeze(unflatten_dict(base, sep="/"))} if base else {},
        _notes(recipe.init_from, taken, fresh, stored.keys() - taken.keys(), still),
    )


def stored_params(run_dir: str, boxed: Any, needed: Collection[str], mesh: Mesh) -> Any:
    """Read all parameters of a run's newest checkpoint in fp32, over those that it froze.

    They have the names that they are stored by, or if these lack some that are needed, today's names.

    Raises:
      ValueError: they are quantised.
    """

    def asked(stored: Any) -> Any:
        refuse_quantized(from_stored(stored), f"init_from = {run_dir!r}")
        has_names = set(needed) <= flatten_dict(stored, sep="/").keys()
        shapes = jax.tree.map(_as_read, stored if has_names else with_current_names(stored))
        return jax.tree.map(_placed, shapes, state_shardings(shapes, boxed, mesh))

    with readable(run_dir, "newest") as folder:
        params = restore(checkpoint_dir(folder), asked, subtree="params").state
        resolved = read_resolved(folder)
        if BASE not in resolved.frozen:
            return params
        only_base = Resolved(resolved.recipe, {BASE: resolved.frozen[BASE]})
        return join_params(widen(load_frozen(folder, only_base, mesh)[BASE].params), params)


def _as_read(leaf: Any) -> jax.ShapeDtypeStruct:
    floating = jnp.issubdtype(leaf.dtype, jnp.floating)
    return jax.ShapeDtypeStruct(leaf.shape, jnp.float32 if floating else leaf.dtype)


def _placed(shape: jax.ShapeDtypeStruct, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def _check(run_dir: str, wanted: Mapping[str, Any], stored: Mapping[str, Any], fresh: set[str]) -> None:
    problems = []
    for name, box in wanted.items():
        shape = jax.tree.leaves(box)[0].shape
        if name in fresh:
            continue
        if name not in stored:
            problems.append(f"{name} is not there")
        elif stored[name].shape != shape:
            problems.append(f"{name} has shape {stored[name].shape} there and {shape} here")
    if not fresh:
        problems += [f"{name} is there and not here" for name in stored if name not in wanted]
    if problems:
        more = f", and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise StateMismatch(
            f"init_from = {run_dir!r} holds other parameters: {'; '.join(sorted(problems)[:SHOWN])}{more}. Use "
            "the model that it was trained with, or name what is to be new in `fresh`"
        )


def _notes(
    run_dir: str, taken: Mapping[str, Any], fresh: set[str], left: Collection[str], still: set[str]
) -> tuple[str, ...]:
    count = sum(leaf.size for leaf in taken.values())
    lines = [f"taken           {len(taken)} arrays, {count:,} parameters from {run_dir}: {_groups(taken)}"]
    for title, names in (("new", fresh), ("left behind", left), ("frozen", still)):
        if names:
            lines.append(f"{title:15} {len(names)} arrays: {_groups(names)}")
    return tuple(lines)


def _groups(names: Collection[str]) -> str:
    """Return names, or where they are many what they begin with."""
    if len(names) > SHOWN:
        names = {f"{name.partition('/')[0]}/*" for name in names}
    return ", ".join(sorted(names))
