"""A site: a product with a weight, y = x W, to which an adapter adds (alpha/r) ((x V) * c) U, or that it scales."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from math import prod
from typing import Any, Protocol, runtime_checkable

import flax.linen as nn
import jax.numpy as jnp
from flax.errors import ScopeParamShapeError
from jaxtyping import Array, Float

from jaxblt.adapters.code.losses import mean_square_beside
from jaxblt.adapters.update.forms import FORM, Form, Forms
from jaxblt.adapters.update.governor import Governor, govern
from jaxblt.adapters.update.products import TOKENS, Adapted, Gated, multiply_sites
from jaxblt.einsums import read_equation
from jaxblt.layers import Linear, StoredKernel, Weights, named
from jaxblt.mixers.attention.key_bias import BY_CODE, KEY_BIAS, KeyBias
from jaxblt.side_outputs import sow_loss

ADAPTER = "adapter"
"""The child of a `Linear` that holds V and U, or the scale of a gate."""
SCALE = "scale"
"""The parameter of a gate."""
ZERO = ("u", SCALE, BY_CODE, "shift")
"""Parameters of sites that start at 0."""

BIAS_SITE = f"mixer/{KEY_BIAS}"
"""Name of biases of logits below a block, by which `AdapterConfig.levels` tells their level."""


@runtime_checkable
class Ranks(Protocol):
    """Protocol of a site's config."""

    @property
    def governor(self) -> Governor | None:
        """Bound of the update."""
        ...

    @property
    def losses(self) -> Any:
        """Weights of losses."""
        ...

    def ranks(self, name: str, layer: int) -> set[int]:
        """Return the ranks that are asked for at a site of a layer."""
        ...

    def has_gate(self, name: str) -> bool:
        """Return whether a site has a gate."""
        ...

    def forms_at(self, name: str) -> tuple[Form, ...]:
        """Return the forms of a site."""
        ...

    @property
    def form_numbers(self) -> int:
        """Numbers of a code as forms read it."""
        ...

    def split(self, codes: Float[Array, "... W"] | None) -> list[Any]:
        """Return the codes that sites may have, apart."""
        ...

    def place(self, name: str) -> int:
        """Return which of these codes a site has."""
        ...

    def scale(self, rank: int) -> float:
        """Return the factor of the update."""
        ...


class LowRank(nn.Module):
    """Parameters of a site: V [K, r] is drawn, U [r, N] starts at 0.

    K and N stand for the kernel's axes that are summed over and for the new ones.

    Attributes:
      config: of the adapter.
      rank: r.
      summed: how many of the kernel's axes are summed over.
      names: logical names of the kernel's axes.
      sparse: whether numbers of the code are set to 0, so that blocks may be skipped.
    """

    config: Ranks
    rank: int
    summed: int
    names: tuple[str | None, ...]
    sparse: bool = False

    @nn.compact
    def __call__(self, weights: Weights, code: Float[Array, "B T E"] | None) -> Adapted:
        """Return a `Linear`'s parameters and those of its update; the code is as the governor leaves it."""
        rank, scale = self.rank, self.config.scale(self.rank)
        into, out = weights.kernel.shape[: self.summed], weights.kernel.shape[self.summed :]

        def draw(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
            return nn.initializers.lecun_normal()(key, (prod(into), rank), dtype).reshape(shape)

        zeros = nn.initializers.zeros
        v = self._factor("v", named(draw, *self.names[: self.summed], "rank"), (*into, rank))
        u = self._factor("u", named(zeros, "rank", *self.names[self.summed :]), (rank, *out))
        flat = v.reshape(-1, rank), u.reshape(rank, -1)
        self._sow_orthogonality(*flat)
        if self.config.governor is not None:
            code = govern(self, self.config.governor, *flat, scale, code)
        return Adapted(weights.kernel, weights.bias, v, u, code, scale, self.sparse)

    def _factor(self, name: str, init: Any, shape: tuple[int, ...]) -> Float[Array, "..."]:
        """Return V or U in fp32, of what the parameters hold in 8 bits, too."""
        stored: Any = self.get_variable("params", name)
        if not isinstance(stored, StoredKernel):
            return self.param(name, init, shape, jnp.float32)
        if stored.shape != shape:
            raise ScopeParamShapeError(name, "/".join(self.path), shape, stored.shape)
        return stored.dense()

    def _sow_orthogonality(self, v: Float[Array, "K r"], u: Float[Array, "r N"]) -> None:
        """Sow the loss of directions that are not orthogonal."""
        weight = self.config.losses.orthogonality
        if weight:
            beside = mean_square_beside(v.T @ v) + mean_square_beside(u @ u.T)
            sow_loss(self, "orthogonality", jnp.float32(weight) * beside)


class Gate(nn.Module):
    """Parameter of a site with a gate: a scale s [N] that starts at 0.

    Attributes:
      names: logical names of the kernel's new axes, which N stands for.
    """

    names: tuple[str | None, ...]

    @nn.compact
    def __call__(self, weights: Weights, code: Float[Array, "B T E"] | None) -> Gated:
        """Return a `Linear`'s parameters and its gate's."""
        shape = weights.kernel.shape[-len(self.names) :]
        scale = self.param(SCALE, named(nn.initializers.zeros, *self.names), shape, jnp.float32)
        return Gated(weights.kernel, weights.bias, scale, code)


def is_adapted(tree: Mapping[str, Any]) -> bool:
    """Return whether parameters are those of a site: they hold an adapter's or forms'."""
    return ADAPTER in tree or FORM in tree


def is_site(linear: Linear, x: Any) -> bool:
    """Return whether a `Linear` reads tokens, [B, T, ...]: not, for example, a filter that reads taps."""
    given, summed, new, _ = read_equation(linear.equation)
    leading = len(x.shape) - len(summed)
    return leading == TOKENS and bool(summed) and bool(new) and not set(new) & set(given)


def adapted(
    config: Ranks,
    path: tuple[str, ...],
    layer: int,
    code: Float[Array, "B T W"] | None,
    *,
    sparse: bool = False,
) -> AbstractContextManager[Any]:
    """Make a context in which the sites of `config` below the block of this path, a layer's, add their updates.

    Flax calls the interceptor around every method. A site's own parameters are made in a child of the `Linear` that it
    is called for. So parameters of the base keep their names. `sparse` is as for `LowRank`.
    """
    codes = config.split(code)  # once: sites that share an array are one call of the op

    def intercept(
        call: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any], context: Any
    ) -> Any:
        linear, method = context.module, context.method_name
        if isinstance(linear, KeyBias) and method == "__call__":
            return call(codes[config.place(BIAS_SITE)])
        if isinstance(linear, Linear) and method == "products":
            return multiply_sites(call, *args)
        found = call(*args, **options)
        if not isinstance(linear, Linear) or method != "weights":
            return found
        name = "/".join(linear.path[len(path) :])
        ranks, gate, forms = config.ranks(name, layer), config.has_gate(name), config.forms_at(name)
        if not (ranks or gate or forms) or not is_site(linear, *args):
            return found
        summed, names = len(read_equation(linear.equation).summed), linear.names
        own = codes[config.place(name)]
        if gate:
            found = Gate(names[summed:], name=ADAPTER)(found, own)
        elif ranks:
            found = LowRank(config, max(ranks), summed, names, sparse, name=ADAPTER)(found, own)
        return Forms(forms, summed, config.form_numbers, name=FORM)(found, own) if forms else found

    return nn.intercept_methods(intercept)
