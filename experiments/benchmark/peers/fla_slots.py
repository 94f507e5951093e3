"""flash-linear-attention's gated slot attention beside ours; needs torch, fla-core and a GPU.

    python -m experiments.benchmark fla_slots --out FILE

Both write keys and values to slots and read them by a softmax over scores: `chunk_gsa` there, two calls of
`gated_linear_attention` here. Forward only: with Triton 3.4 to 3.7 the peer refuses its gradients on Hopper.
"""

from typing import Any

import numpy as np

from experiments.benchmark.figures.saved import save, timed
from experiments.benchmark.peers.torch_calls import about, import_torch, milliseconds, named
from pallas_kernels.gated_linear_attention.shapes import SHAPES, LinearAttentionShape

WITHIN = 2.0**-6
"""Relative difference, in norm, of two bf16 results that pass."""


def fla_slots(out: str = "runs/benchmark/fla_slots.json", shape: str = "gsa_1b_write_8k") -> dict[str, Any]:
    """Time the peer's forward pass and ours, after their results were compared.

    Args:
      out: JSON file to write.
      shape: of the call that writes to slots, a name of `pallas_kernels.gated_linear_attention`; values are as wide
        as keys.
    """
    (chosen,) = named((shape,), (s for s in SHAPES if s.gate == "value"))
    torch = import_torch()
    arrays = streams(chosen)
    error = difference(torch, _peer(), arrays, "cuda")
    if not error <= WITHIN:
        raise RuntimeError(f"fla's slots are {error} from ours, expected at most {WITHIN}")
    figures: dict[str, Any] = {
        **about(torch),
        "shape": shape,
        "error": error,
        "fla_ms": peer_milliseconds(torch, _peer(), arrays),
        "ours": ours_seconds(arrays),
    }
    save("fla_slots", out, figures)
    return figures


def _peer() -> Any:
    try:
        from fla.ops.gsa import chunk_gsa
    except ImportError as error:
        raise RuntimeError("the peer needs flash-linear-attention: pip install fla-core") from error
    return chunk_gsa


def streams(shape: LinearAttentionShape) -> tuple[np.ndarray, ...]:
    """Draw q, k, v [B, T, H, K] and the gates' logarithms [B, T, H, S] in fp32, which keep 1/16 to nearly all."""
    draw = np.random.default_rng(0)
    full = (shape.batch, shape.length, shape.heads)
    q, k, v = (draw.standard_normal((*full, shape.keys), np.float32) for _ in range(3))
    return q, k, v, np.log(draw.uniform(1 / 16, 1.0, (*full, shape.values)).astype(np.float32))


def apply_peer(torch: Any, peer: Any, q: Any, k: Any, v: Any, log_gate: Any) -> Any:
    """Return what the peer's tokens read, [B, T, H, K]; what is written is 1 - exp(log_gate), as ours."""
    written = (-torch.expm1(log_gate)).to(q.dtype)
    return peer(q, k, v, written, log_gate)[0]


def ours(q: Any, k: Any, v: Any, log_gate: Any) -> Any:
    """Return what our tokens read, [B, T, H, K]."""
    import jax.numpy as jnp

    from jaxblt.mixers.slots.state_slots import SlotStreams, write_and_read

    bias = jnp.zeros(log_gate.shape[2:], jnp.float32)
    return write_and_read(SlotStreams(q, k, v, log_gate), bias, None, None, chunk_size=64)[0][0]


def difference(torch: Any, peer: Any, arrays: tuple[np.ndarray, ...], device: str) -> float:
    """Return relative difference of the two results on the first row, streams in bf16."""
    some = [x[:1] for x in arrays]
    with torch.no_grad():
        theirs = apply_peer(torch, peer, *_torch_streams(torch, some, device)).float().cpu().numpy()
    own = np.asarray(ours(*_jax_streams(some)), np.float32)
    return float(np.linalg.norm(theirs - own) / np.linalg.norm(own))


def _torch_streams(torch: Any, arrays: Any, device: str) -> list[Any]:
    *given, gate = (torch.as_tensor(x, device=device) for x in arrays)
    return [*(x.to(torch.bfloat16) for x in given), gate]


def _jax_streams(arrays: Any) -> list[Any]:
    import jax.numpy as jnp

    *given, gate = (jnp.asarray(x) for x in arrays)
    return [*(x.astype(jnp.bfloat16) for x in given), gate]


def peer_milliseconds(torch: Any, peer: Any, arrays: tuple[np.ndarray, ...]) -> float:
    """Time the peer's forward pass."""
    given = _torch_streams(torch, arrays, "cuda")

    def forward() -> None:
        with torch.no_grad():
            apply_peer(torch, peer, *given)

    return milliseconds(torch, forward)


def ours_seconds(arrays: tuple[np.ndarray, ...]) -> dict[str, Any]:
    """Time our forward pass, both calls and the softmax between them."""
    from jaxblt.profiling import measure

    return timed(measure(ours, *_jax_streams(arrays)))
