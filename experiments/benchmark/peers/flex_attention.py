"""PyTorch's FlexAttention between bytes and patches, a peer of `patch_attention`; needs torch and a GPU.

    python -m experiments.benchmark flex_attention --out FILE

All blocks are one row, so that the mask is what FlexAttention is for: ragged, and known beforehand. Its block mask is
built before anything is timed, and the bias of `lookup` gets no gradient; both favour it. Before a direction is timed
its output on the first block is compared with dense attention in fp32. Where it fits, the same call with a dense mask
through `scaled_dot_product_attention` is timed as well.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any, Literal, NamedTuple

import numpy as np

from experiments.benchmark.figures.saved import save
from experiments.benchmark.peers.torch_calls import about, import_torch, milliseconds, named
from pallas_kernels.patch_attention.bench import filled_slots, latest_seen, patch_ids
from pallas_kernels.patch_attention.shapes import SHAPES, PatchShape

WITHIN = 2.0**-7
"""Relative error, in norm, of a bf16 result that passes."""

OPTIONS: tuple[dict[str, int], ...] = (
    {},
    {"num_stages": 2},
    {"num_stages": 1},
    {"num_stages": 1, "BLOCK_M": 64, "BLOCK_N": 64},
)
"""The options of its kernels, from what it chooses by itself; the first that fits in shared memory is timed."""


class View(NamedTuple):
    """Query r sees the keys low_r <= s < high_r with valid_s; the key at high_r - 1 - i is i patches back."""

    low: np.ndarray
    high: np.ndarray
    valid: np.ndarray


def flex_attention(
    out: str = "runs/benchmark/flex_attention.json",
    shapes: tuple[str, ...] = ("blt_1b_64k", "blt_8b_64k"),
    directions: tuple[Literal["pool", "lookup"], ...] = ("pool", "lookup"),
) -> dict[str, Any]:
    """Time FlexAttention, forward and with the gradients of q, k and v.

    Args:
      out: JSON file to write.
      shapes: names of shapes of `pallas_kernels.patch_attention`.
      directions: patches over bytes, bytes over patches, or both.
    """
    chosen = named(shapes, SHAPES)
    torch = import_torch()
    import_module("torch.nn.attention.flex_attention")  # torch does not load it by itself
    figures: dict[str, Any] = {**about(torch), "calls": {}}
    for shape in chosen:
        for direction in directions:
            figures["calls"][f"{direction}_{shape.name}"] = measure(torch, direction, shape)
            torch.cuda.empty_cache()
            save("flex_attention", out, figures)
    return figures


def view(direction: Literal["pool", "lookup"], shape: PatchShape) -> View:
    """Return who sees whom where all rows and blocks stand one after the other."""
    ids = patch_ids(shape).reshape(-1, shape.block_size)
    blocks = np.arange(len(ids))[:, None]
    if direction == "pool":
        wanted = np.arange(shape.capacity)
        low, high = (
            np.stack([np.searchsorted(row, wanted, side) for row in ids]) for side in ("left", "right")
        )
        first = shape.block_size * blocks
        return View((low + first).reshape(-1), (high + first).reshape(-1), np.ones(ids.size, bool))
    latest = latest_seen(shape, ids)
    first = (shape.look_back + shape.capacity) * blocks
    low = np.maximum(latest + 1 - shape.look_back, 0)
    return View(
        (low + first).reshape(-1), (latest + 1 + first).reshape(-1), filled_slots(shape, ids).reshape(-1)
    )


def measure(torch: Any, direction: Literal["pool", "lookup"], shape: PatchShape) -> dict[str, Any]:
    """Time one direction at one shape, and return how much of the scores its blocks skip, too."""
    seen = View(*(torch.as_tensor(x, device="cuda") for x in view(direction, shape)))
    queries, keys = len(seen.low), len(seen.valid)
    torch.manual_seed(0)
    q, k, v, do = (
        torch.randn(1, shape.heads, n, shape.head_dim, device="cuda", dtype=torch.bfloat16)
        for n in (queries, keys, keys, queries)
    )
    bias = None if direction == "pool" else torch.randn(shape.heads, shape.look_back, device="cuda")
    blocks = block_mask(torch, seen)
    found: dict[str, Any] = {"skipped_percent": float(blocks.sparsity())}
    for options in OPTIONS:
        attend = flex(torch, seen, bias, blocks, options)
        try:
            found["error"] = first_block_error(torch, attend, (q, k, v), seen, bias, shape)
            if not found["error"] <= WITHIN:
                raise RuntimeError(f"FlexAttention's {direction} is {found['error']} from dense attention")
            found |= {"options": options, "flex_ms": passes(torch, attend, q, k, v, do)}
            break
        except RuntimeError as problem:
            if "out of resource" not in str(problem):
                raise
            found["flex_ms"] = f"not timed: {str(problem).splitlines()[0]}"
    return found | {"dense_ms": dense(torch, seen, bias, q, k, v, do)}


def block_mask(torch: Any, seen: View) -> Any:
    """Return which blocks of scores hold something visible, and what is visible in them."""
    low, high, valid = seen

    def mask(b: Any, h: Any, row: Any, key: Any) -> Any:
        return (key >= low[row]) & (key < high[row]) & valid[key]

    make = torch.nn.attention.flex_attention.create_block_mask
    return make(mask, None, None, len(low), len(valid), device="cuda")


def flex(torch: Any, seen: View, bias: Any, blocks: Any, options: dict[str, int]) -> Callable[..., Any]:
    """Return FlexAttention with this mask and bias, compiled."""
    high = seen.high

    def add_bias(score: Any, b: Any, h: Any, row: Any, key: Any) -> Any:
        return score + bias[h, (high[row] - 1 - key).clamp(0, bias.shape[1] - 1)]

    torch._dynamo.reset()  # Or the masks of earlier calls count towards its limit of compilations.
    compiled = torch.compile(torch.nn.attention.flex_attention.flex_attention, dynamic=False)
    change = None if bias is None else add_bias

    def attend(q: Any, k: Any, v: Any) -> Any:
        return compiled(q, k, v, score_mod=change, block_mask=blocks, kernel_options=options)

    return attend


def dense_mask(torch: Any, seen: View, bias: Any) -> Any:
    """Return what is added to the scores, in fp32: the bias, and minus infinity where nothing is seen."""
    key = torch.arange(len(seen.valid), device=seen.valid.device)
    visible = (key >= seen.low[:, None]) & (key < seen.high[:, None]) & seen.valid
    if bias is None:
        return torch.zeros(visible.shape, device=key.device).masked_fill_(~visible, -torch.inf)[None]
    back = (seen.high[:, None] - 1 - key).clamp(0, bias.shape[1] - 1)
    return bias[:, back].masked_fill_(~visible, -torch.inf)


def first_block_error(
    torch: Any, attend: Any, arrays: tuple[Any, ...], seen: View, bias: Any, shape: PatchShape
) -> float:
    """Return relative error of the first block's queries, which see only the keys of the first block."""
    blocks = shape.batch * shape.blocks
    rows, keys = len(seen.low) // blocks, len(seen.valid) // blocks
    q, k, v = (x[0].float() for x in arrays)
    block = View(seen.low[:rows], seen.high[:rows], seen.valid[:keys])
    scores = q[:, :rows] @ k[:, :keys].mT * shape.head_dim**-0.5 + dense_mask(torch, block, bias)
    # Give 0 for a query that sees nothing.
    truth = torch.softmax(scores, -1).nan_to_num_() @ v[:, :keys]
    with torch.no_grad():
        found = attend(*arrays)[0, :, :rows].float()
    return float((found - truth).norm() / truth.norm())


def dense(torch: Any, seen: View, bias: Any, q: Any, k: Any, v: Any, do: Any) -> dict[str, float] | str:
    """Return the passes of a dense mask, or why there are none."""
    try:
        mask = dense_mask(torch, seen, bias).to(q.dtype)[None]
        attend = torch.nn.functional.scaled_dot_product_attention
        return passes(torch, lambda q, k, v: attend(q, k, v, attn_mask=mask), q, k, v, do)
    except torch.OutOfMemoryError as error:
        return f"not timed: {str(error).splitlines()[0]}"


def passes(torch: Any, attend: Any, q: Any, k: Any, v: Any, do: Any) -> dict[str, float]:
    """Return median milliseconds of only the output, and of the output and the gradients of q, k and v."""
    given = [x.detach().requires_grad_() for x in (q, k, v)]

    def forward() -> None:
        with torch.no_grad():
            attend(q, k, v)

    def both() -> None:
        torch.autograd.grad(attend(*given), given, do)

    return {"forward": milliseconds(torch, forward), "forward+backward": milliseconds(torch, both)}
