"""Memory of a step on one split sequence, without the GPUs: python -m experiments.benchmark sequence_plan --out FILE.

The step of `sequence_parallel` is compiled for each length and number of GPUs, as `experiments.plan` does it and in its
environment; about 90 s each.
"""

from dataclasses import replace
from typing import Any

import configs
from experiments.benchmark.figures.saved import save
from experiments.benchmark.models.books_model import Remat, split_model


def sequence_plan(
    out: str,
    devices: tuple[int, ...] = (1, 2, 4, 8),
    lengths: tuple[int, ...] = (8192, 65_536, 262_144, 1_048_576),
    pattern: str = "HHAH",
    remat: Remat = "full",
    gpu: str = "h200",
) -> dict[str, Any]:
    """Plan bytes of a device in a train step of one sequence, of static patches of four bytes.

    Args:
      out: JSON file to write.
      devices: numbers of GPUs over which the sequence is split.
      lengths: of the sequence, bytes.
      pattern: of the latent stack.
      remat: what the step's blocks keep for the backward pass.
      gpu: the type to compile for.

    Raises:
      ValueError: there is no length or no number of GPUs, a length does not divide as the step needs it, or nobody
        knows the type of GPU.
    """
    from jaxblt.parallel.mesh import MeshConfig
    from jaxblt.patching import PatcherConfig
    from jaxblt.profiling.targets import devices_of
    from jaxblt.training.start.compile_ahead import plan_step, settle

    if not lengths or not devices or min(*lengths, *devices) < 1:
        raise ValueError(f"give positive lengths and numbers of GPUs, got {lengths} and {devices}")
    books, model = configs.get("books"), split_model(pattern, remat)
    found: dict[str, Any] = {"gpu": gpu, "pattern": pattern, "remat": remat, "plans": []}
    for count in devices:
        mesh = MeshConfig(data=1, seq=count)
        for length in lengths:
            patcher = PatcherConfig(mode="static", patch_size=4, block_size=min(4096, length // count))
            data = replace(books.data, batch_size=1, seq_len=length)
            changes = {"model": model, "patcher": patcher, "data": data, "mesh": mesh}
            recipe, _ = settle(replace(books, **changes, bytes_per_patch=None, entropy_run=None))
            memory = plan_step(recipe, mesh.build(devices_of(gpu, count)))
            found["plans"].append({"devices": count, "bytes": length, "planned_bytes": memory.total})
            save("sequence_plan", out, found)
    return found
