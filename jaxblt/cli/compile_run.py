"""Compiles the programs of a server before it starts: jaxblt compile RUN_DIR."""

from pathlib import Path
from typing import Annotated

import tyro

from jaxblt.cli.quantize import load_quantized
from jaxblt.cli.serve import make_config, programs_folder, read_mesh
from jaxblt.precision.weights import Scheme
from jaxblt.training.state import Step, Weights


def compile_run(
    run_dir: Annotated[str, tyro.conf.Positional],
    out: Path | None = None,
    lanes: tuple[str, ...] = ("8x8192",),
    piece_bytes: int = 1024,
    prefix_mb: int = 0,
    drafts: int | None = None,
    beams: int = 0,
    mesh: str | None = None,
    dtype: str | None = None,
    quantize: Scheme | None = None,
    weights: Weights | None = None,
    step: Step | None = None,
) -> str:
    """Compile what `jaxblt serve` with the same options runs, and store it: a server that starts then compiles nothing.

    Programs are of this kind of device and of this version of JAX. A server that finds none for it compiles them.

    Args:
      run_dir: folder of the run.
      out: folder of the programs; by default jaxblt's in the user's cache, where `jaxblt serve` looks. On a CPU it has
        to be named.
      lanes: rows that decode together and the most bytes of each, as of `jaxblt serve`.
      piece_bytes: bytes of prompts that are read at once, as there.
      prefix_mb: memory for the states behind prompts, as there; only whether it is 0 matters.
      drafts: bytes to guess, as there; only whether they are given matters.
      beams: rows of a beam search, as there.
      mesh: "tensor=2" for weights that are split over two devices; one device by default.
      dtype: to compute in, "bfloat16" or "float32"; by default the recipe's.
      quantize: read kernels of products in fewer bits: int8, int4, fp8, or w8a8 with activations of 8 bits too.
      weights: "ema" for the parameters' average, "raw" for the parameters; by default the average if the run has one.
      step: of the checkpoint, or "best" for that of the best evaluation; by default the newest.

    Returns:
      A line that says how many programs were compiled, and how many were there.

    Raises:
      ValueError: an option is out of range, the model cannot generate, or there is a CPU and no `out`.
    """
    from jaxblt.inference.engine import Engine
    from jaxblt.inference.stored_programs import storing_programs

    config = make_config(lanes, 1, piece_bytes, prefix_mb, drafts, beams)
    folder = programs_folder("--out", out)
    if folder is None:
        raise ValueError(
            "programs of a CPU are kept only where you say: name a folder by --out, and give it to jaxblt serve as "
            "--compiled"
        )
    with storing_programs(folder) as found:
        devices = read_mesh(mesh, quantize)
        run = load_quantized(run_dir, quantize, step=step, weights=weights, dtype=dtype, mesh=devices)
        engine = Engine(run, config, mesh=devices)
        engine.warm()
        with engine:
            engine.generate([b"a"], max_new_bytes=1)
            if beams:
                engine.search(b"a", max_new_bytes=1, beams=1)
    return f"{folder}: {found}"
