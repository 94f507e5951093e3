"""Hopper: one pass over memory each way, a thread a column (`mosaic_gpu_pass`), two where rows must be cut.

Forward, h_t = a_t h_{t-1} + b_t. Backward walks against it with c_t = a_t g_t, what step t sends to the one before:

    g_t = dh_t + c_{t+1},    db_t = g_t,    da_t = g_t h_{t-1},    dinitial = c_0,

and keeps a and h. With few columns in all, each row is cut into pieces. A piece takes a state s at its edge to P s + L,
where P is the product of its factors. One more walk finds P and L, XLA scans over pieces, and the walk above starts
from there.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels._compat import vary_alike
from pallas_kernels._own_gradient import OwnGradient
from pallas_kernels.linear_scan.hopper import Grid, lay_out
from pallas_kernels.linear_scan.mosaic_gpu_pass import Step, Walk, run
from pallas_kernels.linear_scan.xla import linear_scan_xla


class _Options(NamedTuple):
    """The options that a call is compiled for."""

    grid: Grid
    reverse: bool
    dtype: Any
    interpret: bool


def linear_scan_mosaic_gpu(
    a: Float[Array, "*#S T D"],
    b: Float[Array, "*S T D"],
    *,
    initial: Float[Array, "*S D"] | None = None,
    reverse: bool = False,
    pieces: int | None = None,
    interpret: bool = False,
) -> Float[Array, "*S T D"]:
    """Compute `linear_scan`; what `hopper.why_not` refuses is not checked again.

    Streams may be bf16 or fp32.

    Args:
      pieces: pieces of a row, instead of a number that fills an H200.
      interpret: run on the CPU in Pallas' simulation of a GPU, for tests.
    """
    a, b, initial = vary_alike(a, b, initial)
    *rows, length, width = b.shape
    grid = lay_out(math.prod(rows), length, width, pieces)
    start = None if initial is None else initial.reshape(-1, 1, width).astype(jnp.float32)
    options = _Options(grid, reverse, b.dtype, interpret)
    h: Any = _scan(_shared_rows(a, b.shape, grid.rows), b.reshape(-1, length, width), start, options)
    return h.reshape(b.shape)


def _shared_rows(a: Array, shape: tuple[int, ...], together: int) -> Float[Array, "R T D"]:
    """Return factors as R rows: row s of b has those of s modulo R.

    They are copied where no such R is.
    """
    lead = next((i for i, n in enumerate(a.shape[:-2]) if n != 1), len(shape) - 2)
    if math.prod(shape[lead:-2]) % together:
        lead = 0
    return jnp.broadcast_to(a, (*(1,) * lead, *shape[lead:])).reshape(-1, *shape[-2:])


def _step(states: Any, values: Any) -> Any:
    (h,), (factor, added) = states, values
    h = factor * h + added
    return (h,), (h,)


def _effect(states: Any, values: Any) -> Any:
    (product, h), (factor, added) = states, values
    return (factor * product, factor * h + added), ()


@partial(OwnGradient, nondiff_argnums=(3,))
def _scan(
    a: Float[Array, "R T D"],
    b: Float[Array, "S T D"],
    initial: Float[Array, "S 1 D"] | None,
    options: _Options,
) -> Float[Array, "S T D"]:
    start = _edges(_effect, (a, b), initial, options, reverse=options.reverse)
    walk = _walk("linear_scan", _step, options, reverse=options.reverse)
    return run(walk, (a, b), [jnp.float32], start=start)[0][0]


def _walk(name: str, step: Step, options: _Options, **more: Any) -> Walk:
    return Walk(name=name, step=step, grid=options.grid, interpret=options.interpret, **{"states": 1, **more})


def _edges(
    effect: Step, streams: tuple[Array, Array], start: Array | None, options: _Options, *, reverse: bool
) -> Float[Array, "S P D"] | None:
    """Return the state before each piece, of a walk that begins with `start`."""
    if options.grid.pieces == 1:
        return start
    walk = _walk("linear_scan_effect", effect, options, states=2, reverse=reverse)
    product, last = run(walk, streams, [])[1]
    initial = jnp.zeros_like(last[:, :1]) if start is None else start
    behind = linear_scan_xla(product, last, initial=initial[:, 0], reverse=reverse)
    return jnp.concatenate([behind[:, 1:], initial] if reverse else [initial, behind[:, :-1]], 1)


def _forward(a: Array, b: Array, initial: Array | None, options: _Options) -> tuple[Array, Any]:
    h: Any = _scan(a, b, initial, options)
    return h, (a, h, initial)


def _step_back(states: Any, values: Any) -> Any:
    (sent,), (factor, cotangent, before) = states, values
    g = cotangent + sent
    return (factor * g,), (g * before, g)


def _effect_back(states: Any, values: Any) -> Any:
    (product, sent), (factor, cotangent) = states, values
    return (factor * product, factor * (cotangent + sent)), ()


def _backward(options: _Options, kept: Any, dh: Array) -> tuple[Array, Array, Array | None]:
    a, h, initial = kept

    reverse = not options.reverse
    start = _edges(_effect_back, (a, dh), None, options, reverse=reverse)
    walk = _walk("linear_scan_gradient", _step_back, options, reverse=reverse, neighbour=True)
    shared = a.shape[0] != h.shape[0]
    dtypes = [jnp.dtype(jnp.float32) if shared else a.dtype, options.dtype]
    (da, db), (sent,) = run(walk, (a, dh, h), dtypes, start=start, beyond=initial)
    if shared:
        da = da.reshape(-1, *a.shape).sum(0).astype(a.dtype)
    return da, db, None if initial is None else (sent[:, :1] if reverse else sent[:, -1:])


_scan.defvjp(_forward, _backward)
