"""A train step whose rows are split over devices: python -m experiments.benchmark split_step --out FILE."""

import math
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from experiments.benchmark.figures.saved import save

if TYPE_CHECKING:
    from jaxblt.parallel import MeshConfig
    from jaxblt.training.recipe import Recipe

Model = Literal["transformer", "blt_hyena"]
SHAPES: dict[Model, tuple[int, int]] = {"transformer": (2048, 24), "blt_hyena": (2048, 25)}
"""Width and layers: of the byte Transformer 1.3 B parameters, of the BLT-Hyena's latent stack 1.4 B with the others."""


def split_step(
    out: str,
    model: Model = "transformer",
    meshes: tuple[str, ...] = ("data=1", "fsdp=2", "data=2"),
    rows: int = 2,
    length: int = 8192,
    dim: int | None = None,
    layers: int | None = None,
    remat: Literal["none", "full", "dots"] = "none",
    scan: bool = False,
    trials: int = 20,
) -> dict[str, Any]:
    """Time a train step of a billion parameters on one device and with rows split.

    It uses AdamW in bf16. Each device has the same rows on every mesh. Efficiency is the time of the first mesh over
    that of the mesh. Patches are static, four bytes each. All meshes draw the same parameters; the losses of their
    first steps are compared on the same rows by tests, not here, as a larger mesh reads more rows.

    Args:
      out: JSON file to write.
      model: a byte Transformer, or a BLT with Hyena in its latent stack.
      meshes: sizes of axes joined by commas, such as "data=2,fsdp=2"; axes that are not named have one device.
      rows: of each device.
      length: bytes of a row.
      dim: width of the Transformer or of the latent stack, a multiple of 256; None for that of a billion parameters.
      layers: of the same stack, likewise.
      remat: what blocks keep for the backward pass.
      scan: loop over blocks instead of unrolling them.
      trials: of each timing, at least 20.
    """
    from jaxblt.cli.mesh import parse_mesh

    found: dict[str, Any] = {
        "model": model,
        "rows_per_device": rows,
        "length": length,
        "remat": remat,
        "scan": scan,
        "meshes": [],
    }
    for text in meshes:
        mesh = parse_mesh(text)
        recipe = step_recipe(model, mesh, rows, length, (dim, layers), remat=remat, scan=scan)
        figures = {"mesh": text, **measured(recipe, trials)}
        first = found["meshes"][0] if found["meshes"] else figures
        if "seconds" in figures and "seconds" in first:
            figures["efficiency"] = first["seconds"]["median"] / figures["seconds"]["median"]
        found["meshes"].append(figures)
        save("split_step", out, found)
    return found


def step_recipe(
    model: Model,
    mesh: "MeshConfig",
    rows: int,
    length: int,
    shape: tuple[int | None, int | None],
    *,
    remat: Literal["none", "full", "dots"],
    scan: bool,
) -> "Recipe":
    """Return the recipe whose step is timed."""
    from jaxblt.data import DataConfig
    from jaxblt.mixers import AttentionConfig, HyenaConfig, ModalFilter
    from jaxblt.models import BLTConfig, ByteLMConfig, HashConfig, StackConfig
    from jaxblt.patching import PatcherConfig
    from jaxblt.training.recipe import Recipe
    from jaxblt.training.train_config import TrainConfig

    def stack(dim: int, depth: int, pattern: str, window: int | None = None) -> StackConfig:
        attention = AttentionConfig(dim=dim, num_heads=dim // 128, window=window)
        hyena = HyenaConfig(dim=dim, filter=ModalFilter(max_timescale=float(length)))
        mixers = {"A": attention, "W": attention, "H": hyena}
        used = {name: mixers[name] for name in set(pattern)}
        return StackConfig(
            dim=dim, num_layers=depth, pattern=pattern, mixers=used, remat=remat, scan=scan and depth > 1
        )

    width, depth = (
        given if given is not None else own for given, own in zip(shape, SHAPES[model], strict=True)
    )
    devices = math.prod((mesh.data, mesh.fsdp))
    config: Any = ByteLMConfig(stack=stack(width, depth, "A"))
    patcher = None
    if model == "blt_hyena":
        patcher = PatcherConfig(mode="static", patch_size=4, block_size=4096)
        config = BLTConfig(
            encoder=stack(width // 2, 1, "W", 512),
            latent=stack(width, depth, "HHAH"[: min(depth, 4)]),
            decoder=stack(width // 2, 9, "W", 512),
            hash=HashConfig(),
            bridge_heads=width // 256,
        )
    return Recipe(
        name="split_step",
        model=config,
        patcher=patcher,
        data=DataConfig(sample="book", seq_len=length, batch_size=rows * devices, partial="drop"),
        train=TrainConfig(steps=1000),
        mesh=mesh,
    )


def measured(recipe: "Recipe", trials: int) -> dict[str, Any]:
    """Return seconds, bytes a second and planned memory of the step, or what the allocator said."""
    from experiments.benchmark.figures.programs import run_if_it_fits

    return run_if_it_fits(partial(_timed, recipe, trials))


def _timed(recipe: "Recipe", trials: int) -> dict[str, Any]:
    import jax

    from experiments.benchmark.figures.programs import time_on_devices
    from jaxblt.training.flops import count_params
    from jaxblt.training.start.timed_step import prepare

    sizes = recipe.mesh
    count = sizes.data * sizes.fsdp * sizes.seq * sizes.tensor
    mesh = sizes.build(jax.devices()[:count])
    with jax.set_mesh(mesh):
        ready = prepare(recipe, mesh)
        compiled = ready.step().lower(ready.state, ready.batch).compile()
        held = [ready.state]

        def run() -> Any:
            held[0], metrics = compiled(held[0], ready.batch)
            return metrics

        loss = float(run()["loss"])
        params, _ = count_params(ready.setup.whole)
        found = time_on_devices(compiled, run, trials)
    rate = ready.num_bytes / found["seconds"]["median"]
    return {"parameters": params, "first_loss": loss, "bytes_per_second": rate, **found}
