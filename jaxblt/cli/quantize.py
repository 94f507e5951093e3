"""Writes a run with weights in fewer bits: jaxblt quantize RUN_DIR --scheme int8 --data FILE --out DIR."""

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from jaxblt.precision.weights import Chooser, Scheme
from jaxblt.remote import refuse_remote
from jaxblt.training.state import Step, Weights

if TYPE_CHECKING:
    from jaxblt.run import Run

CALIBRATED = "w8a8"


def quantize(
    run_dir: Annotated[str, tyro.conf.Positional],
    scheme: Scheme,
    out: Path,
    data: Path | None = None,
    losses: bool = False,
    budget: float | None = None,
    chooser: Chooser | None = None,
    keep: tuple[str, ...] = (),
    entropy: bool = False,
    adapters: bool = False,
    weights: Weights | None = None,
    step: Step | None = None,
) -> str:
    """Write a run whose products read weights in 8 or 4 bits, as a folder that all commands open; print what it costs.

    Embeddings, norms, filters, routers and heads stay as they are, and so does the entropy model unless --entropy is
    given. The new folder has no optimiser.

    Args:
      run_dir: folder of the run.
      scheme: int8 or fp8 (a scale of each output channel), int4 (of each 128 values), or w8a8. In w8a8
        weights are int8, and activations have 8 bits as well, with a scale of each token.
      out: folder to write; it must not hold anything.
      data: FASTA, JSON lines or text to measure bits per byte on before and after, and to choose ranges on.
      losses: measure on DATA what each product costs alone, too.
      budget: mean bits of a weight at the most; the products that cost least on DATA are quantised until it is met.
      chooser: of w8a8: one scale of the activations of each product, by their range on DATA: minmax, percentile, mse or
        entropy.
      keep: patterns of paths of products that stay as they are, such as "latent/*/mixer/*".
      entropy: quantise the entropy model too, and count the boundaries of patches that move on DATA.
      adapters: hold V and U of adapters in int8 too; their routers stay as they are.
      weights: "ema" for the parameters' average, "raw" for the parameters; by default the average if the run has one.
      step: of the checkpoint, or "best" for that of the best evaluation; by default the newest.

    Returns:
      A table of products, and lines that sum up.

    Raises:
      FileExistsError: the folder holds something.
      ValueError: an option needs DATA or another scheme, a pattern names no product, or the budget is out of reach.
    """
    import jaxblt
    from jaxblt.answers.quantized import choose_products, measure_losses, products_of
    from jaxblt.answers.quantized.make import without_kept
    from jaxblt.interchange.quantized_run import write_quantized
    from jaxblt.interchange.runs import check_new_folder
    from jaxblt.text_table import format_table

    asked = {"--losses": losses, "--budget": budget is not None, "--chooser": chooser is not None}
    _check(scheme, out, data, asked)
    check_new_folder(out)
    run = jaxblt.load(run_dir, step=step, weights=weights)
    products = without_kept(products_of(run), keep)
    found = measure_losses(run, products, scheme, _given(data)) if losses or budget is not None else []
    chosen = None if budget is None else choose_products(run, products, scheme, found, budget)
    options = {"products": chosen, "keep": keep, "entropy": entropy, "adapters": adapters}
    calibration = None if chooser is None else data
    made = run.quantize(scheme, calibration=calibration, chooser=chooser, **options)
    # Measure first: records that cannot be scored would leave a folder that the next attempt refuses
    sums = _sums(run, made, data, entropy=entropy)
    write_quantized(made, out)
    rows = _rows(made.params, products, dict(found))
    table = format_table(["product", "weights", "bits", "bits per byte lost alone"], rows, digits=5)
    return "\n".join([table, "", *sums, f"written: {out}"])


def _check(scheme: str, out: Path, data: Path | None, asked: dict[str, bool]) -> None:
    """Raise ValueError for an option that needs something else."""
    refuse_remote("--out", str(out))
    for option, given in asked.items():
        if given and data is None:
            raise ValueError(f"{option} needs records to measure on: give --data")
    if asked["--chooser"] and scheme != CALIBRATED:
        raise ValueError(f"--chooser is of activations in 8 bits, and scheme is {scheme!r}: use {CALIBRATED}")


def _given(data: Path | None) -> Path:
    assert data is not None
    return data


def _rows(params: Any, products: Any, lost: dict[Any, float]) -> list[list[Any]]:
    """Return a line for each product: those that were measured by what they lose, others in the model's order."""
    from flax.traverse_util import flatten_dict

    from jaxblt.precision.weights import Quantized, count_bytes

    flat: Any = flatten_dict(params)
    rows = []
    for path in lost or products:
        kernel = flat[*path, "kernel"]
        bits = 8 * count_bytes(kernel) / kernel.size if isinstance(kernel, Quantized) else 16.0
        rows.append(["/".join(path), kernel.size, round(bits, 2), lost.get(path)])
    return rows


def _sums(run: "Run", made: "Run", data: Path | None, *, entropy: bool) -> list[str]:
    """Return lines with bytes and bits before and after."""
    from jaxblt.answers.quantized import count_flips
    from jaxblt.answers.quantized.sensitivity import bits_per_byte
    from jaxblt.precision.weights import count_bytes

    sizes = [count_bytes(one.params) for one in (run, made)]
    lines = [f"bytes of parameters: {sizes[0]:,} before, {sizes[1]:,} after (fp32 where not quantised)"]
    if data is None:
        return lines
    before, after = (bits_per_byte(one, data) for one in (run, made))
    change = 100 * (after / before - 1) if before else math.nan
    lines.append(f"bits per byte: {before:.4f} before, {after:.4f} after ({change:+.2f} %)")
    if entropy:
        flips = count_flips(run, made, data)
        lines.append(
            f"boundaries of patches: {flips.flipped:,} moved, of {flips.closed:,} in {flips.bytes:,} bytes"
        )
    return lines


def load_quantized(run_dir: str | os.PathLike[str], scheme: Scheme | None, **options: Any) -> "Run":
    """Open a run, with weights in fewer bits if a scheme is given; see `jaxblt.load` for options."""
    import jaxblt

    run = jaxblt.load(run_dir, **options)
    return run if scheme is None else run.quantize(scheme)
