"""Layers that mixers and models share: the linear layer, norms, the MLP, dropout, and logical names of axes.

Every product with a weight in mixers, models and heads is a `Linear`. So low precision, quantised weights and low-rank
adapters change one layer only. Nothing in this module mixes along the sequence.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from math import prod
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.errors import ScopeParamShapeError
from jaxtyping import Array, Float, UInt32

from jaxblt.einsums import multiply, read_equation
from jaxblt.parallel.constraints import whole_weight
from jaxblt.parallel.islands import open_axes, over_batch
from jaxblt.parallel.sequence import over_sequence, seq_axis
from pallas_kernels.norm_dropout import is_kept, norm_dropout
from pallas_kernels.runtime import current_device
from pallas_kernels.token_product import is_one_launch, token_product

FP8 = "fp8"
"""The Flax collection in which `Linear`s keep the history of their FP8 scales (`jaxblt.precision`)."""

Product = Callable[..., Array]
"""`(equation, x, kernel, *, precision, preferred_element_type) -> y`, as `multiply` computes it."""


class Named(nn.LogicallyPartitioned):
    """A parameter with logical names of its axes.

    Flax NNX would look for mesh axes of these names. So in NNX the names are metadata only, and do not shard.
    """

    def to_nnx_metadata(self) -> dict[str, Any]:
        """Return what an `nnx.Variable` of `nnx.bridge.ToNNX` is made with."""
        return {"value": self.value, "names": self.names}

    @classmethod
    def from_nnx_metadata(cls, metadata: dict[str, Any]) -> "Named":
        """Return the parameter that Linen sees of such a variable."""
        return cls(metadata["value"], metadata["names"])


def named(init: nn.initializers.Initializer, *axes: str | None) -> Any:
    """Return an initialiser like `init` that gives the parameter's axes logical names.

    `jaxblt.parallel.rules` maps the names to mesh axes.
    """
    return lambda *args: Named(init(*args), axes)


class StoredKernel(ABC):
    """A quantised kernel: a pytree that takes the place of a kernel's array (`jaxblt.precision.weights`)."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Shape of the kernel before quantisation."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of weights, summed over the layers of a scan."""

    @abstractmethod
    def dense(self) -> Float[Array, "..."]:
        """Return the kernel in fp32."""

    @abstractmethod
    def multiply(self, layer: "Linear", x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return x W, as `layer` multiplies."""


def is_stored(kernel: Any) -> bool:
    """Return whether a kernel has fewer bits than its product."""
    return isinstance(kernel, StoredKernel)


@dataclasses.dataclass(frozen=True)
class Weights:
    """The parameters of a `Linear`.

    Attributes:
      kernel: the kernel in the dtype of the product, or a quantised kernel.
      bias: the bias in fp32, or None.
    """

    kernel: Float[Array, "..."] | StoredKernel
    bias: Float[Array, "..."] | None


class Linear(nn.Module):
    """y = x W (+ b) over any axes, written as an einsum of x and the kernel, such as "btd,dhk->bthk".

    The letters after the comma are the kernel's axes. Those that x also has come first and are summed over. The others
    are new axes of y. An ellipsis stands for x's leading axes. The kernel is stored in fp32 and cast to `dtype`.

    Attributes:
      equation: the einsum of x and the kernel.
      sizes: sizes of the new axes, by letter.
      names: logical names of the kernel's axes; the bias has the names of the new axes.
      dtype: dtype of the product.
      bias: initialiser of a bias over the new axes, or None for no bias.
      kernel_init: initialiser of the kernel. It gets the shape as a matrix: (product of the summed axes, product of the
        new axes).
      precision: `jax.lax` precision of the product.
      accumulate: dtype of sums and result; None for the default.
      product: function that multiplies.
      joins: let `linears` multiply by this kernel and others in one product (see `JoinedProducts`).
    """

    equation: str
    sizes: Mapping[str, int]
    names: tuple[str | None, ...]
    dtype: Any = jnp.float32
    bias: nn.initializers.Initializer | None = None
    kernel_init: nn.initializers.Initializer = nn.initializers.lecun_normal()
    precision: jax.lax.PrecisionLike = None
    accumulate: Any = None
    product: Product = multiply
    joins: bool = False

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        (y,) = linears(x, [self])
        return y

    @nn.compact
    def weights(self, x: Float[Array, "..."]) -> Weights:
        """Return the parameters for inputs shaped like x. Adapters intercept this method to add parameters."""
        summed, shape = read_equation(self.equation).summed, self.kernel_shape(x)
        inner, outer = prod(shape[: len(summed)]), prod(shape[len(summed) :])

        def draw(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
            return self.kernel_init(key, (inner, outer), dtype).reshape(shape)

        kernel = self._find_kernel(shape)
        if kernel is None:
            kernel = self.param("kernel", named(draw, *self.names), shape, jnp.float32)
        if not isinstance(kernel, StoredKernel):
            kernel = whole_weight(kernel.astype(self.dtype), self.names)
        if self.bias is None:
            return Weights(kernel, None)
        init, shape = named(self.bias, *self.names[len(summed) :]), shape[len(summed) :]
        return Weights(kernel, self.param("bias", init, shape, jnp.float32))

    @nn.nowrap
    def _find_kernel(self, shape: tuple[int, ...]) -> Float[Array, "..."] | StoredKernel | None:
        """Return the kernel, or None if it is not drawn yet.

        `param` would trace the initialiser to compare shapes, which takes longer than the product.
        """
        kernel: Any = nn.meta.unbox(self.get_variable("params", "kernel"))
        if kernel is not None and kernel.shape != shape:
            raise ScopeParamShapeError("kernel", f"/{'/'.join(self.path)}", kernel.shape, shape)
        return kernel

    def products(
        self, x: Float[Array, "..."], layers: Sequence["Linear"], weights: Sequence[Weights]
    ) -> list[Float[Array, "..."]]:
        """Return x W of each of `layers`; the first is this layer. Adapters intercept this method to add updates."""
        if not _are_joined(x, layers, weights):
            return [layer.multiply(x, w.kernel) for layer, w in zip(layers, weights, strict=True)]
        # Separate the gradients: XLA would fuse the updates of all these kernels, and copy their arrays for it
        first, *others = [jnp.asarray(w.kernel) for w in weights]
        kernels = [apart(first), *map(jax.lax.optimization_barrier, others)]
        return JoinedProducts(self.multiply(x, jnp.concatenate(kernels, -1)), [k.shape[-1] for k in kernels])

    @nn.nowrap
    def multiply(
        self, x: Float[Array, "..."], kernel: Float[Array, "..."] | StoredKernel
    ) -> Float[Array, "..."]:
        """Return x W, in `dtype`."""
        if isinstance(kernel, StoredKernel):
            return kernel.multiply(self, x)
        kinds = {"precision": self.precision, "preferred_element_type": self.accumulate}
        return self.product(self.equation, x.astype(self.dtype), kernel, **kinds)

    @nn.nowrap
    def kernel_shape(self, x: Float[Array, "..."]) -> tuple[int, ...]:
        """Return the kernel's shape for inputs shaped like x.

        Raises:
          ValueError: a letter has no size or no name.
        """
        given, summed, new, _ = read_equation(self.equation)
        own, letters = given.replace("...", ""), summed + new
        sizes = dict(zip(reversed(own), reversed(x.shape), strict=False)) | dict(self.sizes)
        unknown = [c for c in letters if c not in sizes]
        if unknown or len(letters) != len(self.names):
            raise ValueError(
                f"Linear {self.equation!r} needs a size for each of {letters!r} and as many names: got sizes "
                f"{dict(self.sizes)} and names {self.names}"
            )
        return tuple(sizes[c] for c in letters)


class JoinedProducts(list[Float[Array, "..."]]):
    """Products of one input with several kernels, computed as one product with all of their columns.

    Attributes:
      whole: all products, one behind the other along the last axis. A function that is computed again for its gradient
        takes it instead of the parts, which XLA would otherwise copy.
    """

    def __init__(self, whole: Float[Array, "..."], sizes: Sequence[int]) -> None:
        super().__init__(jnp.split(whole, list(accumulate(sizes))[:-1], -1))
        self.whole = whole


JOINED_POSITIONS = 4096
"""Positions of x from which on kernels are joined: fewer make products short beside the pass that joins kernels."""


def _are_joined(x: Float[Array, "..."], layers: Sequence[Linear], weights: Sequence[Weights]) -> bool:
    """Return whether to multiply by all kernels at once: on one GPU, in 16 bits, with dense kernels.

    One gradient by x is then summed in fp32, where each layer's would be rounded and added in memory. Devices that
    share a kernel would sum its gradient whole, before it is split.
    """
    if len(layers) < 2 or not all(layer.joins and layer.bias is None for layer in layers):
        return False
    if open_axes() or current_device().platform != "gpu" or any(is_stored(w.kernel) for w in weights):
        return False
    return jnp.finfo(layers[0].dtype).bits == 16 and x.size // x.shape[-1] >= JOINED_POSITIONS


def linears(x: Float[Array, "..."], layers: Sequence[Linear]) -> list[Float[Array, "..."]]:
    """Return y of each `Linear`, as if each was called with x. An adapter may compute all of them in one operation."""
    weights = [layer.weights(x) for layer in layers]
    products = layers[0].products(x, layers, weights)
    if isinstance(products, JoinedProducts):
        return products
    return [_shifted(*each) for each in zip(products, layers, weights, strict=True)]


def is_lone_token(x: "Float[Array, 'B T D'] | OpenSum") -> bool:
    """Return whether x is one token in bfloat16, on one GPU that has a kernel for its products.

    In float16 a channel times its scale, which the kernel rounds before it divides by the norm, can be infinite.
    """
    is_alone = x.shape[:2] == (1, 1) and x.dtype == jnp.bfloat16
    return is_alone and not open_axes() and is_one_launch(x.dtype)


def is_watched() -> bool:
    """Return whether a caller sees the methods of modules: by `nn.intercept_methods` or `capture_intermediates`."""
    # Read Flax's own variables, as it has no public name for them
    capture: Sequence[Any] = getattr(getattr(nn.module, "_context", None), "capture_stack", ())
    return bool(getattr(nn.module, "_global_interceptor_stack", ())) or any(capture[-1:])


class OpenSum(NamedTuple):
    """One token x + sum(parts): the product of the layer before, which the next product adds up while it reads."""

    x: Float[Array, "1 1 D"]
    parts: Float[Array, "S D"]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the sum."""
        return self.x.shape

    @property
    def dtype(self) -> Any:
        """Dtype of the sum."""
        return self.x.dtype


def closed(x: Float[Array, "B T D"] | OpenSum) -> Float[Array, "B T D"]:
    """Return x, with its parts added. Their sum is rounded to the dtype of x first, as a product would be."""
    if not isinstance(x, OpenSum):
        return x
    return x.x + jnp.sum(x.parts, 0).astype(x.x.dtype).reshape(x.x.shape)


def token_products(
    x: Float[Array, "1 ..."] | OpenSum | None,
    layers: Sequence[Linear],
    norm: "RMSNorm | None" = None,
    parts: Float[Array, "S _"] | None = None,
    lse: Float[Array, "S H"] | None = None,
    **options: Any,
) -> tuple[Any, ...]:
    """Return one token, and its products with layers in parts whose sum they are, by one launch.

    Kernels of the layers are plain, without bias. `norm` acts before the products. `parts` without x are of a gate, or
    with `lse` of attention. See `pallas_kernels.token_product`, which has the options too.
    """
    x, parts = x if isinstance(x, OpenSum) else (x, parts)
    like: Any = x
    if x is None and parts is not None:
        sizes = (parts.shape[1] // 2,) if lse is None else (lse.shape[1], parts.shape[1] // lse.shape[1])
        like = jnp.zeros((1, 1, *sizes), layers[0].dtype)
    kernels = [jnp.asarray(layer.weights(like).kernel).reshape(like.size, -1) for layer in layers]
    if norm is not None:
        options |= {"scale": norm.scale(like), "epsilon": norm.epsilon}
    token = None if x is None else x.reshape(-1).astype(layers[0].dtype)
    token, *products = token_product(token, kernels, parts=parts, lse=lse, **options)
    return token if x is None or token is None else token.reshape(x.shape), *products


def normed_linears(
    x: Float[Array, "... D"], layers: Sequence[Linear], norm: "RMSNorm"
) -> list[Float[Array, "... _"]]:
    """Return y of each `Linear` of norm(x), over the last axis and without bias; of one token by one launch."""
    token = x.reshape(-1, 1, x.shape[-1])
    if (
        not is_lone_token(token)
        or is_watched()
        or any(is_stored(layer.weights(x).kernel) for layer in layers)
    ):
        h = norm(x)
        return [layer(h) for layer in layers]
    y = jnp.sum(token_products(token, layers, norm)[1], 0).astype(x.dtype)
    ends = list(accumulate(layer.kernel_shape(x)[-1] for layer in layers))
    return [part.reshape(*x.shape[:-1], -1) for part in jnp.split(y, ends[:-1])]


def stream_dtype(dtype: Any) -> Any:
    """Return the dtype in which a stack of layers adds up what they compute in `dtype`: fp32 for fp16.

    Norms stand before the layers, so that sums may grow. In fp16 they would exceed 65,504.
    """
    return jnp.float32 if jnp.dtype(dtype) == jnp.float16 else dtype


@jax.custom_jvp
def apart(y: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return y, with which XLA fuses none of its readers, if it is part of a gradient; the gradient is fused as ever.

    XLA would add the residual stream in the product y. It copies the stream for that, as the backward pass reads it.
    """
    return y


@apart.defjvp
def _apart_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return jax.lax.optimization_barrier(primals[0]), tangents[0]


def _shifted(y: Float[Array, "..."], layer: Linear, weights: Weights) -> Float[Array, "..."]:
    """Add the bias to y along its new axes, at the positions that the equation gives them."""
    bias = weights.bias
    if bias is None:
        return y
    _, _, new, result = read_equation(layer.equation)
    letters, sizes = result.replace("...", ""), dict(zip(new, bias.shape, strict=True))
    shape = [1] * (y.ndim - len(letters)) + [sizes.get(c, 1) for c in letters]
    return y + bias.astype(y.dtype).reshape(shape)


def dense(
    features: int,
    *,
    axes: tuple[str, str],
    dtype: Any,
    name: str,
    scale: float = 1.0,
    biased: bool = False,
    joins: bool = False,
) -> Linear:
    """Return a `Linear` over the last axis, with a bias if `biased`. Its kernel starts LeCun-normal, times `scale`."""
    init = nn.initializers.variance_scaling(scale**2, "fan_in", "truncated_normal")
    options: dict[str, Any] = {"bias": nn.initializers.zeros if biased else None, "joins": joins}
    return Linear("...d,de->...e", {"e": features}, axes, dtype, kernel_init=init, name=name, **options)


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * scale, computed in fp32, returned in `dtype` (Zhang and Sennrich, 1910.07467).

    Attributes:
      dtype: dtype of y.
      epsilon: eps.
      on_root: compute y = x / (sqrt(mean(x^2)) + eps) * scale instead, as in StripedHyena.
    """

    dtype: Any = jnp.float32
    epsilon: float = 1e-6
    on_root: bool = False

    @nn.compact
    def scale(self, x: Float[Array, "... D"]) -> Float[Array, "D"]:
        """Return the parameter for inputs such as x."""
        return self.param("scale", named(nn.initializers.ones, "norm"), (x.shape[-1],), jnp.float32)

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        scale, square = self.scale(x), _mean_square(x)
        inverse = 1 / (_root(square) + self.epsilon) if self.on_root else jax.lax.rsqrt(square + self.epsilon)
        return _times(x, inverse, scale.reshape((1,) * (x.ndim - 1) + (-1,)), self.dtype)


def _root(square: Float[Array, "... 1"]) -> Float[Array, "... 1"]:
    """Return the square root, with gradient 0 at 0.

    Holes and padding are 0, where the true gradient is infinite.
    """
    filled = square > 0
    return jnp.where(filled, jnp.sqrt(jnp.where(filled, square, 1)), 0)


@partial(jax.checkpoint, prevent_cse=False)
def _mean_square(x: Float[Array, "... D"]) -> Float[Array, "... 1"]:
    """Return the mean square in fp32.

    Here and in `_times` the backward pass keeps x in its own dtype instead of fp32.
    """
    wide = x.astype(jnp.float32)
    return jnp.mean(wide * wide, -1, keepdims=True)


@partial(jax.checkpoint, prevent_cse=False, static_argnums=3)
def _times(
    x: Float[Array, "... D"], inverse: Float[Array, "... 1"], scale: Float[Array, "... D"], dtype: Any
) -> Float[Array, "... D"]:
    return (x.astype(jnp.float32) * inverse * scale).astype(dtype)


class LayerNorm(nn.Module):
    """y = (x - mean(x)) / sqrt(var(x) + eps) * scale + bias, computed in fp32, returned in `dtype` (1607.06450)."""

    dtype: Any = jnp.float32
    epsilon: float = 1e-6

    @nn.compact
    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        shape, last = (x.shape[-1],), (1,) * (x.ndim - 1) + (-1,)
        scale = self.param("scale", named(nn.initializers.ones, "norm"), shape, jnp.float32)
        bias = self.param("bias", named(nn.initializers.zeros, "norm"), shape, jnp.float32)
        return _normed(x, scale.reshape(last), bias.reshape(last), self.epsilon, self.dtype)


@partial(jax.checkpoint, prevent_cse=False, static_argnums=(3, 4))
def _normed(
    x: Float[Array, "... D"],
    scale: Float[Array, "... D"],
    bias: Float[Array, "... D"],
    epsilon: float,
    dtype: Any,
) -> Float[Array, "... D"]:
    """Return the norm; the backward pass keeps x in its own dtype."""
    wide = x.astype(jnp.float32)
    wide = wide - jnp.mean(wide, -1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + epsilon)
    return (wide * inverse * scale + bias).astype(dtype)


class Dropout(nn.Module):
    """x / (1 - rate) for kept entries, 0 for dropped ones (Srivastava et al. 2014); off without a "dropout" rng.

    An entry is kept or dropped by a hash of its index and two words of the rng (`pallas_kernels.norm_dropout`). XLA
    fuses these few operations with their neighbours in both passes. JAX's generator needs ten times as many operations,
    and XLA stores its mask for the backward pass. The mask is the same on any mesh.

    Attributes:
      rate: share of entries that are dropped, from 0 to below 1.
    """

    rate: float

    @nn.compact
    def __call__(self, x: Float[Array, "..."], seed: UInt32[Array, "2"] | None = None) -> Float[Array, "..."]:
        """Drop entries. A `seed` is used in place of two words that the rng would draw."""
        if self.rate == 0 or not self.has_rng("dropout"):
            return x
        if seed is None:
            seed = jax.random.bits(self.make_rng("dropout"), (2,), jnp.uint32)
        return _dropped(x, seed, self.rate)


@partial(jax.checkpoint, prevent_cse=False, static_argnums=2)
def _dropped(x: Float[Array, "..."], seed: UInt32[Array, "2"], rate: float) -> Float[Array, "..."]:
    """Drop entries; the backward pass keeps the seed, not the mask."""
    entry = jnp.zeros(x.shape, jnp.uint32)
    for axis, size in enumerate(x.shape):
        entry = entry * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    return jnp.where(is_kept(seed, entry, rate), x / (1 - rate), 0)


class NormDropoutReLU(nn.Module):
    """y = max(0, dropout(RMSNorm(x))) in one operation (`pallas_kernels.norm_dropout`), returned in x's dtype.

    Without a "dropout" rng nothing is dropped. The mask is the same on any mesh.

    Attributes:
      rate: share of entries that are dropped, from 0 to below 1.
      epsilon: epsilon of the norm.
    """

    rate: float = 0.0
    epsilon: float = 1e-6

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        scale = self.param("scale", named(nn.initializers.ones, "norm"), (x.shape[-1],), jnp.float32)
        drops = self.rate != 0 and self.has_rng("dropout")
        seed = jax.random.bits(self.make_rng("dropout"), (2,), jnp.uint32) if drops else None
        places = jnp.arange(x.shape[0] * x.shape[1]).reshape(x.shape[:2]) if drops and open_axes() else None
        over = over_batch if seq_axis(x) is None else over_sequence
        run = partial(_norm_dropout, self.rate if drops else 0.0, self.epsilon)
        return over(run, (x, places), shared=(scale, seed))


def _norm_dropout(rate: float, epsilon: float, rows: Any, *others: Any) -> Float[Array, "B T D"]:
    """Run the operation on the arguments of an island, of which scale and seed are the last."""
    (x, places), (scale, seed) = rows, others[-1]
    return norm_dropout(x, scale, seed, rate=rate, epsilon=epsilon, places=places)


Activation = Literal["silu", "gelu", "gelu_tanh", "identity"]
"""The activation of an MLP. "gelu" is the exact x Phi(x), "gelu_tanh" its approximation."""


class MLP(nn.Module):
    """A gated MLP, (f(x W_g) * x W_u) W_d; it is SwiGLU if f is silu (Shazeer, 2002.05202).

    Attributes:
      hidden: width of the hidden layer.
      dtype: compute dtype.
      out_scale: scale of the output kernel's initial standard deviation.
      activation: f.
      gated: if False, compute f(x W_u + b_u) W_d + b_d instead.
    """

    hidden: int
    dtype: Any = jnp.float32
    out_scale: float = 1.0
    activation: Activation = "silu"
    gated: bool = True

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"] | OpenSum,
        norm: "RMSNorm | None" = None,
    ) -> Float[Array, "B T D"] | OpenSum:
        """Return MLP(x), or x + MLP(norm(x)) of one token with a norm.

        With a norm the MLP must be gated by silu, with plain kernels (see `token_products`).
        """
        options: dict[str, Any] = {"dtype": self.dtype, "biased": not self.gated}
        names = ("gate", "up") if self.gated else ("up",)
        into = [dense(self.hidden, axes=("embed", "mlp"), name=name, joins=True, **options) for name in names]
        down = dense(x.shape[-1], axes=("mlp", "embed"), name="down", scale=self.out_scale, **options)
        if norm is not None:
            token, hidden, squares = token_products(x, into, norm, leaves_norm=True)
            norms = {"squares": squares, "epsilon": norm.epsilon}
            return OpenSum(token, token_products(None, [down], parts=hidden, **norms)[1])
        hidden = linears(closed(x), into)
        if not self.gated:
            return down(_activated(hidden[0], self.activation))
        if isinstance(hidden, JoinedProducts):
            return down(_gated_halves(hidden.whole, self.activation))
        return down(_gated(hidden[0], hidden[1], self.activation))


@partial(jax.checkpoint, static_argnums=2)
def _gated(gate: Float[Array, "..."], up: Float[Array, "..."], activation: Activation) -> Float[Array, "..."]:
    """Return f(gate) up.

    The backward pass keeps only the inputs, and computes the sigmoid and the product again.
    """
    return _activated(gate, activation) * up


@partial(jax.checkpoint, static_argnums=1)
def _gated_halves(joined: Float[Array, "..."], activation: Activation) -> Float[Array, "..."]:
    """Return f(gate) up of both side by side; the backward pass keeps only them."""
    gate, up = jnp.split(joined, 2, -1)
    return _activated(gate, activation) * up


def _activated(x: Float[Array, "..."], activation: Activation) -> Float[Array, "..."]:
    if activation == "identity":
        return x
    return jax.nn.silu(x) if activation == "silu" else jax.nn.gelu(x, approximate=activation == "gelu_tanh")
