"""Kernels in 8 or 4 bits: values, their scales, and the product that a `Linear` makes with them."""

from functools import partial
from typing import Any, Literal, get_args

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int8, UInt8

from jaxblt.layers import Linear, StoredKernel
from jaxblt.precision.formats import E4M3
from jaxblt.precision.products import FAST, contract, spell_out
from jaxblt.show import show

Scheme = Literal["int8", "int4", "fp8", "w8a8", "int8_asymmetric"]
"""Of weights: 8 bits, 4 bits, or E4M3; "w8a8" has activations in 8 bits as well; ranges of "int8_asymmetric" reach from
a channel's least weight to its largest."""
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)
BITS: dict[Scheme, int] = {"int8": 8, "int4": 4, "fp8": 8, "w8a8": 8, "int8_asymmetric": 8}
"""Of a value; scales come besides."""
GROUP = 128
"""Values along the axes summed over that share a scale in int4; the last group may be shorter."""
TOP: dict[Scheme, float] = {"int8": 127, "fp8": E4M3.largest, "w8a8": 127, "int8_asymmetric": 127}
"""The largest value; the least is its negative."""
REACH, TRIALS = (6.0, 11.0), 21
"""Values of int4 that the largest entry of a group is tried as, of both signs; beyond 8 it is clipped."""


@flax.struct.dataclass
class Quantized(StoredKernel):
    """A kernel W = values · scale + middle. A scanned stack's has an axis of layers in front of every array.

    Attributes:
      values: of the kernel's shape, in int8 or E4M3; in int4 two neighbours along the last axis summed over share a
        byte.
      scale: fp32 of each output channel; in int4 also of each group of `GROUP` along the axes summed over.
      inputs: scale of activations by a calibrated range; None for one of each token's own largest entry.
      middle: fp32 of each output channel, the weight that value 0 stands for; None of symmetric ranges, where it is 0.
      scheme: how they are stored.
    """

    values: Array
    scale: Float[Array, "..."]
    inputs: Float[Array, "*#L"] | None = None
    middle: Float[Array, "..."] | None = None
    scheme: Scheme = flax.struct.field(pytree_node=False, default="int8")

    __repr__ = show

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one layer's kernel."""
        shape = list(self.values.shape)
        if self.scheme == "int4":
            shape[len(shape) - self.scale.ndim] *= 2
        return tuple(shape)

    @property
    def size(self) -> int:
        """Weights that it stands for."""
        return self.values.size * (2 if self.scheme == "int4" else 1)

    def dense(self) -> Float[Array, "..."]:
        """Return one layer's kernel in fp32."""
        if self.scheme != "int4":
            dense = self.values.astype(jnp.float32) * _below(self.scale, self.values.ndim)
            return dense if self.middle is None else dense + _below(self.middle, self.values.ndim)
        new = self.scale.shape[1:]
        values = unpack(self.values.reshape(-1, *new)).astype(jnp.float32)
        scale = jnp.repeat(self.scale, GROUP, axis=0)[: len(values)]
        return (values * scale).reshape(self.shape)

    def multiply(self, layer: Linear, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return x W, summed in fp32 or int32, and rounded once to what `layer` returns."""
        given = x.astype(layer.dtype)
        if self.scheme == "w8a8":
            y: Any = _multiply_integers(layer.equation, self, given)
        elif self.scheme == "int4":
            y = _product(layer, given, self.dense())
        else:
            # Scale sums, not weights: 8 bits are exact in bf16, and the cast may be read by the product itself
            y = _product(layer, given, self.values)
            y = y * _over(self.scale, layer.equation, x.ndim)
            if self.middle is not None:
                y = y + _sum_of_tokens(layer.equation, given) * _over(self.middle, layer.equation, x.ndim)
        return y.astype(layer.dtype if layer.accumulate is None else layer.accumulate)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _multiply_integers(equation: str, kernel: Quantized, x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return x W of both in int8. Tokens that are not finite give NaN, which rounding would hide."""
    letters = spell_out(equation, x.ndim)
    axes = tuple(letters.given.index(c) for c in letters.summed)
    wide, inputs = x.astype(jnp.float32), kernel.inputs
    largest = jnp.max(jnp.abs(wide), axes, keepdims=True)
    scale = scale_of(largest, "w8a8") if inputs is None else jnp.broadcast_to(inputs, largest.shape)
    scale = jnp.where(jnp.isfinite(largest), scale, jnp.nan)
    names = letters.given, letters.summed + letters.new, letters.result
    y = contract(_rounded(wide / scale, "w8a8"), kernel.values, names, jnp.int32, FAST)
    tokens = _spread(jnp.squeeze(scale, axes), letters.lead, letters.result)
    return y.astype(jnp.float32) * tokens * _over(kernel.scale, equation, x.ndim)


@_multiply_integers.defjvp
def _multiply_integers_jvp(
    equation: str, primals: tuple[Any, Any], tangents: tuple[Any, Any]
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Keep the gradient that attributions read: rounding has none, so tokens count as they are."""
    (kernel, x), (_, dx) = primals, tangents
    dy = jnp.einsum(equation, dx, kernel.values.astype(dx.dtype), preferred_element_type=jnp.float32)
    return _multiply_integers(equation, kernel, x), dy * _over(kernel.scale, equation, x.ndim)


def _product(layer: Linear, x: Float[Array, "..."], kernel: Array) -> Float[Array, "..."]:
    """Return x times a kernel that is cast to the layer's dtype, in fp32."""
    kinds: dict[str, Any] = {"precision": layer.precision, "preferred_element_type": jnp.float32}
    return layer.product(layer.equation, x, kernel.astype(layer.dtype), **kinds)


def _sum_of_tokens(equation: str, x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return each token's sum in fp32, with axes as y has them: what a kernel of ones would give every channel."""
    letters = spell_out(equation, x.ndim)
    axes = tuple(letters.given.index(c) for c in letters.summed)
    return _spread(jnp.sum(x.astype(jnp.float32), axes), letters.lead, letters.result)


def _over(scale: Float[Array, "..."], equation: str, rank: int) -> Float[Array, "..."]:
    """Return scales of output channels, with axes as y of an x of this rank has them."""
    letters = spell_out(equation, rank)
    return _spread(scale, letters.new, letters.result)


def _spread(array: Float[Array, "..."], letters: str, result: str) -> Float[Array, "..."]:
    """Return an array of these letters with the axes of `result`, of size 1 where it has none."""
    own = [c for c in result if c in letters]
    sizes = dict(zip(letters, array.shape, strict=True))
    return array.transpose([letters.index(c) for c in own]).reshape([sizes.get(c, 1) for c in result])


def _below(scale: Float[Array, "..."], rank: int) -> Float[Array, "..."]:
    """Return scales of output channels with axes of size 1 for those summed over."""
    return scale.reshape((1,) * (rank - scale.ndim) + scale.shape)


def scale_of(largest: Float[Array, "..."], scheme: Scheme) -> Float[Array, "..."]:
    """Return the scale with which the largest entry becomes the largest value; 1 where that entry is 0."""
    return jnp.where(largest == 0, 1, largest / jnp.float32(TOP[scheme]))


def _rounded(values: Float[Array, "..."], scheme: Scheme) -> Array:
    """Return values, in units of their scale, rounded to the scheme's dtype and clipped to its range."""
    top = jnp.float32(TOP[scheme])
    clipped = jnp.clip(values, -top, top)
    return clipped.astype(E4M3.dtype) if scheme == "fp8" else jnp.round(clipped).astype(jnp.int8)


@partial(jax.jit, static_argnames=("scheme", "summed", "layers"))
def quantize_kernel(
    kernel: Float[Array, "..."],
    scheme: Scheme,
    *,
    summed: int,
    layers: int = 0,
    inputs: Float[Array, "*#L"] | None = None,
) -> Quantized:
    """Round a kernel to the nearest values: an entry is off by half a scale at the most in int8.

    So it is in int4 unless it is clipped: there scales are those of the least mean square error.

    Args:
      kernel: its axes summed over first; fp32, or a dtype that fp32 holds.
      scheme: see `Scheme`; "int4" needs an even last axis of those summed over.
      summed: how many axes are summed over.
      layers: axes of layers in front of them.
      inputs: scales of activations of each layer; see `Quantized`.
    """
    if layers:
        one = partial(quantize_kernel, scheme=scheme, summed=summed, layers=layers - 1)
        return jax.vmap(lambda k, i: one(k, inputs=i))(kernel, inputs)
    wide = kernel.astype(jnp.float32)
    if scheme == "int4":
        return _in_groups(wide, summed)
    axes, middle = tuple(range(summed)), None
    if scheme == "int8_asymmetric":
        middle = (jnp.max(wide, axes) + jnp.min(wide, axes)) / 2
        wide = wide - _below(middle, wide.ndim)
    scale = scale_of(jnp.max(jnp.abs(wide), axes), scheme)
    return Quantized(_rounded(wide / _below(scale, wide.ndim), scheme), scale, inputs, middle, scheme)


def _in_groups(kernel: Float[Array, "..."], summed: int) -> Quantized:
    into, new = kernel.shape[:summed], kernel.shape[summed:]
    flat = kernel.reshape(-1, *new)
    pad = jnp.pad(flat, [(0, -len(flat) % GROUP)] + [(0, 0)] * len(new))
    groups = pad.reshape(-1, GROUP, *new)
    scale = _closest_scale(groups)
    values = _in_four_bits(groups, scale).reshape(-1, *new)[: len(flat)]
    return Quantized(pack(values).reshape(*into[:-1], into[-1] // 2, *new), scale, scheme="int4")


def _closest_scale(groups: Float[Array, "G S *N"]) -> Float[Array, "G *N"]:
    """Return the scale of each group that rounds it with the least mean square error.

    Four bits hold -8 to 7, so the sign of a scale says which side reaches further. What exceeds the range is clipped.
    """
    top = jnp.max(jnp.abs(groups), 1)

    def compare(best: tuple[Array, Array], reach: Array) -> tuple[tuple[Array, Array], None]:
        least, scale = best
        trial = jnp.where(top > 0, top / reach, 1)
        error = jnp.sum((_in_four_bits(groups, trial).astype(jnp.float32) * trial[:, None] - groups) ** 2, 1)
        closer = error < least
        return (jnp.where(closer, error, least), jnp.where(closer, trial, scale)), None

    reaches = jnp.linspace(*REACH, TRIALS, dtype=jnp.float32)
    start = jnp.full_like(top, jnp.inf), jnp.full_like(top, jnp.nan)
    return jax.lax.scan(compare, start, jnp.concatenate([reaches, -reaches]))[0][1]


def _in_four_bits(groups: Float[Array, "G S *N"], scale: Float[Array, "G *N"]) -> Int8[Array, "G S *N"]:
    return jnp.round(jnp.clip(groups / scale[:, None], -8, 7)).astype(jnp.int8)


def pack(values: Int8[Array, "K *N"]) -> UInt8[Array, "H *N"]:
    """Put two neighbours along the first axis, of -8 to 7, into a byte; the first has the low bits."""
    low, high = values[0::2].astype(jnp.uint8), values[1::2].astype(jnp.uint8)
    return (low & 15) | (high << 4)


def unpack(packed: UInt8[Array, "H *N"]) -> Int8[Array, "K *N"]:
    """Undo `pack`."""
    halves = jnp.stack([packed & 15, packed >> 4], 1).astype(jnp.int8)
    return ((halves ^ 8) - 8).reshape(-1, *packed.shape[1:])
