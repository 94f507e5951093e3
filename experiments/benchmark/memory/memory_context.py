"""Memory against context: python -m experiments.benchmark memory_context --out FILE.

Two things are counted for each model and length. One is the exact bytes of the state that streaming carries, from its
shapes. The other is the bytes of a train step on one row, as the compiler lays out its buffers. Nothing runs. The
compiler is that of a GPU that need not be here (start in the environment of `make plan`, with JAX_PLATFORMS=cpu), or
with `--gpu None` that of this process's own device.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from jaxblt.models import ByteLMConfig
    from jaxblt.training import Recipe

Name = Literal["attention", "window", "mag", "mal", "mac", "slots"]
LENGTHS = tuple(2048 * 2**i for i in range(10))
SMALLER, AT = 128, 1_048_576
"""The factor by which a state of constant size must be smaller than the KV cache, and the length from which on."""


def memory_context(
    out: str,
    models: tuple[Name, ...] = ("attention", "window", "mag", "slots"),
    lengths: tuple[int, ...] = LENGTHS,
    train_lengths: tuple[int, ...] = (2048, 16_384, 131_072, 1_048_576),
    dim: int = 1024,
    num_layers: int = 4,
    window: int = 512,
    chunk_size: int = 512,
    gpu: str | None = "h200",
) -> dict[str, Any]:
    """Count bytes of streaming and of training by length, with fitted exponents, for attention and memories.

    A step is AdamW's, in bf16, of one row, with full remat. Its exponent is fitted to what each step in length adds:
    parameters and optimiser, which no length changes, would make that of the totals smaller.

    Args:
      out: JSON file, written anew after each model.
      models: attention to all, over a window, a neural memory gated with a window (mag), in turns with it (mal), as
        context of segments (mac), and a bank of slots in turns with a window.
      lengths: bytes of a document that is streamed, rising.
      train_lengths: bytes of a row in training, each the same multiple of the one before; none to compile nothing.
      dim: width; heads have 64.
      num_layers: blocks.
      window: steps that attention sees.
      chunk_size: bytes from update to update of a neural memory.
      gpu: the type to compile for; None for this process's device.

    Raises:
      ValueError: lengths do not rise as said, or attention is not among the models.
      RuntimeError: a state of constant size is not smaller than the KV cache as it should be (see `check_smaller`).
    """
    from experiments.benchmark.figures.saved import save

    check_lengths(models, lengths, train_lengths)
    shape = {"dim": dim, "num_layers": num_layers, "window": window, "chunk_size": chunk_size}
    configs = {name: model(name, **shape) for name in models}
    figures: dict[str, Any] = {**shape, "rows": 1, "dtype": "bfloat16"}
    figures["lengths"], figures["train_lengths"] = list(lengths), list(train_lengths)
    figures["models"] = {name: {"state": of_states(config, lengths)} for name, config in configs.items()}
    figures["smaller"] = smaller(figures)
    check_smaller(figures)
    save("memory_context", out, figures)
    if not train_lengths:
        return figures
    device = target(gpu)
    figures["compiled_for"] = {
        "platform": device.platform,
        "kind": device.device_kind,
        "here": gpu is None,
        "ran": False,
    }
    for name, config in configs.items():
        figures["models"][name]["training"] = of_steps(config, train_lengths, device)
        save("memory_context", out, figures)
    return figures


def check_lengths(models: Sequence[str], lengths: Sequence[int], train_lengths: Sequence[int]) -> None:
    """Raise ValueError for lengths to which nothing can be fitted, or without attention to compare with."""
    if len(lengths) < 2 or list(lengths) != sorted(set(lengths)) or lengths[0] < 1:
        raise ValueError(f"--lengths must rise, two or more, got {lengths}")
    ratios = {b / a for a, b in pairwise(train_lengths)}
    if train_lengths and (len(ratios) != 1 or min(ratios) <= 1):
        raise ValueError(
            f"--train-lengths must each be the same multiple of the one before, two or more, got {train_lengths}"
        )
    if "attention" not in models:
        raise ValueError(f"--models must name attention, with which the others are compared, got {models}")


def model(name: Name, dim: int, num_layers: int, window: int, chunk_size: int) -> "ByteLMConfig":
    """Return the config of a byte language model of that name."""
    from jaxblt.mixers import AttentionConfig
    from jaxblt.models import ByteLMConfig, StackConfig, titan
    from jaxblt.models.titan import HEAD_DIM

    if name not in ("attention", "window"):
        chunk = None if name == "slots" else chunk_size
        return titan(name, dim=dim, num_layers=num_layers, window=window, chunk_size=chunk)
    mixer = AttentionConfig(dim, max(dim // HEAD_DIM, 1), window=window if name == "window" else None)
    return ByteLMConfig(StackConfig(dim=dim, num_layers=num_layers, pattern="A", mixers={"A": mixer}))


def of_states(config: "ByteLMConfig", lengths: Sequence[int]) -> dict[str, Any]:
    """Return bytes of one row's state by length, and the exponent of length that they follow."""
    from experiments.benchmark.figures.exponents import exponent

    sizes = [state_bytes(config, length) for length in lengths]
    return {"bytes": sizes, "exponent": exponent(lengths, sizes, first=lengths[0])}


def state_bytes(config: "ByteLMConfig", length: int) -> int:
    """Return bytes of the state in which one row of a document of that length is streamed; nothing is made."""
    import jax
    import jax.numpy as jnp

    module = config.build(dtype=jnp.bfloat16)
    shapes = jax.eval_shape(lambda: module.init_state(1, num_bytes=length))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def of_steps(config: "ByteLMConfig", lengths: Sequence[int], device: Any) -> dict[str, Any]:
    """Return bytes of a train step by length, what each length adds, and the exponent that this follows.

    With m(L) = a + b L^p and lengths that grow by a factor r, m(r L) - m(L) = b (r^p - 1) L^p: the constant a is gone.
    """
    from experiments.benchmark.figures.exponents import exponent

    steps = [step_bytes(config, length, device) for length in lengths]
    totals = [step["total"] for step in steps]
    added = [after - before for before, after in pairwise(totals)]
    return {
        "bytes": totals,
        "parts": steps,
        "added": added,
        "exponent_of_added": exponent(lengths[:-1], added, first=lengths[0]),
        "bytes_per_token": added[-1] / (lengths[-1] - lengths[-2]),
    }


def step_bytes(config: "ByteLMConfig", length: int, device: Any) -> dict[str, int]:
    """Return what the compiler of that device plans for a train step on one row."""
    from jaxblt.parallel.mesh import MeshConfig
    from jaxblt.training.start.compile_ahead import plan_step

    planned = plan_step(step_recipe(config, length, "bfloat16"), MeshConfig(data=1).build([device]))
    arguments = sum(planned.arguments.values())
    parts = {"arguments": arguments, "temporaries": planned.temporaries, "results": planned.results}
    return parts | {"total": planned.total}


def step_recipe(config: "ByteLMConfig", length: int, dtype: Literal["bfloat16", "float32"]) -> "Recipe":
    """Return a recipe of one row with full remat."""
    from jaxblt.data import DataConfig
    from jaxblt.training import Recipe, TrainConfig
    from jaxblt.training.start.compile_ahead import with_remat

    return Recipe(
        name="memory_context",
        model=with_remat(config, "full"),
        data=DataConfig(sample="book", seq_len=length, batch_size=1),
        train=TrainConfig(dtype=dtype),
    )


def target(gpu: str | None) -> Any:
    """Return the device to compile for."""
    import jax

    from jaxblt.profiling.targets import devices_of

    return jax.local_devices()[0] if gpu is None else devices_of(gpu, 1)[0]


def smaller(figures: dict[str, Any]) -> dict[str, list[float]]:
    """Return how many times larger than each model's state attention's is, by length."""
    cache = figures["models"]["attention"]["state"]["bytes"]
    return {
        name: [whole / own for whole, own in zip(cache, found["state"]["bytes"], strict=True)]
        for name, found in figures["models"].items()
        if name != "attention"
    }


def check_smaller(figures: dict[str, Any]) -> None:
    """Raise RuntimeError if a state grows beyond its window, or is less than `SMALLER` times smaller from `AT` on."""
    for name, ratios in figures["smaller"].items():
        sizes = figures["models"][name]["state"]["bytes"]
        settled = [
            size
            for length, size in zip(figures["lengths"], sizes, strict=True)
            if length >= figures["window"]
        ]
        if len(set(settled)) > 1:
            raise RuntimeError(
                f"the state of {name} is to be of constant size, got {settled} bytes by length"
            )
        for length, ratio in zip(figures["lengths"], ratios, strict=True):
            if length >= AT and ratio < SMALLER:
                raise RuntimeError(
                    f"the state of {name} is to be {SMALLER} times smaller than the KV cache at {length:,} bytes, and "
                    f"is {ratio:.1f} times: shorten the window or the chunks"
                )
