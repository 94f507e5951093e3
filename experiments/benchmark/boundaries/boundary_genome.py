"""Learned patches of a genome: python -m experiments.benchmark boundary_genome GENOME ANNOTATION --out FILE."""

import csv
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import numpy as np
import tyro
from jaxtyping import Bool

from jaxblt.validation import number, whole

if TYPE_CHECKING:
    from experiments.benchmark.boundaries.side_by_side import Trained
    from jaxblt.data.sources.bed import BedInterval
    from jaxblt.models import BLTConfig, StackConfig
    from jaxblt.training.recipe import Recipe

Arm = Literal["bytes", "bytes_genomic", "static", "static_genomic", "learned", "learned_genomic"]
"""How bases are grouped, and whether positions have the periods of genomes."""
WINDOW = 512
"""Bases that the stacks over bases see."""
BATCH = 8
"""Rows that are cut at a time, for their comparison with the annotation."""


def boundary_genome(
    genome: Annotated[str, tyro.conf.Positional],
    annotation: Annotated[str, tyro.conf.Positional],
    out: str,
    operons: str | None = None,
    arms: tuple[Arm, ...] = (
        "learned",
        "learned_genomic",
        "static",
        "static_genomic",
        "bytes",
        "bytes_genomic",
    ),
    recipe: str = "ecoli",
    bases_per_patch: float = 3.0,
    seeds: int = 3,
    steps: int = 300,
    seconds: float = 60.0,
    every: int = 50,
    eval_batches: int = 8,
) -> dict[str, Any]:
    """Train one recipe on a genome with patches and without, and compare learned cuts with its annotation.

    Bits are of held-out bases. Cuts are of the held-out part of each record: their agreement with starts of coding
    sequences and with ends of operons stands beside that of random cuts at the same rate. A start on the reverse strand
    counts where its codon ends. Seeds of an arm share one compiled step and are trained in turn, on one device.

    Args:
      genome: FASTA file.
      annotation: GFF file of it; its CDS count.
      out: file for the figures as JSON, written anew after each arm.
      operons: CSV file with columns start (from 0), end, strand and operon, a row a gene, of a genome of one record.
      arms: others are compared with the first.
      recipe: its name; a byte model of a genome that is split by position.
      bases_per_patch: mean length that all patches are led to.
      seeds: models of each arm, with seeds 0, 1, ... of parameters and of the order of rows.
      steps: of training, and the learning rate's horizon.
      seconds: of training of each model, at the most.
      every: steps between entries of the curves.
      eval_batches: of the validation split, at the most.

    Raises:
      ValueError: there is no arm, or a number is out of range.
    """
    from experiments.benchmark.boundaries.boundary_books import gaps
    from experiments.benchmark.boundaries.side_by_side import train_seeds
    from experiments.benchmark.figures.saved import save
    from jaxblt import recipes

    if not arms:
        raise ValueError(f"--arms names no arm, choose of {', '.join(get_args(Arm))}")
    for option, value in {"seeds": seeds, "every": every, "eval_batches": eval_batches}.items():
        whole(f"--{option.replace('_', '-')}", value, least=1)
    whole("--steps", steps, least=5)
    number("--seconds", seconds, above=0)
    number("--bases-per-patch", bases_per_patch, above=1)
    base = recipes.get(recipe)
    base = replace(base, data=replace(base.data, paths=(genome,), sample=None))
    optimizer = replace(base.optimizer, warmup_steps=min(base.optimizer.warmup_steps, steps // 5))
    train = replace(base.train, steps=steps, eval_every=1, eval_batches=eval_batches)
    base = replace(base, train=train, optimizer=optimizer)
    places = read_places(annotation, operons)
    figures: dict[str, Any] = {
        "recipe": recipe,
        "target": bases_per_patch,
        "step_bases": base.data.batch_size * base.data.seq_len,
        "arms": {},
    }
    for arm in dict.fromkeys(arms):
        own = arm_of(base, arm, bases_per_patch)
        trained = train_seeds(own, range(seeds), every=every, seconds=seconds)
        figures["arms"][arm] = figures_of(trained, genome, places)
        figures["gaps"] = gaps(figures["arms"])
        save("boundary_genome", out, figures)
    return figures


def arm_of(base: "Recipe", arm: Arm, bases_per_patch: float) -> "Recipe":
    """Return the recipe with bases grouped this way."""
    from experiments.benchmark.boundaries import boundary_books
    from jaxblt.models import PositionConfig, with_positions
    from jaxblt.patching import PatcherConfig

    kind, _, genomic = arm.partition("_")
    if kind == "bytes":
        stack = base.model.stack
        if genomic:
            stack = with_positions(stack, stack.num_layers, periods=PositionConfig.genomic().periods)
        return replace(base, model=replace(base.model, stack=stack))
    positions = PositionConfig.genomic() if genomic else PositionConfig()
    patched = replace(
        base,
        model=replace(patched_model(base.model.stack), positions=positions),
        patcher=PatcherConfig(mode="static", block_size=min(4096, base.data.seq_len)),
        bytes_per_patch=bases_per_patch,
    )
    return boundary_books.arm_of(patched, "static" if kind == "static" else "learned")


def patched_model(stack: "StackConfig") -> "BLTConfig":
    """Return a byte-patched model with a byte model's stack over patches, and a block over bases at either end."""
    from jaxblt.mixers import AttentionConfig
    from jaxblt.models import BLTConfig, StackConfig

    heads = max(stack.dim // 64, 1)
    window = StackConfig(
        dim=stack.dim,
        num_layers=1,
        pattern=("window",),
        mixers={"window": AttentionConfig(dim=stack.dim, num_heads=heads, window=WINDOW)},
        dropout=stack.dropout,
    )
    return BLTConfig(encoder=window, latent=stack, decoder=window, hash=None, bridge_heads=heads)


def figures_of(trained: "Trained", genome: str, places: dict[str, dict[str, np.ndarray]]) -> dict[str, Any]:
    """Return bits and lengths of an arm by seed, and how learned cuts agree with places of the genome."""
    import jax

    from experiments.benchmark.boundaries import boundary_books
    from jaxblt.training.evaluate import Validation

    patcher, more = trained.setup.recipe.patcher, {}
    with jax.set_mesh(trained.setup.mesh):
        validation, states = Validation(trained.setup), trained.states
        if patcher is not None and patcher.mode == "learned":
            more["as_trained"] = boundary_books.by_seed([validation(state) for state in states])
            states = boundary_books.at_target(trained)
            more["cuts"] = compare_cuts(replace(trained, states=states), genome, places)
        found = [validation(state) for state in states]
    return {**boundary_books.figures_of(trained), **boundary_books.by_seed(found), **more}


def read_places(annotation: str, operons: str | None) -> dict[str, dict[str, np.ndarray]]:
    """Return the last base before each boundary, by kind and record."""
    from jaxblt.data.sources import read_regions
    from jaxblt.data.sources.opening import read_lines

    genes = read_regions(annotation, feature="CDS")
    found = {
        "starts": {
            name: starts_of([g for g in genes if g.record == name]) for name in {g.record for g in genes}
        }
    }
    if operons is not None:
        rows = list(csv.DictReader(read_lines(Path(operons))))
        (record,) = found["starts"]
        found["operons"] = {record: ends_of(rows)}
    return found


def starts_of(genes: "list[BedInterval]") -> np.ndarray:
    """Return the base before each start codon, or that at its end on the reverse strand."""
    return np.unique([gene.stop - 1 if gene.strand == "-" else gene.start - 1 for gene in genes])


def ends_of(rows: list[dict[str, str]]) -> np.ndarray:
    """Return the base before each operon's first gene and the last one of its last gene, on either strand."""
    spans: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        spans.setdefault((row["operon"], row["strand"]), []).extend((int(row["start"]), int(row["end"])))
    return np.unique([place for span in spans.values() for place in (min(span) - 1, max(span) - 1)])


def compare_cuts(trained: "Trained", genome: str, places: dict[str, dict[str, np.ndarray]]) -> dict[str, Any]:
    """Return the agreement of each model's cuts with the annotation, at once and within a base."""
    from experiments.benchmark.figures.over_seeds import over_seeds
    from jaxblt.evaluation import score_boundaries

    rows, marks = held_out(trained, genome, places)
    cuts = [cut_rows(trained, state, rows) for state in trained.states]
    found: dict[str, Any] = {"bases": rows.size, "rate": [float(cut.mean()) for cut in cuts]}
    for kind, reference in marks.items():
        for tolerance in (0, 1):
            each = [asdict(score_boundaries(cut, reference, tolerance=tolerance)) for cut in cuts]
            lift = [one["f1"] / one["random_f1"] if one["random_f1"] else 0.0 for one in each]
            found[f"{kind}_within_{tolerance}"] = {"seeds": each, "f1_over_random": over_seeds(lift)}
    return found


def held_out(
    trained: "Trained", genome: str, places: dict[str, dict[str, np.ndarray]]
) -> tuple[np.ndarray, dict[str, Bool[np.ndarray, "B T"]]]:
    """Return the validation part of the records as rows of bases, and where boundaries lie in them."""
    from jaxblt.data import DataConfig
    from jaxblt.data.sources import FastaSource
    from jaxblt.data.splits import split_by_position

    source, data = FastaSource(genome), trained.setup.recipe.data
    assert isinstance(data, DataConfig)
    length, rows = data.seq_len - 1, []
    marks: dict[str, list[np.ndarray]] = {kind: [] for kind in places}
    parts = split_by_position(source, "validation", fractions=data.fractions)
    for record, start, stop in zip(parts.documents, parts.starts, parts.stops, strict=True):
        stop -= (stop - start) % length
        text = source.read(int(record), int(start), int(stop))
        rows.append(np.frombuffer(text, np.uint8).reshape(-1, length))
        for kind, found in places.items():
            here = found.get(source.names[record], np.zeros(0, int))
            here = here[(here >= start) & (here < stop)] - start
            marks[kind].append(np.isin(np.arange(stop - start), here).reshape(-1, length))
    return np.concatenate(rows), {kind: np.concatenate(each) for kind, each in marks.items()}


def cut_rows(trained: "Trained", state: Any, rows: np.ndarray) -> Bool[np.ndarray, "B T"]:
    """Return where a model ends patches of rows of bases, each read as a document."""
    import jax

    from jaxblt.data.vocab import BOS, OFFSET

    model = trained.setup.task.model
    route = jax.jit(lambda params, ids: model.apply({"params": params}, ids, method="route")[0])
    ids = np.pad(rows.astype(np.int32) + OFFSET, ((0, -len(rows) % BATCH), (1, 0)), constant_values=BOS)
    parts = [np.asarray(route(state.params, part)) for part in ids.reshape(-1, BATCH, ids.shape[1])]
    return np.concatenate(parts)[: len(rows), 1:] > 0.5
