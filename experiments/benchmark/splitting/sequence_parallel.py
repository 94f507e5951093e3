"""One sequence over several devices: python -m experiments.benchmark sequence_parallel --out FILE."""

from typing import Any

from experiments.benchmark.figures.saved import save
from experiments.benchmark.models.books_model import Remat, split_model
from experiments.benchmark.splitting.kinds import Kind, Passes

LAYERS: tuple[tuple[Kind, int, int], ...] = (
    ("modal", 65_536, 1024),
    ("modal", 65_536, 4096),
    ("modal", 1_048_576, 1024),
    ("modal", 1_048_576, 4096),
    ("explicit", 1_048_576, 1024),
    ("implicit", 1_048_576, 1024),
)
"""Filter or mixer, tokens and width."""


def sequence_parallel(
    out: str,
    devices: int | None = None,
    layers: tuple[tuple[Kind, int, int], ...] = LAYERS,
    passes: tuple[Passes, ...] = ("both",),
    step_bytes: tuple[int, ...] = (1_048_576,),
    forward_bytes: tuple[int, ...] = (4_194_304,),
    pattern: str = "HHAH",
    remat: Remat = "none",
    trials: int = 20,
) -> dict[str, Any]:
    """Measure layers with their MLP, and the `books` model on one sequence, trained and read, over devices.

    Layers run on one device and, split along the sequence, on all; what does not fit says so. The step runs on all, and
    at the first length on one device with its share of the bytes as well. With one device nothing is compared.

    Args:
      out: JSON file to write.
      devices: how many; all by default.
      layers: filter of Hyena or name of another mixer, tokens and width of each layer that is timed, forward and
        backward. Heads have 128 channels, those of Mamba-2 64. In "every_tenth_block" a block of 128 tokens attends to
        itself and to every tenth block before it; there and in "sparse_attention" four heads share keys.
      passes: over layers: "forward", or "both" with gradients.
      step_bytes: lengths of the train step's sequence; none for no step.
      forward_bytes: lengths of sequences of which only the loss is computed.
      pattern: of the latent stack.
      remat: what the step's blocks keep for the backward pass.
      trials: of each timing, at least 20.

    Raises:
      ValueError: there are fewer devices than asked for, or one for layers, or a length does not divide among them.
    """
    import jax

    from experiments.benchmark.splitting import split_books, split_layers

    devices = jax.device_count() if devices is None else devices
    if not 1 <= devices <= jax.device_count():
        raise ValueError(
            f"devices must lie in 1..{jax.device_count()}, the devices that are here, got {devices}"
        )
    if layers and devices == 1:
        raise ValueError(
            "layers are split over 2 devices or more, got devices=1: pass --layers with nothing behind it"
        )
    for length in (*step_bytes, *forward_bytes):
        if length < 1 or length % devices**2:
            raise ValueError(
                f"{length} bytes on {devices} devices: a device's share is cut into as many once more, so lengths "
                f"must be positive multiples of {devices**2}"
            )
    timed = [split_layers.layer(*shape, devices, trials, each) for shape in layers for each in passes]
    config = split_model(pattern, remat)
    found: dict[str, Any] = {"layers": timed, "steps": [], "forward": []}
    save("sequence_parallel", out, found)
    for i, length in enumerate(step_bytes):
        found["steps"].append(split_books.step(config, length, devices, trials))
        save("sequence_parallel", out, found)
        if i == 0 and devices > 1:
            found["steps"][0] = split_books.compared(config, found["steps"][0], trials)
            save("sequence_parallel", out, found)
    for length in forward_bytes:
        found["forward"].append(split_books.forward(config, length, devices, trials))
        save("sequence_parallel", out, found)
    return found
