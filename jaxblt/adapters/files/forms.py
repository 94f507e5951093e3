"""Forms of updates at a code: as those of a static adapter, and merged into the weights that they change."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxblt.adapters.update.attach import Site, find_sites
from jaxblt.adapters.update.forms import FORM, Form
from jaxblt.models.stack import StackConfig


def fix_forms(
    tree: Mapping[str, Any], forms: tuple[Form, ...], code: Float[Array, "*N E"] | None, layers: int
) -> dict[str, Any]:
    """Return the parameters of a site's forms in fp32, as a static adapter has them at a code, of all layers of a scan.

    Args:
      tree: of the site's `Linear`.
      forms: of the site.
      code: one for all layers, or one for each; None for a static adapter's own.
      layers: of the site's parameters; 0 where they have no axis of layers.
    """
    fixed = jax.tree.map(lambda x: x.astype(jnp.float32), tree[FORM])
    if code is None:
        return fixed
    found = {}
    for form in forms:
        if layers:
            codes = jnp.broadcast_to(code, (layers, code.shape[-1]))
            found[form.name] = jax.vmap(form.at_code)(fixed[form.name], codes)
        else:
            found[form.name] = form.at_code(fixed[form.name], code.reshape(-1))
    return found


def merge_forms(
    tree: Mapping[str, Any],
    stack: StackConfig,
    path: tuple[str, ...],
    kernel: Float[Array, "..."],
    code: Float[Array, "*N E"] | None,
    layers: int,
) -> dict[str, Any]:
    """Return the kernel and the bias of a site, with its forms merged in at a code; see `fix_forms`.

    Args:
      path: of the site below its stack.
      kernel: in fp32, with what acts before the forms merged in.

    Raises:
      ValueError: a form adds a constant, and the product has no bias.
    """
    name = "/".join(path[2:])
    forms, site = stack.adapter.forms_at(name), _find_site(stack, path, name)
    fixed = fix_forms(tree, forms, code, layers)
    merge = partial(_merge, forms)
    lead = (layers,) if layers else ()
    flat = kernel.reshape(*lead, site.inputs, site.outputs)
    merged, shift = jax.vmap(merge)(fixed, flat) if layers else merge(fixed, flat)
    found = {"kernel": merged.reshape(kernel.shape)}
    if shift is None:
        return found
    if "bias" not in tree:
        raise ValueError(
            f"the product {name!r} has no bias, and {forms} adds a constant to what it makes: merge forms without a "
            "shift, such as Film(shift=0.0)"
        )
    bias = tree["bias"].astype(jnp.float32)
    return found | {"bias": bias + shift.reshape(bias.shape)}


def _merge(
    forms: tuple[Form, ...], fixed: Mapping[str, Any], kernel: Float[Array, "K N"]
) -> tuple[Float[Array, "K N"], Float[Array, "N"] | None]:
    shift = None
    for form in forms:
        kernel, shift = form.merge(fixed[form.name], kernel, shift)
    return kernel, shift


def _find_site(stack: StackConfig, path: tuple[str, ...], name: str) -> Site:
    """Return the site of a block's product."""
    kind = stack.pattern[int(path[1].removeprefix("block_"))]
    return next(site for site in find_sites(stack) if (site.kind, site.name) == (kind, name))
