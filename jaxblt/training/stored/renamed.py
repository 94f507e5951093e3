"""Checkpoints from before a parameter was renamed: read under their old names, handed on under today's."""

import re
from collections.abc import Callable
from typing import Any

import jax
from flax.traverse_util import unflatten_dict

from jaxblt.training.stored.integrity import named_leaves

RENAMED = (
    (re.compile(r"(^|/)mixer/(in|out)$"), r"\1mixer/\2/kernel"),  # Hyena's projections, before `Linear`
    (re.compile(r"(^|/)head/kernel$"), r"\1head/logits/kernel"),
)
"""Old names of leaves and what they are called now; matched at the end of a path."""


def current_name(name: str) -> str:
    """Return today's name of a stored leaf."""
    for old, new in RENAMED:
        name = old.sub(new, name)
    return name


def with_current_names(stored: Any) -> Any:
    """Put what a checkpoint holds under today's names; the same tree if it has no old names."""
    leaves = named_leaves(stored)
    if all(current_name(name) == name for name in leaves):
        return stored
    return unflatten_dict({tuple(current_name(name).split("/")): leaf for name, leaf in leaves.items()})


def as_stored(stored: Any, wanted: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Put `wanted` in the structure of a checkpoint; return a function that gives what was read its structure too.

    Both change nothing unless the checkpoint has old names and holds all that is wanted.

    Args:
      stored: pytree of what the checkpoint holds.
      wanted: pytree of what is asked for.
    """
    leaves, held = named_leaves(wanted), {current_name(name): name for name in named_leaves(stored)}
    if held.keys() != leaves.keys() or all(old == new for new, old in held.items()):
        return wanted, lambda read: read

    def back(read: Any) -> Any:
        found = named_leaves(read)
        return jax.tree.unflatten(jax.tree.structure(wanted), [found[held[name]] for name in leaves])

    names = [current_name(name) for name in named_leaves(stored)]
    return jax.tree.unflatten(jax.tree.structure(stored), [leaves[name] for name in names]), back
