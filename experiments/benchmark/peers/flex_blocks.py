"""FlexAttention on the blocks of `sparse_attention`: python -m experiments.benchmark flex_blocks --out FILE."""

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

from experiments.benchmark.figures.saved import save
from experiments.benchmark.operations.sparse_attention import CHECKED, WITHIN, draw_blocks
from experiments.benchmark.peers.torch_calls import about, import_torch
from jaxblt.validation import number, whole
from pallas_kernels.runtime import alone

TRIALS = 20
"""Calls that are timed, after three."""


def flex_blocks(
    out: str = "runs/benchmark/flex_blocks.json",
    tokens: int = 32_768,
    heads: int = 32,
    head_dim: int = 128,
    block: int = 128,
    densities: tuple[float, ...] = (0.5, 0.25, 0.1),
) -> dict[str, Any]:
    """Take milliseconds of PyTorch's FlexAttention, forward and with gradients, in bf16.

    Blocks are those that `sparse_attention` draws. Its mask of blocks is made before the clock starts.

    Args:
      out: JSON file to write.
      tokens, heads, head_dim: of one row; keys have as many heads.
      block: tokens in a block.
      densities: of visible blocks, as shares of those of a causal mask.

    Raises:
      RuntimeError: torch or a GPU is not there, or an output differs from the written-out sum.
      ValueError: a size or a density means nothing.
    """
    for name, value in (("tokens", tokens), ("heads", heads), ("head_dim", head_dim), ("block", block)):
        whole(name, value, least=1)
    for density in densities:
        number("densities", density, above=0, most=1)
    torch = import_torch()
    figures: dict[str, Any] = about(torch) | {
        "tokens": tokens,
        "heads": heads,
        "head_dim": head_dim,
        "block": block,
        "calls": [],
    }
    torch.manual_seed(0)
    size = (1, heads, tokens, head_dim)
    q, k, v = (torch.randn(size, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    # Hand over the gradient of the output, as our side does: a sum in fp32 would be timed too
    given = torch.randn(size, device="cuda", dtype=torch.bfloat16)
    for density in densities:
        live = torch.tensor(live_blocks(density, block, tokens), device="cuda")
        call = _call(torch, live, block, tokens)
        error = _error(torch, call(q, k, v), (q, k, v), live, block)
        with alone():
            times = {
                "forward": _milliseconds(torch, lambda call=call: call(q, k, v)),
                "both": _milliseconds(
                    torch, lambda call=call: torch.autograd.grad(call(q, k, v), (q, k, v), given)
                ),
            }
        figures["calls"].append({"density": density, "error": error, "ms": times})
        save("flex_blocks", out, figures)
    return figures


def live_blocks(density: float, block: int, tokens: int) -> np.ndarray:
    """Return which blocks of keys each block of queries sees, Bool[N, N], later ones too."""
    starts = np.arange(0, tokens, block, dtype=np.int64)
    return np.asarray(draw_blocks(density, block, tokens).rule.sees(starts[:, None], starts[None, :]))


def _call(torch: Any, live: Any, block: int, tokens: int) -> Callable[..., Any]:
    from torch.nn.attention import flex_attention as flex

    def sees(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) & live[q // block, k // block]

    mask = flex.create_block_mask(sees, None, None, tokens, tokens, device="cuda", BLOCK_SIZE=block)
    compiled = torch.compile(flex.flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask)


def _error(torch: Any, got: Any, given: tuple[Any, ...], live: Any, block: int) -> float:
    """Return the relative error of the first tokens' output, in norm."""
    count = min(CHECKED, got.shape[2])
    q, k, v = (x[:, :, :count].detach().double() for x in given)
    places = torch.arange(count, device="cuda")
    seen = (places[:, None] >= places) & live[places[:, None] // block, places // block]
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf)
    right = scores.softmax(-1) @ v
    error = float((got[:, :, :count].double() - right).norm() / right.norm())
    if not error <= WITHIN:
        raise RuntimeError(
            f"FlexAttention is off the written-out sum by {error:.2e}, {WITHIN:.2e} is allowed"
        )
    return error


def _milliseconds(torch: Any, call: Callable[[], Any]) -> float:
    taken = []
    for _ in range(TRIALS + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end))
    return statistics.median(taken[3:])
