"""Forms of updates beside low rank and gates: parts of `AdapterConfig.forms`, of which one may be your own.

A form acts on what a product makes, behind the site's low-rank update or gate, if it has one.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from math import prod
from typing import ClassVar, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxblt.einsums import read_equation
from jaxblt.layers import Linear, Weights, named

FORM = "form"
"""The child of a `Linear` that holds the parameters of its forms, by their names."""
Own = Mapping[str, Float[Array, "..."]]
"""The parameters of a form at one site of one layer."""


class Param(NamedTuple):
    """A parameter of a form: its shape, and how it begins."""

    shape: tuple[int, ...]
    init: nn.initializers.Initializer


class Form(ABC):
    """A form of an update: a frozen dataclass that says which parameters it has and what it does.

    At the start, and wherever the code is 0, it changes nothing. Call parameters that begin at 0 "u", "scale" or
    "shift". A static adapter has a code of one number, 1.

    Attributes:
      name: of its parameters; a site has one form of a name.
    """

    name: ClassVar[str]

    def check(self, site: str, inputs: int, outputs: int, numbers: int) -> None:  # noqa: B027 - most fit everywhere
        """Raise ValueError unless a site of K inputs and N outputs, with so many numbers of a code, can have it."""

    @abstractmethod
    def params(self, inputs: int, outputs: int, numbers: int) -> dict[str, Param]:
        """Return the parameters of a site of K inputs and N outputs, with so many numbers of a code."""

    @abstractmethod
    def change(
        self,
        own: Own,
        x: Float[Array, "B T K"],
        y: Float[Array, "B T N"],
        code: Float[Array, "#B #T E"],
    ) -> Float[Array, "B T N"]:
        """Return what becomes of y, in fp32."""

    @abstractmethod
    def at_code(self, own: Own, code: Float[Array, "E"]) -> dict[str, Float[Array, "..."]]:
        """Return the parameters of a static adapter that does what this one does at a code."""

    @abstractmethod
    def merge(
        self, own: Own, kernel: Float[Array, "K N"], shift: Float[Array, "N"] | None
    ) -> tuple[Float[Array, "K N"], Float[Array, "N"] | None]:
        """Return the kernel, and what is added to its outputs, into which a static adapter is merged."""


@dataclasses.dataclass(frozen=True)
class Formed(Weights):
    """Parameters of a site with forms.

    Attributes:
      inner: those of the site without them.
      parts: its forms, each with its parameters.
      code: of each token, or one for all.
    """

    inner: Weights
    parts: tuple[tuple[Form, Own], ...]
    code: Float[Array, "#B #T E"]

    def change(self, layer: Linear, x: Float[Array, "..."], y: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return what becomes of y, whose axes stay as the layer orders them."""
        given, summed, new, result = (
            letters.replace("...", "BT") for letters in read_equation(layer.equation)
        )
        lead = "".join(c for c in given if c not in summed)
        rows = jnp.einsum(f"{given}->{lead}{summed}", x.astype(layer.dtype))
        wide = jnp.einsum(f"{result}->{lead}{new}", y.astype(jnp.float32))
        shape, tokens = wide.shape, rows.shape[: len(lead)]
        rows, wide = rows.reshape(*tokens, -1), wide.reshape(*tokens, -1)
        for form, own in self.parts:
            wide = form.change(own, rows, wide, self.code)
        return jnp.einsum(f"{lead}{new}->{result}", wide.reshape(shape)).astype(y.dtype)


class Forms(nn.Module):
    """Parameters of the forms of a site.

    Attributes:
      forms: in the order in which they act.
      summed: how many of the kernel's axes are summed over.
      numbers: of a code.
    """

    forms: tuple[Form, ...]
    summed: int
    numbers: int

    @nn.compact
    def __call__(self, weights: Weights, code: Float[Array, "B T E"] | None) -> Formed:
        """Return a site's parameters and those of its forms."""
        shape = weights.kernel.shape
        sizes = prod(shape[: self.summed]), prod(shape[self.summed :])
        parts = tuple((form, _Own(form, sizes, self.numbers, name=form.name)()) for form in self.forms)
        code = jnp.ones((1, 1, 1), jnp.float32) if code is None else code
        return Formed(weights.kernel, weights.bias, weights, parts, code)


class _Own(nn.Module):
    """Parameters of one form of a site."""

    form: Form
    sizes: tuple[int, int]
    numbers: int

    @nn.compact
    def __call__(self) -> Own:
        made = self.form.params(*self.sizes, self.numbers)
        return {
            name: self.param(name, named(each.init, *[None] * len(each.shape)), each.shape, jnp.float32)
            for name, each in made.items()
        }


def without_forms(weights: Weights) -> Weights:
    """Return a site's parameters without those of its forms."""
    return weights.inner if isinstance(weights, Formed) else weights


def change_by_forms(
    layer: Linear, weights: Weights, x: Float[Array, "..."], y: Float[Array, "..."]
) -> Float[Array, "..."]:
    """Return what a site's forms make of y; y itself where it has none."""
    return weights.change(layer, x, y) if isinstance(weights, Formed) else y
