"""Gates, transform, spectrum of the taps, and back: values and gradients, a group of channels at a time.

With A of `dft`, u = pre x, and the taps split into lags from 0 on and negative ones,

    S = A u,   H = sqrt(M) (A h_ahead - i A h_behind),   y = post Re(A^H (H S))
    G = A (post dy),   du = Re(A^H (conj(H) G)),   dH = sum over rows of conj(S) G.

fp16 holds no more than 65,504. So each row is scaled by a power of two that keeps its norm, which no stage changes,
under 2^14; each channel's H by one that keeps it under 1.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels._conv.gates import accumulator, add_skip
from pallas_kernels._conv.packed import fit
from pallas_kernels._conv.toeplitz import window
from pallas_kernels._own_gradient import OwnGradient
from pallas_kernels.long_conv.dft import power_of_two, radices, restore, stage_matrices, transform
from pallas_kernels.long_conv.groups import SPECTRUM_BYTES, Arrays, by_groups, fewest_groups

LARGEST_NORM = 14
"""Rows are scaled to a norm of at most 2 to this power: fp16 ends below 2^16."""


@dataclass(frozen=True)
class Form:
    """The static part: outputs a block, the index of lag 0 in the taps, the result's dtype, the limit of a group."""

    rows: int
    offset: int
    dtype: Any
    spectrum_bytes: int = SPECTRUM_BYTES


@partial(OwnGradient, nondiff_argnums=(0,))
def gated(
    form: Form,
    filter: Float[Array, "D F"],
    bias: Float[Array, "D"] | None,
    x: Float[Array, "B D N C"],
    pre_gate: Float[Array, "B D N C"] | None,
    post_gate: Float[Array, "B D N rows"] | None,
    segment_ids: Int[Array, "B 1 N C"] | None,
) -> Float[Array, "B D N rows"]:
    """Return y_i = post_i sum_j filter[offset + i - j] u_j in each block.

    u = pre x is zero at what are not tokens. With a bias, for blocks of `rows` steps, bias u_i is added to the sum.
    """
    return _forward(form, filter, bias, x, pre_gate, post_gate, segment_ids)[0]


def _forward(form: Form, *arrays: Any) -> tuple[Array, Arrays]:
    x = arrays[2]
    plan = Plan.of(form, x)

    def work(group: Arrays) -> Arrays:
        filter, bias, x, pre, post, ids = group
        y = plan.convolve(plan.spectrum(_product(x, pre, ids)), plan.response(filter, bias))
        return (_product(y, post, ids).astype(form.dtype),)

    like = (jax.ShapeDtypeStruct((*x.shape[:-1], form.rows), form.dtype),)
    return by_groups(plan.groups, work, arrays, like)[0], arrays


def _backward(form: Form, arrays: Arrays, g: Float[Array, "B D N rows"]) -> Arrays:
    plan = Plan.of(form, arrays[2])

    def work(group: Arrays) -> Arrays:
        filter, bias, x, pre, post, ids, g = group
        response = plan.response(filter, bias)
        u, v = _product(x, pre, ids), _product(g, post, ids)
        sent, got = plan.spectrum(u), plan.spectrum(v)
        du = plan.convolve(got, _conjugate(response), x.shape[-1])
        dfilter = plan.taps_gradient(sent, got, filter)
        # Sum the bias's gradient apart: as a tap's gradient it would have the error of all taps.
        dbias = None if bias is None else jnp.sum(u * v, axis=(0, 2, 3)).astype(bias.dtype)
        dpre = None if pre is None else _product(du, x, ids).astype(pre.dtype)
        dpost = None
        if post is not None:
            dpost = _product(g, plan.convolve(sent, response), ids).astype(post.dtype)
        return dfilter, dbias, _product(du, pre, ids).astype(x.dtype), dpre, dpost

    like = jax.tree.map(lambda z: jax.ShapeDtypeStruct(z.shape, z.dtype), arrays[:5])
    return *by_groups(plan.groups, work, (*arrays, g), like), None


gated.defvjp(_forward, _backward)


@dataclass(frozen=True)
class Plan:
    """Matrices of a row's stages, and what they are applied to."""

    form: Form
    groups: int
    points: int
    wide: Any
    matrices: tuple[Array, ...]

    @classmethod
    def of(cls, form: Form, x: Float[Array, "B D N C"]) -> "Plan":
        stages = radices(max(form.rows, x.shape[-1]))
        points = math.prod(stages)
        wide = accumulator(x.dtype)
        narrow = jnp.finfo(x.dtype).bits < 32
        size = 8 * points * math.prod(x.shape[:-1])
        groups = fewest_groups(x.shape[1], size, form.spectrum_bytes)
        return cls(form, groups, points, wide, stage_matrices(stages, jnp.float16 if narrow else wide))

    @property
    def dtype(self) -> Any:
        """The dtype of the products' operands."""
        return self.matrices[0].dtype

    def spectrum(self, u: Float[Array, "B D N C"]) -> "_Spectrum":
        """Return A u of each row, scaled."""
        largest = jnp.max(jnp.abs(u), axis=-1, initial=0)
        scale = self._scale(largest, LARGEST_NORM - math.ceil(math.log2(self.points) / 2))
        narrow = fit((u * scale[..., None]).astype(self.dtype), self.points)
        columns = jnp.transpose(narrow, (3, 0, 2, 1))
        values = transform(self.matrices, columns.reshape(self.points, -1))
        return _Spectrum(values.reshape(self.points, 2, *columns.shape[1:]), _rows_first(scale))

    def response(self, filter: Float[Array, "D F"], bias: Float[Array, "D"] | None) -> "_Spectrum":
        """Return H of each channel, [M, 2, 1, 1, D]."""
        filter = add_skip(filter, bias, self.form.offset)
        sides = [window(filter, self.form.offset - start, self.points) for start in (0, self.points)]
        found = self.spectrum(jnp.stack(sides)[:, :, None].astype(self.wide))
        found = found.unscaled() * math.sqrt(self.points)
        ahead, behind = found[:, :, 0], found[:, :, 1]
        values = jnp.stack([ahead[:, 0] + behind[:, 1], ahead[:, 1] - behind[:, 0]], axis=1)[:, :, None]
        # Double the larger of both parts, to bound the size of a complex number.
        scale = self._scale(2 * jnp.max(jnp.abs(values), axis=(0, 1)), 0)
        return _Spectrum(values * scale[None, None], scale)

    def convolve(self, sent: "_Spectrum", response: "_Spectrum", rows: int | None = None) -> Array:
        """Return Re(A^H (H S)) of each row, the first `rows` steps, [B, D, N, rows]."""
        (a, b), (c, d) = sent.parts(), response.parts()
        both = jnp.stack([a * c - b * d, a * d + b * c], axis=1)
        y = self.restored(both) / (sent.scale * response.scale)[None]
        return jnp.transpose(y[: self.form.rows if rows is None else rows], (1, 3, 2, 0))

    def restored(self, values: Float[Array, "M 2 B N D"]) -> Float[Array, "M B N D"]:
        """Return Re(A^H S) of each row."""
        y = restore(self.matrices, values.astype(self.dtype).reshape(self.points, 2, -1))
        return y.reshape(self.points, *values.shape[2:]).astype(self.wide)

    def taps_gradient(self, sent: "_Spectrum", got: "_Spectrum", filter: Float[Array, "D F"]) -> Array:
        """Return the adjoint of `response`, of the sum over rows of conj(S) G."""
        (a, b), (c, d) = sent.parts(), got.parts()
        inverse = 1 / (sent.scale * got.scale)[None]
        real, imaginary = (jnp.sum(z * inverse, axis=(1, 2)) for z in (a * c + b * d, a * d - b * c))
        return self.adjoint_response(real, imaginary, filter)

    def adjoint_response(
        self, real: Float[Array, "M D"], imaginary: Float[Array, "M D"], filter: Float[Array, "D F"]
    ) -> Float[Array, "D F"]:
        """Return the gradient of `filter`, which is not read, from that of its spectrum H."""
        ahead, behind = jnp.stack([real, imaginary], axis=1), jnp.stack([-imaginary, real], axis=1)
        both = jnp.stack([ahead, behind], axis=2)[:, :, :, None]
        # Bound the norm of a spectrum: it is at most sqrt(2 M) times the largest part.
        bits = LARGEST_NORM - math.ceil(math.log2(2 * self.points) / 2)
        scale = self._scale(jnp.max(jnp.abs(both), axis=(0, 1)), bits)
        taps = self.restored(both * scale[None, None]) * (math.sqrt(self.points) / scale)[None]
        taps = jnp.transpose(taps[:, :, 0], (1, 2, 0))
        sides = lambda h: [window(h, self.form.offset - start, self.points) for start in (0, self.points)]  # noqa: E731
        _, vjp = jax.vjp(lambda h: jnp.stack(sides(h)), filter)
        return vjp(taps.astype(filter.dtype))[0]

    def _scale(self, largest: Array, bits: int) -> Array:
        """Return a power of two, where operands are narrow."""
        if self.dtype == self.wide:
            return jnp.ones_like(largest, self.wide)
        return power_of_two(largest.astype(self.wide), bits)


@dataclass(frozen=True)
class _Spectrum:
    """Values [M, 2, B, N, D], which are `scale` [B, N, D] times what they stand for."""

    values: Float[Array, "M 2 B N D"]
    scale: Float[Array, "B N D"]

    def parts(self) -> tuple[Array, Array]:
        """Return real and imaginary part, in fp32 or wider."""
        wide = self.values.astype(self.scale.dtype)
        return wide[:, 0], wide[:, 1]

    def unscaled(self) -> Float[Array, "M 2 B N D"]:
        return self.values.astype(self.scale.dtype) / self.scale[None, None]


def _conjugate(response: _Spectrum) -> _Spectrum:
    real, imaginary = response.parts()
    return _Spectrum(jnp.stack([real, -imaginary], axis=1), response.scale)


def _rows_first(scale: Float[Array, "B D N"]) -> Float[Array, "B N D"]:
    return jnp.transpose(scale, (0, 2, 1))


def _product(a: Array, b: Array | None, ids: Array | None) -> Array:
    """Return a b in fp32 or wider, zero at what are not tokens, whatever lies there."""
    wide = accumulator(a.dtype)
    both = a.astype(wide) if b is None else a.astype(wide) * b.astype(wide)
    return both if ids is None else jnp.where(ids > 0, both, jnp.zeros((), wide))
