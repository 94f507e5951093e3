"""Export and import as commands; each returns the line to print."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jaxblt.answers.embed import Pool
from jaxblt.interchange.entry import is_torch
from jaxblt.interchange.evo2_run import read_evo2, write_evo2
from jaxblt.interchange.executables import write_executables
from jaxblt.interchange.hf_blt import read_hf_blt, read_patcher, write_hf_blt
from jaxblt.interchange.hyena_dna import read_hyena_dna, write_hyena_dna
from jaxblt.interchange.program_file import write_program
from jaxblt.interchange.programs import PLATFORMS, Made, Platform, make_embed_program, make_score_program
from jaxblt.interchange.runs import Dtype, read_run, write_run, write_run_folder
from jaxblt.interchange.tensors import check_new
from jaxblt.interchange.weight_files import read_config
from jaxblt.patching import PatcherConfig
from jaxblt.precision.weights import Scheme
from jaxblt.remote import refuse_remote
from jaxblt.training.state import Step, Weights
from jaxblt.training.stored.resolved import run_files
from jaxblt.validation import whole

if TYPE_CHECKING:
    from jaxblt.run import Run

WRITERS = {"vortex": write_evo2, "hyenadna": write_hyena_dna, "blt": write_hf_blt}
"""Writers of files for other programs, by their names."""


def export(
    run_dir: Path,
    /,
    *,
    out: Path,
    overwrite: bool = False,
    step: Step | None = None,
    weights: Weights | None = None,
    dtype: Dtype | None = None,
    stablehlo: Literal["score", "embed"] | None = None,
    length: int | None = None,
    layer: int | Literal["final"] | None = None,
    pool: Pool | None = None,
    platforms: tuple[Platform, ...] | None = None,
    quantize: Scheme | None = None,
    executables: tuple[int, ...] | None = None,
    to: Literal["vortex", "hyenadna", "blt"] | None = None,
) -> str:
    """Write a run to one file for other programs.

    The file holds parameters and recipe as safetensors, or a StableHLO program. In a safetensors file entries are named
    by their paths, such as model.embedding.bytes; frozen trees, such as the entropy model, begin with frozen.NAME. The
    recipe and the step are in the file's metadata. There is no optimiser.

    A StableHLO program answers what jaxblt score or jaxblt embed does, for any number of records of one row.

    Args:
      run_dir: folder of the run.
      out: file to write.
      overwrite: replace OUT if it is there.
      step: of the checkpoint, or "best" for that of the best evaluation; by default the newest.
      weights: "ema" for the parameters' average, "raw" for the parameters; by default the average if the run has one.
      dtype: of the model's parameters in a safetensors file, float32 by default; bfloat16 rounds them.
      stablehlo: write a program that answers this question, with its parameters, in place of safetensors.
      length: positions of a program's row; a longer record is refused.
      layer: of embed: number of a block, negative from the end, or "final".
      pool: of embed: "mean" (the default), "last", "per_byte" or "per_patch".
      platforms: that a program is lowered for, cpu and cuda by default.
      quantize: read kernels of a program in fewer bits: int8, int4, fp8, or w8a8 with activations of 8 bits too.
      executables: numbers of records, such as 1 8 32: compile the program for each, for the device that is here, and
        write what XLA has compiled in place of StableHLO. Such a file holds pickles: open only what you trust.
      to: write a file for this program instead: a .pt file for vortex, which runs Evo 2; safetensors for Hugging
        Face's hyenadna and blt.

    Returns:
      A line that says what was written.
    """
    from jaxblt.run import load

    if isinstance(step, int):
        whole("--step", step, least=0)
    check_new(out, inputs=run_files(run_dir), overwrite=overwrite)
    given: dict[str, object] = {"--length": length, "--layer": layer, "--pool": pool}
    given |= {"--platforms": platforms, "--quantize": quantize, "--executables": executables}
    if stablehlo is None:
        _refuse(given, "belongs to --stablehlo")
        run = load(run_dir, step=step, weights=weights)
        write = write_run if to is None else WRITERS[to]
        found = write(run, out, dtype=dtype or "float32", overwrite=overwrite)
        return f"wrote {out}: {found.arrays} arrays of step {run.step}, {found.size:,} bytes"
    _refuse({"--dtype": dtype}, "belongs to safetensors: a program computes in the dtype of the run")
    _refuse({"--to": to}, "names a program that reads parameters, which --stablehlo has in itself")
    if stablehlo == "score":
        _refuse({"--layer": layer, "--pool": pool}, "belongs to --stablehlo embed")
    if length is None:
        raise ValueError("--stablehlo needs --length, the positions of a row, such as --length 8192")
    if executables is not None:
        _refuse({"--platforms": platforms}, "belongs to StableHLO: executables are for the device here")
    on = PLATFORMS if platforms is None else platforms
    run: Run = load(run_dir, step=step, weights=weights)
    if quantize is not None:
        run = run.quantize(quantize)
    if stablehlo == "score":
        made = make_score_program(run, length, platforms=on)
    else:
        made = make_embed_program(run, length, layer=layer, pool=pool or "mean", platforms=on)
    return _write(made, out, executables, overwrite=overwrite)


def _write(made: Made, out: Path, executables: tuple[int, ...] | None, *, overwrite: bool) -> str:
    """Write a program as StableHLO, or compiled for these numbers of records; return a line that says so."""
    answer, most = made.about["answer"], made.about["most_bytes"]
    if executables is None:
        size, on = write_program(made, out, overwrite=overwrite), ", ".join(made.about["platforms"])
        return f"wrote {out}: {answer} of records of up to {most:,} bytes, for {on}, {size:,} bytes"
    size = write_executables(made, out, executables, overwrite=overwrite)
    batches = ", ".join(map(str, sorted(executables)))
    return f"wrote {out}: {answer} of {batches} records of up to {most:,} bytes, compiled, {size:,} bytes"


def import_run(
    source: Path,
    /,
    *,
    out: Path,
    part: Literal["patcher"] | None = None,
    config: str | None = None,
    fp8: bool = False,
) -> str:
    """Make a run folder of an exported file, a checkpoint of Evo 2, a HyenaDNA, or a BltForCausalLM.

    Everything is checked before anything is written. The folder holds no optimiser: train from it with --init-from.

    Args:
      source: safetensors file of jaxblt export; .pt file of Evo 2, whole or in parts; or the folder of a Hugging Face
        model.
      out: run folder to make; a folder that holds anything is never touched.
      part: of a Hugging Face BLT: patcher is its entropy model alone.
      config: of Evo 2, such as evo2_7b_1m; by default that of the published file of this name. With it the tensors may
        also be in a safetensors file, or in a folder of such files.
      fp8: of Evo 2: Hyena's input projections multiply in FP8, as the 1B, 20B and 40B models were trained. Answers then
        depend on the records that are read together.

    Returns:
      A line that says what was written.
    """
    refuse_remote("--out", out)
    if config is not None or is_torch(source):
        _refuse({"--part": part}, "belongs to the folder of a Hugging Face BLT")
        name, count = read_evo2(source, out, config=config, fp8=fp8)
        return f"wrote {out}: {name}, {count} tensors of {source}; jaxblt.load({str(out)!r}) opens it"
    _refuse({"--fp8": fp8 or None}, "belongs to a checkpoint of Evo 2")
    if source.is_dir() and read_config(source).get("model_type") == "hyenadna":
        _refuse({"--part": part}, "belongs to the folder of a Hugging Face BLT")
        count = read_hyena_dna(source, out)
        return f"wrote {out}: HyenaDNA, {count} tensors of {source}; jaxblt.load({str(out)!r}) opens it"
    if source.is_dir():
        return _import_blt(source, out, part)
    _refuse({"--part": part}, "belongs to the folder of a Hugging Face model")
    found = read_run(source, out)
    return f"wrote {out}: {found.arrays} arrays of {source}; jaxblt.load({str(out)!r}) opens it"


def _import_blt(source: Path, out: Path, part: str | None) -> str:
    if part is None:
        count, patcher = read_hf_blt(source, out)
        opens = f"{count} tensors of {source}; jaxblt.load({str(out)!r}) opens it"
        return f"wrote {out}: a released BLT, {opens}; patches of {_rule(patcher)}"
    found = read_patcher(source, name=out.name)
    write_run_folder(out, found.recipe, found.params, {}, step=0)
    told = f"the entropy model of {source}, for entropy_run"
    return f"wrote {out}: {told}; there its patches have {_rule(found.patcher)}"


def _rule(patcher: PatcherConfig) -> str:
    """Return how patches are cut, in words."""
    longest = "" if patcher.max_length is None else f", max_length {patcher.max_length}"
    return f"threshold {patcher.threshold} nats{longest}"


def _refuse(given: dict[str, object], why: str) -> None:
    """Raise ValueError, naming the option, if one of those given is not None."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name} {why}: leave it out")
