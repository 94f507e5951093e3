"""Products with weights and their updates: sites that read one x are one call of the op `routed_lora`."""

import dataclasses
import string
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxblt.adapters.update.forms import change_by_forms, without_forms
from jaxblt.einsums import PRODUCT, multiply, read_equation
from jaxblt.layers import Linear, StoredKernel, Weights
from jaxblt.mixers.driver.prepared import COLLECTION as PREPARED
from jaxblt.parallel.islands import BATCH_AXES, open_axes, over_batch
from pallas_kernels.routed_lora import Joined, active_blocks, can_skip, multiply_joined, routed_lora

TOKENS = 2
"""Leading axes of what a site reads: rows and time."""


@dataclasses.dataclass(frozen=True)
class Adapted(Weights):
    """Parameters of a site: those of its `Linear`, and of its update (scale) ((x V) * c) U.

    Attributes:
      v: [K, r] with the kernel's axes that are summed over for K.
      u: [r, N] with the kernel's new axes for N.
      code: of each token, or one for all; None for 1.
      scale: of the update.
      sparse: whether numbers of the code are set to 0, so that blocks may be skipped.
    """

    v: Float[Array, "... r"]
    u: Float[Array, "r ..."]
    code: Float[Array, "#B #T E"] | None
    scale: float
    sparse: bool = False


@dataclasses.dataclass(frozen=True)
class Gated(Weights):
    """Parameters of a site with a gate: y = (1 + c s) (x W).

    Attributes:
      scale: s, of the kernel's new axes.
      code: of each token, or one for all; None for 1. Each number is of a group of outputs.
    """

    scale: Float[Array, "..."]
    code: Float[Array, "#B #T E"] | None


Multiply = Callable[[Any, Sequence[Linear], Sequence[Weights]], Sequence[Array]]
"""x, `Linear`s and their parameters -> x W of each."""


def multiply_sites(
    base: Multiply, x: Float[Array, "..."], layers: Sequence[Linear], weights: Sequence[Weights]
) -> list[Float[Array, "..."]]:
    """Return x W and its update, if it is adapted, of each `Linear`; x W scaled, if it has a gate; then its forms.

    The op makes both, in one call of sites that share dtype, scale, code and the order of y's axes. To a site that it
    does not fuse, the update is added behind what `base` makes. What `update.side_by_side` laid out is read in the
    place of the group's matrices.
    """
    found: dict[int, Array] = {}
    formed, weights = weights, [without_forms(w) for w in weights]
    for sites in groups_of(x, layers, weights):
        given: Any = [weights[i] for i in sites]
        first, name = layers[sites[0]], name_of_group(layers[i] for i in sites)
        joined = first.get_variable(PREPARED, name) if first.has_variable(PREPARED, name) else None
        ys = _fused(x, first.dtype, given, channels_first=is_channel_major(first.equation), joined=joined)
        found |= zip(sites, checkpoint_name(ys, PRODUCT), strict=True)
    for i, (layer, w) in enumerate(zip(layers, weights, strict=True)):
        if i not in found:
            (y,) = base(x, [layer], [w])
            if isinstance(w, Adapted):
                y = y + _update(x, layer, w).astype(y.dtype)
            elif isinstance(w, Gated):
                y = (y.astype(jnp.float32) * _factor(layer, w)).astype(y.dtype)
            found[i] = y
    return [change_by_forms(layer, formed[i], x, found[i]) for i, layer in enumerate(layers)]


def name_of_group(layers: Iterable[Linear]) -> str:
    """Return the name of a group's joined matrices, a variable of its first site in the collection "prepared"."""
    return " ".join(layer.path[-1] for layer in layers)


def groups_of(x: Any, layers: Sequence[Linear], weights: Sequence[Weights]) -> Iterable[list[int]]:
    """Return the places of sites that are one call of the op."""
    groups: dict[Any, list[int]] = defaultdict(list)
    for i, (layer, w) in enumerate(zip(layers, weights, strict=True)):
        stored = isinstance(w.kernel, StoredKernel)
        if isinstance(w, Adapted) and not stored and is_fusable(layer, x.shape[0]):
            order = is_channel_major(layer.equation)
            groups[jnp.dtype(layer.dtype), w.scale, id(w.code), order].append(i)
    return groups.values()


def is_fusable(linear: Linear, rows: int) -> bool:
    """Return whether the op may make x W of a site too, for so many rows, and not the update alone.

    Not where something else multiplies (`product`) or asks for a precision or a dtype of its own, nor where x has
    channels before time. On several devices each takes its own rows with whole weights: not where the mesh splits
    tokens or weights (`seq`, `tensor`), nor where rows do not divide.
    """
    plain = linear.product is multiply and linear.precision is None
    own = linear.accumulate is None or jnp.dtype(linear.accumulate) == jnp.dtype(linear.dtype)
    axes, sizes = open_axes(), jax.sharding.get_abstract_mesh().shape
    whole = set(axes) <= set(BATCH_AXES) and rows % prod(sizes[axis] for axis in axes) == 0
    ordered = is_row_major(linear.equation) or is_channel_major(linear.equation)
    return plain and own and ordered and whole


def is_row_major(equation: str) -> bool:
    """Return whether what is summed over comes last in x, and what is new last in y."""
    letters = read_equation(equation)
    return letters.given == letters.lead + letters.summed and letters.result == letters.lead + letters.new


def is_channel_major(equation: str) -> bool:
    """Return whether what is summed over comes last in x, and what is new before time in y."""
    letters = read_equation(equation)
    lead = letters.lead
    return letters.given == lead + letters.summed and letters.result == lead[:1] + letters.new + lead[1:]


def _update(x: Float[Array, "B T ..."], layer: Linear, site: Adapted) -> Float[Array, "..."]:
    """Return the update alone: two einsums where x or y has channels before time."""
    if is_row_major(layer.equation):
        (y,) = _fused(x, layer.dtype, [site], alone=True)
        return y
    return _by_channels(x, layer, site)


def _fused(
    x: Float[Array, "B T ..."],
    dtype: Any,
    sites: Sequence[Adapted],
    *,
    channels_first: bool = False,
    alone: bool = False,
    joined: Joined | None = None,
) -> tuple[Float[Array, "B ..."], ...]:
    """Call the op for sites of one scale and code: x W and the updates, or the updates `alone`.

    Of a sparse code the op is told which blocks are 0, where it can skip them.
    """
    tokens, code = x.shape[:TOKENS], sites[0].code
    rows = x.reshape(*tokens, -1).astype(dtype)
    if code is not None:  # a governor makes one for all tokens where there is none
        code = jnp.broadcast_to(code, (*tokens, code.shape[-1]))
    v, u = updates_of(sites)

    def run(batched: Any, shared: Any) -> Any:
        rows, code = batched
        if isinstance(shared, Joined):
            ys = multiply_joined(rows, shared, code)
            return tuple(y.swapaxes(1, 2) for y in ys) if channels_first else ys
        w, v, u = shared
        # Look at the device's own rows: tiles are counted from their first token
        skips = sites[0].sparse and can_skip(rows, w, v, u, code, channels_first=channels_first)
        active = active_blocks(code, rows.shape[1]) if skips else None
        options: dict[str, Any] = {"scale": sites[0].scale, "channels_first": channels_first}
        return routed_lora(rows, w, v, u, code, active=active, **options)

    # without the weight products are XLA's, which splits them itself
    given = (rows, code)
    ys = run(given, (None, v, u)) if alone else over_batch(run, given, joined or matrices_of(sites))
    new = [site.u.shape[1:] for site in sites]
    sizes = [(tokens[0], *shape, tokens[1]) if channels_first else (*tokens, *shape) for shape in new]
    return tuple(y.reshape(shape) for y, shape in zip(ys, sizes, strict=True))


def matrices_of(sites: Iterable[Any]) -> tuple[tuple[Array, ...], ...]:
    """Return W [K, N], V [K, r] and U [r, N] of all sites, each of which has `kernel`, `v` and `u`."""
    sites = list(sites)
    return tuple(site.kernel.reshape(-1, site.u[0].size) for site in sites), *updates_of(sites)


def updates_of(sites: Iterable[Any]) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Return V [K, r] and U [r, N] of all sites."""
    flat = [(site.v.reshape(-1, len(site.u)), site.u.reshape(len(site.u), -1)) for site in sites]
    v, u = zip(*flat, strict=True)
    return v, u


def _by_channels(x: Float[Array, "B ..."], layer: Linear, site: Adapted) -> Float[Array, "B ..."]:
    """Return the update where channels come before time; x V is summed in fp32 and scaled before it is rounded."""
    given, summed, new, result = letters = read_equation(layer.equation)
    letter = next(c for c in string.ascii_uppercase if c not in layer.equation)
    lead, dtype = letters.lead, layer.dtype
    z = jnp.einsum(
        f"{given},{summed}{letter}->{lead}{letter}",
        x.astype(dtype),
        site.v.astype(dtype),
        preferred_element_type=jnp.float32,
    )
    z = z * jnp.float32(site.scale)
    if site.code is not None:
        z = z * jnp.repeat(site.code, z.shape[-1] // site.code.shape[-1], axis=-1)
    return jnp.einsum(f"{lead}{letter},{letter}{new}->{result}", z.astype(dtype), site.u.astype(dtype))


def _factor(layer: Linear, gate: Gated) -> Float[Array, "..."]:
    """Return 1 + c s, with axes in the order of what the layer makes."""
    given, summed, new, result = (letters.replace("...", "BT") for letters in read_equation(layer.equation))
    factor = 1 + coded_scale(gate.scale.reshape(1, 1, -1), gate.code)
    lead = "".join(c for c in given if c not in summed)
    return jnp.einsum(f"{lead}{new}->{result}", factor.reshape(*factor.shape[:TOKENS], *gate.scale.shape))


def coded_scale(scale: Float[Array, "*#L N"], code: Float[Array, "*#L E"] | None) -> Float[Array, "*L N"]:
    """Return c s, where each number of a code is of a group of outputs."""
    return scale if code is None else scale * jnp.repeat(code, scale.shape[-1] // code.shape[-1], axis=-1)
