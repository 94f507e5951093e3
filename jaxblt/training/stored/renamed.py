"""Checkpoints from before a parameter was renamed or added: read as they are, handed on as they would be today."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict

from jaxblt.training.stored.integrity import named_leaves

RENAMED = (
    (re.compile(r"(^|/)mixer/(in|out)$"), r"\1mixer/\2/kernel"),  # Hyena's projections, before `Linear`
    (re.compile(r"(^|/)head/kernel$"), r"\1head/logits/kernel"),
)
"""Old names of leaves and what they are called now; matched at the end of a path."""
ADDED = re.compile(r"(^|/)router/separation$")
"""Leaves that earlier checkpoints lack, and which acted as zeros then."""


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

    Both change nothing unless the checkpoint has old names or lacks what was added since, and holds all else.

    Args:
      stored: pytree of what the checkpoint holds.
      wanted: pytree of what is asked for.
    """
    leaves, held = named_leaves(wanted), {current_name(name): name for name in named_leaves(stored)}
    added = {name for name in leaves if name not in held and ADDED.search(name)}
    if held.keys() | added != leaves.keys() or not (added or any(old != new for new, old in held.items())):
        return wanted, lambda read: read

    def back(read: Any) -> Any:
        zeros = ((name, leaves[name]) for name in added)
        found = {name: jnp.zeros(x.shape, x.dtype, device=getattr(x, "sharding", None)) for name, x in zeros}
        found |= {current_name(name): leaf for name, leaf in named_leaves(read).items()}
        return jax.tree.unflatten(jax.tree.structure(wanted), [found[name] for name in leaves])

    names = [current_name(name) for name in named_leaves(stored)]
    return jax.tree.unflatten(jax.tree.structure(stored), [leaves[name] for name in names]), back
