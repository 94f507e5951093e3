"""The matrices of a group laid out once for many calls of a few tokens each, such as bytes that are decoded."""

from dataclasses import dataclass
from functools import partial, reduce
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.routed_lora.products import product, wide_of
from pallas_kernels.routed_lora.reference import Matrices, code_of_ranks

SUMMED = 8
"""Ranks summed at a time. XLA keeps sums of 16 numbers and more out of kernels that hold another: a gate and what it
scales would have a kernel each."""


@partial(jax.tree_util.register_dataclass, data_fields=("down", "up"), meta_fields=("ends",))
@dataclass(frozen=True)
class Joined:
    """The matrices that multiply a group's x.

    Attributes:
      down: [W | V]^T of all sites for calls with a code, and [W | scale V U]^T for those without. K comes last: in a
        call of one token XLA reads it in one pass, where it would write x W before its sum out for K first.
      up: scale U of each site; none for calls without a code.
      ends: columns up to the end of each W.
    """

    down: Float[Array, "M K"]
    up: Matrices
    ends: tuple[int, ...]


def join(w: Matrices, v: Matrices, u: Matrices, *, scale: float, dtype: Any, coded: bool) -> Joined:
    """Join a group's matrices in the dtype of x, for `multiply_joined`.

    w, v, u and scale are as in `routed_lora`. Without a code the update is a matrix beside W, not a part of it: its
    digits are not lost in W's.

    Args:
      w: [K, N] of each site.
      v: [K, r] of each site.
      u: [r, N] of each site.
      scale: of the update.
      dtype: of x.
      coded: whether calls have a code.
    """
    wide = wide_of(jnp.dtype(dtype))
    up = [site.astype(wide) * jnp.asarray(scale, wide) for site in u]
    beside = v if coded else [product("kr,rn->kn", a.astype(wide), b) for a, b in zip(v, up, strict=True)]
    down = jnp.concatenate([a.astype(dtype) for a in (*w, *beside)], 1).T
    ends = tuple(accumulate(site.shape[1] for site in w))
    return Joined(down, tuple(site.astype(dtype) for site in up) if coded else (), ends)


def multiply_joined(
    x: Float[Array, "B T K"], joined: Joined, code: Float[Array, "B T E"] | None = None
) -> tuple[Float[Array, "B T _"], ...]:
    """Return y of each site, of one product.

    The update is a sum over ranks that XLA adds where y is read.

    Raises:
      ValueError: there is a code, and the matrices were joined for calls without, or the other way round.
    """
    if (code is None) == bool(joined.up):
        raise ValueError(
            f"multiply_joined: code is {'None' if code is None else code.shape}, and the matrices were joined with "
            f"coded={bool(joined.up)}: join them for such calls"
        )
    *base, rest = jnp.split(product("btk,mk->btm", x, joined.down), joined.ends, -1)
    updates = jnp.split(rest, joined.ends[:-1], -1) if code is None else _updates(rest, joined.up, code)
    return tuple(y + update for y, update in zip(base, updates, strict=True))


def _updates(
    p: Float[Array, "B T R"], up: Matrices, code: Float[Array, "B T E"]
) -> list[Float[Array, "B T _"]]:
    """Return (p * c) U of each site.

    It is no product, which would be a kernel of its own.
    """
    wide, found = wide_of(p.dtype), []
    for part, site in zip(jnp.split(p, list(accumulate(len(a) for a in up))[:-1], -1), up, strict=True):
        z = part.astype(wide) * code_of_ranks(code.astype(wide), 1, p.shape[1], len(site))
        runs = [slice(i, i + SUMMED) for i in range(0, len(site), SUMMED)]
        sums = [jnp.sum(z[..., run, None] * site[None, None, run].astype(wide), -2) for run in runs]
        found.append(reduce(jnp.add, sums).astype(p.dtype))
    return found
