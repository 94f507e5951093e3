"""The public function and its implementation table."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels._arguments import checked
from pallas_kernels._conv.gates import accumulator, check_alignment
from pallas_kernels._dispatch import Device, Implementation, choose, current_device, explain_call
from pallas_kernels._linear_state.checks import check_gates, check_heads
from pallas_kernels._ranges import Range, check_values
from pallas_kernels.neural_memory import hopper
from pallas_kernels.neural_memory.chunks import MemoryState
from pallas_kernels.neural_memory.reference import neural_memory_reference
from pallas_kernels.neural_memory.xla import neural_memory_xla

OP = "neural_memory"


def _mosaic_gpu_or_xla(*args: Any, **options: Any) -> Any:
    """Import the kernel where it runs: Pallas' GPU dialect takes over a second to import."""
    from pallas_kernels.neural_memory.mosaic_gpu_or_xla import neural_memory_mosaic_gpu_or_xla

    return neural_memory_mosaic_gpu_or_xla(*args, **options)


TABLE = (
    Implementation("mosaic_gpu_or_xla", _mosaic_gpu_or_xla, hopper.why_not, hopper.rather_not),
    Implementation("xla", neural_memory_xla),
    Implementation("reference", neural_memory_reference),
)

SHARE = Range(0, 1, "pass sigmoid(x)", per_token=True)
SQUARED = Range(
    -1e9, 1e9, "divide keys by their lengths, and bring values to a length of about 1", per_token=True
)
RANGES = {"theta": SHARE, "eta": SHARE, "alpha": SHARE, "k": SQUARED, "v": SQUARED}
"""The ranges of arguments."""


@checked
def neural_memory(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H K"],
    theta: Float[Array, "B T H"],
    eta: Float[Array, "B T H"],
    alpha: Float[Array, "B T H"],
    weights: tuple[Float[Array, "H _ _"], ...],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    segment_alignment: int = 1,
    initial_state: MemoryState | None = None,
    output_final_state: bool = False,
    output_trace: bool = False,
    chunk_size: int = 512,
    implementation: Literal["mosaic_gpu_or_xla", "xla", "reference"] | None = None,
) -> Any:
    """Read a memory that takes a step of gradient descent behind every chunk of its document.

    With f_M(x) = x + silu(x M1) M2, or x M, and chunks c of C tokens:

        y_t  = f_{M_c}(q_t)                                                  the memory before the token's chunk
        l_t  = |f_{M_c}(k_t) - v_t|^2 / 2                                    surprise
        G_c  = sum_t theta_t grad_M l_t / max(1, sum_t theta_t L_t)          L_t = |grad_M l_t|^2 / (2 l_t)
        S_{c+1} = eta_c S_c - G_c                M_{c+1} = (1 - alpha_c) M_c + S_{c+1}

    eta_c and alpha_c are means over the chunk's tokens. M and S are then scaled together, so that M is no longer than
    4 sqrt(E): the memory stays bounded for any length and for arguments in `RANGES` (see the README, Stability).

    A last chunk of fewer than C tokens and holes is read, not written; one without a token changes nothing.

    Args:
      q: queries.
      k: keys of numbers up to 1e9, whose squares fp32 can sum; none is normalised here.
      v: values, of a length of about 1; of numbers up to 1e9.
      theta: step size of each token, in 0..1.
      eta: share of the momentum that is kept, in 0..1.
      alpha: share of the memory that is forgotten, in 0..1.
      weights: M before a document: (M,) [H, K, K], or (M1, M2) [H, K, E] and [H, E, K].
      segment_ids: s > 0 a token of document s, -s a hole in it, 0 padding. Documents are contiguous: padding lies
        between them. Holes count as places of a chunk; they and padding are not read (NaN may lie there), store
        nothing, and have an output of zero.
      segment_alignment: documents start at multiples of it. At a multiple of C a window of the row is a chunk; else
        every token is read from three memories.
      initial_state: M and S before the first token, of the row's first document, at an edge between two of its chunks.
      output_final_state: return M and S behind the last whole chunk of the row's last document.
      output_trace: return a `Trace` of arrays [B, T, H].
      chunk_size: C.
      implementation: a name of the table; None takes the first that runs here.

    Returns:
      y in v's dtype; a tuple of it, the final `MemoryState` and the `Trace`, if they are asked for. Products take
      operands of v's dtype and sum in fp32; M and S are fp32 (f64 for f64).

    Raises:
      ValueError: arrays that do not fit, values out of their ranges, or an implementation that is unknown.
      TypeError: `initial_state` is no `MemoryState`.

    Source: Behrouz et al. 2024 (arXiv:2501.00663, eq. 9-14), with the chunks of Zhang et al. 2025 (arXiv:2505.23884)
    and the step sizes of Loizou et al. 2020 (arXiv:2002.10542).
    """
    _check(q, k, v, weights, segment_ids, chunk_size)
    check_alignment(OP, segment_alignment)
    per_token = {"theta": theta, "eta": eta, "alpha": alpha}
    check_gates(OP, {name: (x, v.shape[:3]) for name, x in per_token.items()})
    if initial_state is not None:
        _check_state(initial_state, weights, v)
    given = per_token | {"k": k, "v": v}
    check_values(OP, RANGES, given, segment_ids=segment_ids, alignment=segment_alignment)
    options = {
        "segment_ids": segment_ids,
        "segment_alignment": segment_alignment,
        "initial_state": initial_state,
        "output_final_state": output_final_state,
        "output_trace": output_trace,
        "chunk_size": chunk_size,
    }
    arrays = (q, k, v, theta, eta, alpha, tuple(weights))
    chosen = choose(OP, TABLE, implementation, current_device(), *arrays, **options)
    return chosen.run(*arrays, **options)


def _check(q: Any, k: Any, v: Any, weights: Any, segment_ids: Any, chunk_size: int) -> None:
    """Raise ValueError for streams, weights, ids or chunks that do not fit."""
    check_heads(OP, q, k, v)
    if v.shape != k.shape:
        raise ValueError(f"{OP}: v must have the shape of k, {k.shape}, got {v.shape}")
    if chunk_size < 1:
        raise ValueError(f"{OP}: chunk_size must be at least 1 token, got {chunk_size}")
    if segment_ids is not None:
        check_ids = segment_ids.shape == v.shape[:2] and jnp.issubdtype(segment_ids.dtype, jnp.integer)
        if not check_ids:
            raise ValueError(
                f"{OP}: segment_ids must be integers of shape {v.shape[:2]}, got {segment_ids.dtype} of "
                f"{segment_ids.shape}"
            )
    heads, width = v.shape[2:]
    shapes = tuple(m.shape for m in weights)
    hidden = shapes[0][-1] if shapes else 0
    if shapes not in (((heads, width, width),), ((heads, width, hidden), (heads, hidden, width))):
        raise ValueError(
            f"{OP}: weights must be (M,) of {(heads, width, width)}, or (M1, M2) of {(heads, width, 'E')} and "
            f"{(heads, 'E', width)}, got shapes {shapes}"
        )
    if whole := [str(m.dtype) for m in weights if not jnp.issubdtype(m.dtype, jnp.floating)]:
        raise ValueError(f"{OP}: weights must be floats, got {', '.join(whole)}: cast them")


def _check_state(state: MemoryState, weights: Any, v: Any) -> None:
    """Raise ValueError for a state of another memory, or in another dtype than memories have.

    Raises TypeError for what is no state.
    """
    if not isinstance(state, MemoryState):
        raise TypeError(
            f"{OP}: initial_state must be a MemoryState, as output_final_state=True returns it, got "
            f"{type(state).__name__}"
        )
    expected = tuple((v.shape[0], *m.shape) for m in weights)
    found = jax.tree.map(jnp.shape, tuple(state), is_leaf=lambda x: hasattr(x, "shape"))
    if found != (expected, expected):
        raise ValueError(
            f"{OP}: initial_state must hold weights and momentum of shapes {expected}, got {found}: "
            "was it made by another config?"
        )
    wide, kinds = accumulator(v.dtype), {str(x.dtype) for x in jax.tree.leaves(state)}
    if kinds != {str(jnp.dtype(wide))}:
        raise ValueError(
            f"{OP}: initial_state must be {jnp.dtype(wide)} for v of {v.dtype}, got {', '.join(sorted(kinds))}: cast it"
        )


def explain(
    q: Any,
    k: Any,
    v: Any,
    theta: Any,
    eta: Any,
    alpha: Any,
    weights: Any,
    *,
    device: Device | None = None,
    **options: Any,
) -> str:
    """Return which implementation runs for arrays or shapes on `device`, and why no faster one."""
    arrays = (q, k, v, theta, eta, alpha, weights)
    return explain_call(neural_memory, device, *arrays, **options)
