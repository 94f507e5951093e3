"""Matrices of adapted products side by side, laid out once for many calls of few tokens, which copy them otherwise."""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict
from jaxtyping import Array

from jaxblt.adapters.update.forms import without_forms
from jaxblt.adapters.update.products import TOKENS, groups_of, matrices_of, name_of_group
from jaxblt.adapters.update.site import ADAPTER
from jaxblt.layers import Linear
from pallas_kernels.routed_lora import Joined, can_join, join

Path = tuple[str, ...]


class Matrices(NamedTuple):
    """Parameters of a site."""

    kernel: Array
    v: Array
    u: Array


class Group(NamedTuple):
    """Sites that are one call of the op.

    Attributes:
      paths: of their `Linear`s.
      name: of the joined matrices.
      scale: of the updates.
      dtype: of the products.
      coded: whether there is a code.
    """

    paths: tuple[Path, ...]
    name: str
    scale: float
    dtype: Any
    coded: bool


def groups_in[T](trace: Callable[[], T]) -> tuple[list[Group], T]:
    """Return the groups whose matrices the calls of a trace copy; and its result."""
    found: list[Group] = []

    def record(call: Any, args: Any, options: Any, context: Any) -> Any:
        if isinstance(context.module, Linear) and context.method_name == "products":
            x, layers, weights = args
            weights: Any = [without_forms(w) for w in weights]
            for sites in groups_of(x, layers, weights):
                given, first = [layers[i] for i in sites], weights[sites[0]]
                w, _, _ = matrices_of([weights[i] for i in sites])
                rows = jax.ShapeDtypeStruct((*x.shape[:TOKENS], len(w[0])), jnp.dtype(given[0].dtype))
                if can_join(rows, w):
                    paths = tuple(layer.path for layer in given)
                    coded = first.code is not None
                    found.append(Group(paths, name_of_group(given), first.scale, rows.dtype, coded))
        return call(*args, **options)

    with nn.intercept_methods(record):
        result = trace()
    return found, result


def lay_out_groups(params: Any, groups: list[Group]) -> dict[Path, Joined]:
    """Return the joined matrices of groups by path, for "prepared"; of parameters whose layers are apart."""
    flat: Any = flatten_dict(params)

    def matrices(path: Path) -> Matrices:
        return Matrices(*(flat[*path, *name] for name in (("kernel",), (ADAPTER, "v"), (ADAPTER, "u"))))

    return {
        (*group.paths[0], group.name): join(
            *matrices_of(map(matrices, group.paths)), scale=group.scale, dtype=group.dtype, coded=group.coded
        )
        for group in groups
    }
