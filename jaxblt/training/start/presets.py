"""Settings by type of GPU that change how a step is computed: dtype, precision, scan, remat and micro-batches.

What a step learns from stays the recipe's: its rows, its optimiser, its seed. All that a preset sets may be overridden.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxblt.adapters.update.attach import stacks_of
from jaxblt.models.remat import Remat
from jaxblt.training.packing import HEADROOM
from jaxblt.training.recipe import Recipe
from jaxblt.training.start.compile_ahead import with_stacks
from jaxblt.training.start.setup import boxed_params, make_task

FILL = 0.85
"""Share of the memory that an estimate may take."""
LONGEST_UNROLLED = 48
"""Blocks up to which a stack is unrolled; more take minutes to compile."""
BYTES: Mapping[Remat, float] = {"none": 30.0, "dots": 23.0, "full": 4.0}
"""Bytes kept a token, block and channel, by remat from the cheapest on: a byte Transformer's in plans for an H200.

Without remat a BLT-Hyena keeps 34, for which `FILL` leaves room.
"""


@dataclass(frozen=True)
class Preset:
    """A type of GPU.

    Attributes:
      kind: a word in what JAX calls it.
      memory_gb: of it, in 10^9 bytes.
      fp8: whether it multiplies in FP8.
    """

    kind: str
    memory_gb: float
    fp8: bool


PRESETS = {
    "h200": Preset("H200", 141.0, fp8=True),
    "h100": Preset("H100", 80.0, fp8=True),
    "a100": Preset("A100", 80.0, fp8=False),
    "a100_40": Preset("A100", 40.0, fp8=False),
}


def detect(device_kind: str, memory: float | None) -> str:
    """Return the name of the preset for a device, by what JAX calls it and its bytes of memory, where they are known.

    Raises:
      ValueError: there is none for it.
    """
    # An A100 of 40 GB calls itself by the same word as one of 80
    known = [name for name, preset in PRESETS.items() if preset.kind in device_kind]
    if not known:
        raise ValueError(
            f"no preset for device {device_kind!r}: name one of {', '.join(PRESETS)}, or leave --preset out"
        )
    fitting = [name for name in known if memory is None or PRESETS[name].memory_gb * 0.6e9 <= memory]
    return fitting[0] if fitting else known[-1]


def with_preset(recipe: Recipe, name: str) -> tuple[Recipe, str]:
    """Return the recipe as a type of GPU computes it best, and a line that says what was set.

    Stacks are unrolled, unless they have more than `LONGEST_UNROLLED` blocks. Remat is the cheapest that holds the
    batch, in as few micro-batches as that takes, by an estimate of 16 bytes a parameter and `BYTES`. `jaxblt plan`
    compiles the step and knows better.

    Raises:
      ValueError: there is no such preset, or no setting holds the batch.
    """
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}, choose one of: {', '.join(PRESETS)}, auto")
    preset, train = PRESETS[name], recipe.train
    precision = train.precision if preset.fp8 else "dtype"
    fp8 = train.fp8 if preset.fp8 else type(train.fp8)()
    train = replace(
        train, dtype="bfloat16", precision=precision, fp8=fp8, loss_scale=type(train.loss_scale)()
    )
    recipe = replace(recipe, train=train, model=with_stacks(recipe.model, _unrolled))
    remat, parts, size = cheapest(recipe, FILL * preset.memory_gb * 1e9)
    model = with_stacks(recipe.model, lambda stack: replace(stack, remat=remat))
    looped = [name for name, stack in stacks_of(model).items() if stack.scan]
    told = f"blocks {'unrolled' if not looped else f'of {", ".join(looped)} in a loop'}, remat {remat}"
    told += f", accumulate {parts}, precision {precision}"
    told += f", about {size / 1e9:.0f} GB of {preset.memory_gb:g}"
    return replace(
        recipe, model=model, train=replace(train, accumulate=parts)
    ), f"preset {name}: bfloat16, {told}"


def _unrolled(stack: Any) -> Any:
    return replace(stack, scan=stack.scan and stack.num_layers > LONGEST_UNROLLED)


def cheapest(recipe: Recipe, memory: float) -> tuple[Remat, int, float]:
    """Return remat and micro-batches that hold a batch in so many bytes a device, and the bytes that they take.

    A policy comes before the next one with any number of micro-batches that leaves each device 8,192 bytes of text, as
    smaller ones leave a GPU idle.

    Raises:
      ValueError: none does.
    """
    mesh, rows = recipe.mesh, recipe.data.batch_size
    group = max(mesh.data, 1) * max(mesh.fsdp, 1)
    fixed, each = estimate(recipe)
    for least in (8192 * max(mesh.seq, 1), 0):
        for remat, size in BYTES.items():
            for parts in (n for n in range(1, rows // group + 1) if rows % (n * group) == 0):
                held = rows // (parts * group) * recipe.data.seq_len
                total = fixed * (1.25 if parts > 1 else 1) + each * size * held / max(mesh.seq, 1)
                if total <= memory and (parts == 1 or held >= least):
                    return remat, parts, total
    raise ValueError(
        f"no preset holds {group} rows of {recipe.data.seq_len} bytes in {memory / 1e9:g} GB: split over more devices "
        "(--mesh fsdp=2), or shorten data.seq_len"
    )


def estimate(recipe: Recipe) -> tuple[float, float]:
    """Return bytes of parameters, moments and gradients on a device, and blocks times channels a byte of text."""
    task = make_task(recipe)
    shapes: Any = boxed_params(task, recipe)
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
    share = max(recipe.mesh.fsdp, 1) * max(recipe.mesh.tensor, 1)
    patches = getattr(task.model, "patch_stacks", ())
    stacks = getattr(task.model, "stacks", {})
    width = sum(
        stack.num_layers * stack.dim * (_slots(recipe) if name in patches else 1)
        for name, stack in stacks.items()
    )
    return 16.0 * count / share, float(width)


def _slots(recipe: Recipe) -> float:
    """Return slots of patches a byte."""
    patcher = recipe.patcher
    assert patcher is not None
    if patcher.capacity is not None:
        return patcher.capacity / patcher.block_size
    if recipe.bytes_per_patch is not None:
        return HEADROOM / recipe.bytes_per_patch
    return patcher.slots / patcher.block_size
