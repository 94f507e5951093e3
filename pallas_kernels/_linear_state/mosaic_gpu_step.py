"""Hopper: one step of a matrix of state per head, which is read and written once.

    S' = A * S + k d^T          o = scale S'^T q          d = v, or beta (v - (A * S)^T k) under the delta rule

A program has a head's state for 128 value channels, all of its K rows, in shared memory. A thread has a column of it:
the sums over K are its own, and nothing passes between threads. What limits the step is the copy of S. Several programs
share a multiprocessor, so one computes while others copy.

The automatic barriers around stores to shared memory are off: no thread reads what another stores. The copy that leaves
follows `commit_smem`, which is a barrier.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels._hopper import varying_like
from pallas_kernels._linear_state.step import LANES
from pallas_kernels._mosaic_gpu import mosaic_kernel

GROUP = 8
"""Rows of a state whose numbers are read before the first of them is used."""

Gate = Literal["head", "key", "value"]


class Call(NamedTuple):
    """The static part of a program: what has gates, heads of v to one of k, and the outputs' scale."""

    gate: Gate
    ratio: int
    scale: float


class Shared(NamedTuple):
    """Shared memory of a program: rows of q, k and of gates by key channel, the state, and when all are there."""

    rows: list[Any]
    state: Any
    there: Any


class Row(NamedTuple):
    """A row of a state: its index, its numbers of q and of k, and its 128 columns after their decay."""

    place: Any
    q: Array
    k: Array
    decayed: Array


def step(
    q: Float[Array, "B 1 J K"],
    k: Float[Array, "B 1 J K"],
    v: Float[Array, "B 1 H V"],
    log_gate: Float[Array, "B 1 ..."],
    state: Float[Array, "B H K V"],
    *,
    gate: Gate,
    scale: float,
    beta: Float[Array, "B 1 H"] | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "B 1 H V"], Float[Array, "B H K V"]]:
    """Return the output, and the state behind the step in fp32.

    Args:
      log_gate: [B, 1, H], [B, 1, J, K] or [B, 1, H, V], as `gate` says.
      beta: of the delta rule; None adds k v^T as it is.
    """
    keys, (_, _, heads, values) = k.shape[3], v.shape
    per_head = [x.reshape(-1).astype(jnp.float32) for x in (log_gate, beta) if x is not None and x.ndim == 3]
    matrices = [x.reshape(-1, x.shape[3]) for x in (q, k, v, log_gate) if x.ndim == 4]
    states = state.astype(jnp.float32).reshape(-1, keys, values)
    by_key = [q, k, log_gate] if gate == "key" else [q, k]
    o, final = mosaic_kernel(
        partial(_program, call=Call(gate, heads // k.shape[2], scale), has_beta=beta is not None),
        out_type=[varying_like(x, x.shape, x.dtype) for x in (matrices[2], states)],
        grid=(states.shape[0], values // LANES),
        grid_names=("row", "block"),
        scratch_types=[
            Shared(
                rows=[plgpu.SMEM((keys,), x.dtype) for x in by_key],
                state=plgpu.SMEM((keys, LANES), jnp.float32),
                there=plgpu.Barrier(num_arrivals=1 + len(by_key)),
            )
        ],
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        interpret=interpret,
        kernel_name=f"linear_state_step_{gate}" + ("" if beta is None else "_delta"),
    )(*matrices, *per_head, states)
    return o.reshape(v.shape), final.reshape(state.shape)


def _program(*refs: Any, call: Call, has_beta: bool) -> None:
    """Run 128 columns of one head's state."""
    q, k, v, *others, states, o, final, shared = refs
    row, group = lax.axis_index("row"), lax.axis_index("row") // call.ratio
    columns = pl.ds(lax.axis_index("block") * LANES, LANES)
    sources = [q, k, *(others[:1] if call.gate == "key" else [])]
    for source, place in zip(sources, shared.rows, strict=True):
        plgpu.copy_gmem_to_smem(source.at[group], place, shared.there)
    plgpu.copy_gmem_to_smem(states.at[row, :, columns], shared.state, shared.there)
    values = _read(v.at[row, columns])
    decay = _decays(others[0], row, columns, shared, call)
    plgpu.barrier_wait(shared.there)
    if has_beta:

        def hold(at: Row, held: Array) -> Array:
            return held + at.k * at.decayed

        values = others[-1][row] * (values - _over_rows(hold, shared, decay))

    def update(at: Row, total: Array) -> Array:
        new = at.decayed + at.k * values
        shared.state[at.place] = new
        return total + at.q * new

    total = _over_rows(update, shared, decay)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(shared.state, final.at[row, :, columns])
    o[row, columns] = (call.scale * total).astype(o.dtype)
    plgpu.wait_smem_to_gmem(0)


def _decays(gate: Any, row: Array, columns: Any, shared: Shared, call: Call) -> Callable[[Any], Array]:
    """Return the decay of a row of the state: one number, or one for each of its columns."""
    if call.gate == "key":
        return lambda i: _exp(_number(shared.rows[2], i))
    whole = _exp(gate[row] if call.gate == "head" else _read(gate.at[row, columns]))
    return lambda i: whole


def _exp(x: Array) -> Array:
    return jnp.exp2(x.astype(jnp.float32) * math.log2(math.e))


def _over_rows(
    advance: Callable[[Row, Array], Array], shared: Shared, decay: Callable[[Any], Array]
) -> Float[Array, "128"]:
    """Sum what `advance` makes of the rows of the state, in groups.

    Read a group before its first row is stored: the compiler moves no load above a store.
    """

    def some(group: Array, carry: Array) -> Array:
        rows = []
        for i in (group * GROUP + j for j in range(GROUP)):
            q, k = (_number(ref, i) for ref in shared.rows[:2])
            rows.append(Row(i, q, k, decay(i) * _read(shared.state.at[i])))
        for row in rows:
            carry = advance(row, carry)
        return carry

    return lax.fori_loop(0, shared.state.shape[0] // GROUP, some, _zeros())


def _number(ref: Any, i: Any) -> Array:
    return ref[i].astype(jnp.float32)


def _layout() -> Any:
    return plgpu.Layout.WG_STRIDED((LANES,), vec_size=1)


def _read(ref: Any) -> Float[Array, "128"]:
    """Read one number a thread, in fp32."""
    return plgpu.load(ref, layout=_layout(), optimized=False).astype(jnp.float32)


def _zeros() -> Float[Array, "128"]:
    return plgpu.layout_cast(jnp.zeros(LANES, jnp.float32), _layout())
