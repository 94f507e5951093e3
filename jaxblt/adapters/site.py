"""A site: a product with a weight, y = x W, to which an adapter adds (alpha/r) ((x V) * c) U."""

import string
from collections.abc import Callable
from contextlib import AbstractContextManager
from math import prod
from typing import Any, Protocol, runtime_checkable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxblt.adapters.governor import Governor, govern
from jaxblt.adapters.losses import mean_square_beside
from jaxblt.layers import Linear, multiply, named, read_equation
from jaxblt.models.remat import PRODUCT
from jaxblt.parallel.islands import BATCH_AXES, open_axes, over_batch
from jaxblt.side_outputs import sow_loss
from pallas_kernels.routed_lora import routed_lora

ADAPTER = "adapter"
"""The child of a `Linear` that holds V and U."""
TOKENS = 2
"""Leading axes of what a site reads: rows and time."""


@runtime_checkable
class Ranks(Protocol):
    """What a site asks of its config."""

    @property
    def governor(self) -> Governor | None:
        """What bounds the update."""
        ...

    @property
    def losses(self) -> Any:
        """Weights of losses."""
        ...

    def ranks(self, name: str) -> set[int]:
        """The ranks that are asked for at a site."""
        ...

    def scale(self, rank: int) -> float:
        """What the update is multiplied by."""
        ...


class LowRank(nn.Module):
    """(scale) ((x V) * c) U for a `Linear` of the same equation; V [K, r] is drawn, U [r, N] starts at 0.

    K and N stand for the kernel's axes that are summed over and for the new ones. x V is summed in fp32 and scaled
    before it is rounded to `dtype`. Row-major products take the op `routed_lora`; the others have an axis of channels
    before that of time, and stay einsums, which transpose at no cost. The op makes x W as well if it is given W.
    """

    equation: str
    shape: tuple[int, ...]
    names: tuple[str | None, ...]
    rank: int
    scale: float
    dtype: Any
    governor: Governor | None = None
    orthogonality: float = 0.0

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "..."],
        code: Float[Array, "B T E"] | None = None,
        kernel: Float[Array, "..."] | None = None,
    ) -> Float[Array, "..."]:
        width = len(read_equation(self.equation).summed)
        into = self.shape[:width]

        def draw(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
            return nn.initializers.lecun_normal()(key, (prod(into), self.rank), dtype).reshape(shape)

        down = self.param("v", named(draw, *self.names[:width], "rank"), (*into, self.rank), jnp.float32)
        zeros = named(nn.initializers.zeros, "rank", *self.names[width:])
        up = self.param("u", zeros, (self.rank, *self.shape[width:]), jnp.float32)
        code = self._within(down.reshape(-1, self.rank), up.reshape(self.rank, -1), code)
        if is_row_major(self.equation):
            return self._by_rows(x, kernel, down, up, code)
        return self._by_channels(x, down, up, code)

    def _by_rows(self, x: Any, kernel: Any, down: Any, up: Any, code: Any) -> Float[Array, "B T ..."]:
        rows, outputs = x.reshape(*x.shape[:TOKENS], -1).astype(self.dtype), up.shape[1:]
        weight = None if kernel is None else kernel.reshape(rows.shape[-1], -1)
        if code is not None:  # a governor makes one for all tokens where there is none
            code = jnp.broadcast_to(code, (*rows.shape[:TOKENS], code.shape[-1]))
        matrices = weight, down.reshape(-1, self.rank), up.reshape(self.rank, -1)

        def run(batched: Any, shared: Any) -> Array:
            (rows, code), (weight, v, u) = batched, shared
            return routed_lora(rows, weight, v, u, code, scale=self.scale)

        # without the weight products are XLA's, which splits them itself
        y = run((rows, code), matrices) if weight is None else over_batch(run, (rows, code), matrices)
        return y.reshape(*x.shape[:TOKENS], *outputs)

    def _by_channels(self, x: Any, down: Any, up: Any, code: Any) -> Float[Array, "B ..."]:
        given, summed, new, result = read_equation(self.equation)
        letter = next(c for c in string.ascii_uppercase if c not in self.equation)
        lead = "".join(c for c in given if c not in summed)
        z = jnp.einsum(
            f"{given},{summed}{letter}->{lead}{letter}",
            x.astype(self.dtype),
            down.astype(self.dtype),
            preferred_element_type=jnp.float32,
        )
        z = z * jnp.float32(self.scale)
        if code is not None:
            z = z * jnp.repeat(code, self.rank // code.shape[-1], axis=-1)
        return jnp.einsum(
            f"{lead}{letter},{letter}{new}->{result}", z.astype(self.dtype), up.astype(self.dtype)
        )

    def _within(
        self, v: Float[Array, "K r"], u: Float[Array, "r N"], code: Float[Array, "B T E"] | None
    ) -> Float[Array, "B T E"] | None:
        """The code as the governor leaves it; sows the loss of directions that are not orthogonal."""
        if self.orthogonality:
            beside = mean_square_beside(v.T @ v) + mean_square_beside(u @ u.T)
            sow_loss(self, "orthogonality", jnp.float32(self.orthogonality) * beside)
        return code if self.governor is None else govern(self, self.governor, v, u, self.scale, code)


def is_site(linear: Linear, x: Any) -> bool:
    """Whether a `Linear` reads tokens, [B, T, ...]: not, for example, a filter that reads taps."""
    given, summed, new, _ = read_equation(linear.equation)
    leading = len(x.shape) - len(summed)
    return leading == TOKENS and bool(summed) and bool(new) and not set(new) & set(given)


def is_row_major(equation: str) -> bool:
    """Whether what is summed over comes last in x, and what is new last in y."""
    given, summed, new, result = read_equation(equation)
    lead = "".join(c for c in given if c not in summed)
    return given == lead + summed and result == lead + new


def is_fusable(linear: Linear, rows: int) -> bool:
    """Whether the op may make x W of a site too, for so many rows, and not the update alone.

    Not where something else multiplies (`product`) or asks for a precision or a dtype of its own, nor where x or y has
    channels before time. On several devices each takes its own rows with whole weights: not where the mesh splits
    tokens or weights (`seq`, `tensor`), nor where rows do not divide.
    """
    plain = linear.product is multiply and linear.precision is None
    own = linear.accumulate is None or jnp.dtype(linear.accumulate) == jnp.dtype(linear.dtype)
    axes, sizes = open_axes(), jax.sharding.get_abstract_mesh().shape
    whole = set(axes) <= set(BATCH_AXES) and rows % prod(sizes[axis] for axis in axes) == 0
    return plain and own and is_row_major(linear.equation) and whole


def adapted(
    config: Ranks, path: tuple[str, ...], code: Float[Array, "B T E"] | None
) -> AbstractContextManager[Any]:
    """A context in which the sites of `config` below the module of this path add their updates.

    Flax calls the interceptor around every method. It makes the update a child of the `Linear` that it is called for,
    so parameters of the base keep their names.
    """

    def intercept(
        call: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any], context: Any
    ) -> Any:
        module = context.module
        if not isinstance(module, Linear) or context.method_name != "multiplied":
            return call(*args, **options)
        x, kernel = args
        ranks = config.ranks("/".join(module.path[len(path) :]))
        if not ranks or not is_site(module, x):
            return call(*args, **options)
        rank = max(ranks)
        update = LowRank(
            module.equation,
            kernel.shape,
            module.names,
            rank,
            config.scale(rank),
            module.dtype,
            config.governor,
            config.losses.orthogonality,
            name=ADAPTER,
        )
        if is_fusable(module, x.shape[0]):
            return checkpoint_name(update(x, code, kernel), PRODUCT)
        y = call(*args, **options)
        return y + update(x, code).astype(y.dtype)

    return nn.intercept_methods(intercept)
