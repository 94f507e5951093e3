"""Bytes a second that an entropy model cuts into patches: python -m experiments.benchmark entropy --out FILE.

1. The gate: boundaries of the program against a loop over bytes that takes entropies of the same logits in f64.
2. Device seconds of ids -> patches in one program, against the floor of its matmuls in the same run.
"""

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from jaxblt.models import ByteLMConfig
    from jaxblt.patching import PatcherConfig
    from jaxblt.profiling import Ceilings

SAMPLE_BYTES = 2**16
"""Bytes on which threshold and capacity are found."""


def entropy(
    out: str,
    shapes: tuple[str, ...] = ("64x8192", "1x1048576", "1x4096"),
    layers: int = 14,
    dim: int = 768,
    heads: int = 12,
    window: int = 512,
    bytes_per_patch: float = 4.5,
    block_size: int = 4096,
    trials: int = 20,
) -> dict[str, Any]:
    """Check and time entropies and boundaries of random bytes, with untrained parameters in bf16.

    Args:
      out: file for the figures as JSON.
      shapes: rows x bytes of each program.
      layers: of the byte Transformer; the defaults are those of the published one (2412.09871).
      dim: its width.
      heads: of attention.
      window: bytes that a byte sees.
      bytes_per_patch: that the threshold is set for.
      block_size: bytes in a block of patches.
      trials: timed calls, at least 20.

    Raises:
      RuntimeError: a boundary differs from that of the loop where rounding cannot decide it.
    """
    from experiments.benchmark.figures.saved import save
    from jaxblt.patching import PatcherConfig
    from jaxblt.profiling import measure_ceilings

    sizes = [parse_shape(shape) for shape in shapes]
    config = model_config(layers, dim, heads, window)
    params = parameters(config)
    patcher = calibrate(config, params, PatcherConfig(block_size=block_size), bytes_per_patch)
    ceilings = measure_ceilings()
    figures: dict[str, Any] = {"ceilings": asdict(ceilings), "patcher": asdict(patcher), "shapes": []}
    for rows, length in sizes:
        ids = random_bytes(rows, length)
        checked = gate(config, params, patcher, ids)
        figures["shapes"].append(cut(config, params, patcher, ids, ceilings, trials) | checked)
        save("entropy", out, figures)
    return figures


def parse_shape(text: str) -> tuple[int, int]:
    """Return "64x8192" as (64, 8192).

    Raises:
      ValueError: it is not two positive numbers.
    """
    rows, _, length = text.partition("x")
    if not (rows.isdigit() and length.isdigit() and int(rows) and int(length)):
        raise ValueError(f"shape {text!r} is not ROWSxBYTES, such as 64x8192")
    return int(rows), int(length)


def model_config(layers: int, dim: int, heads: int, window: int) -> "ByteLMConfig":
    """Return a byte Transformer with sliding windows, not scanned: then bf16 parameters are read as they are."""
    from jaxblt.mixers import AttentionConfig
    from jaxblt.models import ByteLMConfig, StackConfig

    attention = AttentionConfig(dim=dim, num_heads=heads, window=window, packed=False)
    stack = StackConfig(dim=dim, num_layers=layers, pattern="W", mixers={"W": attention}, scan=False)
    return ByteLMConfig(stack=stack, tie_head=False)


def parameters(config: "ByteLMConfig") -> Any:
    """Draw untrained parameters in bf16."""
    import jax.numpy as jnp

    from experiments.benchmark.models.forward_pass import draw
    from jaxblt.models.stack import unstack_periods

    scanned = replace(config, stack=replace(config.stack, scan=True))
    params = draw(scanned.build(), jnp.zeros((1, 16), jnp.int32))
    return params | {"stack": unstack_periods(params["stack"])}


def random_bytes(rows: int, length: int) -> Any:
    """Draw ids of uniform bytes."""
    import jax

    from jaxblt.data.vocab import OFFSET, VOCAB_SIZE

    return jax.random.randint(jax.random.key(rows * length), (rows, length), OFFSET, VOCAB_SIZE, "int32")


def entropies(config: "ByteLMConfig", params: Any, ids: Any) -> Any:
    """Return H_t in nats, the model in bf16."""
    import jax.numpy as jnp

    from jaxblt.patching import byte_entropies
    from jaxblt.training.step import entropy_apply

    return byte_entropies(entropy_apply(config.build(dtype=jnp.bfloat16)), params, ids)


def calibrate(
    config: "ByteLMConfig", params: Any, patcher: "PatcherConfig", bytes_per_patch: float
) -> "PatcherConfig":
    """Return the patcher with a threshold for that mean patch, and slots that nearly all blocks can do with."""
    import jax

    from jaxblt.patching import calibrate_capacity, calibrate_threshold, make_patches, patches_per_block

    ids = random_bytes(SAMPLE_BYTES // patcher.block_size, patcher.block_size)
    found = jax.jit(lambda params, ids: entropies(config, params, ids))(params, ids)
    patcher = replace(patcher, threshold=calibrate_threshold(found, bytes_per_patch, config=patcher))
    patches = jax.jit(lambda ids, found: make_patches(patcher, ids, entropies=found))(ids, found)
    counts = patches_per_block(patches)
    return replace(patcher, capacity=calibrate_capacity(counts, block_size=patcher.block_size))


def cut(
    config: "ByteLMConfig",
    params: Any,
    patcher: "PatcherConfig",
    ids: Any,
    ceilings: "Ceilings",
    trials: int,
) -> dict[str, Any]:
    """Time ids -> patches, and return bytes a second and the share of the floor, too."""
    from experiments.benchmark.models.forward_pass import timed
    from jaxblt.patching import make_patches

    def program(params: Any, ids: Any) -> Any:
        return make_patches(patcher, ids, entropies=entropies(config, params, ids))

    flops = ids.size * flops_per_byte(config, params, ids.shape[1])
    found = timed(program, params, ids, flops=flops, ceilings=ceilings, trials=trials)
    rate = ids.size / found["seconds"]["median"]
    return {"rows": ids.shape[0], "bytes": ids.shape[1], "bytes_per_second": rate, **found}


def flops_per_byte(config: "ByteLMConfig", params: Any, length: int) -> float:
    """Count 2 a matrix entry, and 4 a channel for each key that a byte sees: min(t + 1, window) at offset t."""
    from experiments.benchmark.models.forward_pass import kernel_sizes

    stack = config.stack
    seen = np.minimum(np.arange(length) + 1, stack.mixers["W"].window).mean()
    return 2.0 * kernel_sizes(params) + 4.0 * float(seen) * stack.dim * stack.num_layers


def gate(config: "ByteLMConfig", params: Any, patcher: "PatcherConfig", ids: Any) -> dict[str, Any]:
    """Compare the program's boundaries with those of a loop over its own logits, entropies in f64.

    `undecided` bytes are as near to the threshold as the rounding of fp32 reaches; a flip there changes how many slots
    the rest of its block has.

    Raises:
      RuntimeError: a boundary differs, and neither its byte nor one before it in its block is such a flip.
    """
    import jax
    import jax.numpy as jnp

    from jaxblt.patching import make_patches
    from jaxblt.patching.entropy import entropies_from_logits
    from jaxblt.testing.tolerances import bound
    from jaxblt.training.step import entropy_apply

    apply = entropy_apply(config.build(dtype=jnp.bfloat16))

    def program(params: Any, ids: Any) -> Any:
        logits, _ = apply(params, ids)
        return logits, make_patches(patcher, ids, entropies=entropies_from_logits(logits)).closed

    logits, closed = jax.jit(program)(params, ids)
    exact = np.stack([exact_entropies(row) for row in logits])
    expected = np.stack([loop_over_bytes(patcher, row) for row in exact])
    closed = np.asarray(closed).reshape(ids.shape[0], -1)[:, : ids.shape[1]]
    rounding = bound(jnp.float32, n=config.vocab_size) * exact
    undecided = np.abs(exact - patcher.known_threshold()) <= rounding
    differs = closed != expected
    flipped = np.maximum.accumulate(blocks(differs & undecided, patcher.block_size), -1)
    if wrong := int(np.sum(blocks(differs, patcher.block_size) & ~flipped)):
        raise RuntimeError(f"{wrong} of {ids.size} boundaries differ from the loop's, with the same logits")
    return {
        "boundaries": int(closed.sum()),
        "different_boundaries": int(differs.sum()),
        "undecided": int(undecided.sum()),
    }


def exact_entropies(logits: Any) -> np.ndarray:
    """Return H in nats of each row of logits [T, V], in f64, a stretch at a time."""
    found = []
    for start in range(0, len(logits), SAMPLE_BYTES):
        part = np.asarray(logits[start : start + SAMPLE_BYTES]).astype(np.float64)
        part -= part.max(-1, keepdims=True)
        weight = np.exp(part)
        total = weight.sum(-1)
        found.append(np.log(total) - (weight * part).sum(-1) / total)
    return np.concatenate(found)


def loop_over_bytes(patcher: "PatcherConfig", nats: np.ndarray) -> np.ndarray:
    """Return where mode entropy ends patches of one document, byte by byte; boundaries without a slot are refused."""
    threshold, last = patcher.known_threshold(), patcher.block_size - 1
    closed, used = np.zeros(len(nats), bool), 0
    for t, value in enumerate(nats.tolist()):
        offset = t % patcher.block_size
        used = 1 if offset == 0 else used
        ends = t == 0 or value > threshold
        closed[t] = offset == last or (ends and used < patcher.slots)
        used += ends and offset != last
    return closed


def blocks(x: np.ndarray, size: int) -> np.ndarray:
    """Return [B, T] as [B, blocks, size], the last filled up with zeros."""
    x = np.pad(x, ((0, 0), (0, -x.shape[1] % size)))
    return x.reshape(len(x), -1, size)
