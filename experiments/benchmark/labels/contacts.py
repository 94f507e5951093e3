"""Contacts of far parts of chromosomes: python -m experiments.benchmark contacts MAP.npz GENOME --out FILE."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from scipy import stats

from experiments.benchmark.labels.contact_map import (
    Chromosome,
    deal,
    expected,
    middles_of_centromeres,
    read_chromosomes,
    word_shares,
)
from experiments.benchmark.labels.contact_settings import Settings
from experiments.benchmark.labels.labelled_runs import seeds_of

PENALTIES = (0.01, 0.1, 1.0, 10.0)
"""Of a ridge on standardised columns, a row's share; validation picks one."""
SCALES = (1.0, 3.0, 10.0, 30.0)
"""Bins over which the columns of a distance fall by e."""
Columns = Callable[[int, np.ndarray, np.ndarray], np.ndarray]
"""(chromosome, bins i, bins j) -> a row of columns for each pair."""


def contacts(
    file: Annotated[str, tyro.conf.Positional],
    genome: Annotated[str, tyro.conf.Positional],
    out: str,
    features: str | None = None,
    base_run: str | None = None,
    seeds: int = 3,
    first_seed: int = 0,
    settings: Settings = Settings(),
) -> dict[str, Any]:
    """Predict from sequence how often far bins of a chromosome touch, beyond what their distance says.

    A label is the log of a balanced Hi-C contact, less its mean at that distance in training. A seed deals whole
    chromosomes to training, validation and test, and picks parameters. "distance" is that mean alone. "ends" is a
    ridge on how far both bins are from the chromosome's ends, "words" on the words in both bins, "states" on a run's
    mean hidden states of both. "chromosome_words" and "chromosome_states" read the same of all windows of the
    chromosome. "centromeres" is a ridge on where the centromere lies: an annotation, so a mark of what is to be found.

    Args:
      file: npz of a Cooler's tables: chrom_names, bin_chrom, bin_weight, bin1, bin2, count.
      genome: FASTA of the same chromosomes; may end in `.xz`.
      out: file for the figures as JSON, written anew after each seed.
      features: SGD's table of features, for "centromeres"; None leaves them out.
      base_run: run whose hidden states are read, such as `genes`; None leaves them out.
      seeds: how many, from `first_seed` on.
      first_seed: see there.
      settings: of the pairs, of the chromosome's model and of its training.

    Raises:
      ValueError: no chromosome would be left for training.
    """
    from experiments.benchmark.figures.saved import save
    from experiments.benchmark.labels.contact_model import predict

    chosen, held, a_bin = seeds_of(first_seed, seeds), settings.held, settings.windows
    found = read_chromosomes(
        Path(file), Path(genome), settings.nearest, settings.farthest, bin_size=settings.bin_size
    )
    if len(found) <= 2 * held:
        raise ValueError(f"{len(found)} chromosomes leave none for training: lower --settings.held = {held}")
    read = read_tables(found, base_run, settings)
    annotated: dict[str, Columns] = {}
    if features is not None:
        places = middles_of_centromeres(Path(features), [one.name for one in found]) / settings.bin_size
        annotated["centromeres"] = lambda c, i, j: near_place(i + 0.5 - places[c], j + 0.5 - places[c])
    figures: dict[str, Any] = {"settings": asdict(settings), "base_run": base_run, "runs": []}
    figures["chromosomes"] = {one.name: len(one.logs) for one in found}
    for seed in chosen:
        parts = deal(len(found), seed, held)
        usual = expected([found[c] for c in parts["train"]])
        targets = [one.logs - usual for one in found]
        tested = [targets[c] for c in parts["test"]]
        tables = {name: standardise(table, parts["train"], found, a_bin) for name, table in read.items()}
        told: dict[str, Any] = {"seed": seed, "test": [found[c].name for c in parts["test"]]}
        nothing = [np.zeros_like(target) for target in tested]
        figures["runs"].append({"model": "distance", **told, **score(nothing, tested, usual)})
        ridges = {"ends": _ends(found)} | {name: _both(table, a_bin) for name, table in tables.items()}
        for name, columns in (ridges | annotated).items():
            scored = score(fit_ridge(columns, targets, parts), tested, usual)
            figures["runs"].append({"model": name, **told, **scored})
        for name, table in tables.items():
            begun, each = time.perf_counter(), {}
            for part, members in parts.items():
                each[part] = [table[c] for c in members], [targets[c] for c in members]
            predicted, trained = predict(each, settings, seed)
            scored = {**score(predicted, tested, usual), **trained, "seconds": time.perf_counter() - begun}
            figures["runs"].append({"model": f"chromosome_{name}", **told, **scored})
        save("contacts", out, figures)
    return figures


def read_tables(
    found: Sequence[Chromosome], base_run: str | None, settings: Settings
) -> dict[str, list[np.ndarray]]:
    """Return for each chromosome the words of its windows, and their mean hidden states in a run."""
    import jaxblt

    size = settings.window
    tables = {"words": [word_shares(one.bases, size, settings.word) for one in found]}
    if base_run is not None:
        windows = [one.bases[at : at + size] for one in found for at in range(0, len(one.bases), size)]
        states = iter(jaxblt.load(base_run).embed(windows).arrays)
        tables["states"] = [np.stack([next(states) for _ in own]) for own in tables["words"]]
    return tables


def standardise(
    table: Sequence[np.ndarray], train: Sequence[int], found: Sequence[Chromosome], a_bin: int
) -> list[np.ndarray]:
    """Return windows by mean and deviation of the training chromosomes; zeros fill the last bin of each chromosome.

    Args:
      table: of each chromosome, a row a window.
      train: chromosomes of training. Those of the other parts would tell a model about the test.
      found: the chromosomes, for their number of bins.
      a_bin: windows of a bin.
    """
    known = np.concatenate([table[c] for c in train])
    center, scale = known.mean(0), known.std(0) + 1e-9
    filled = []
    for own, one in zip(table, found, strict=True):
        lacking = len(one.logs) * a_bin - len(own)
        filled.append(np.pad((own - center) / scale, ((0, lacking), (0, 0))).astype(np.float32))
    return filled


def fit_ridge(
    columns: Columns, targets: Sequence[np.ndarray], parts: dict[str, list[int]]
) -> list[np.ndarray]:
    """Return a ridge's predictions of the test chromosomes; validation picks its penalty."""

    def rows(part: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for c in parts[part]:
            i, d = np.nonzero(np.isfinite(targets[c]))
            yield columns(c, i, i + d), targets[c][i, d]

    x, y = (np.concatenate(each) for each in zip(*rows("train"), strict=True))
    held, wanted = (np.concatenate(each) for each in zip(*rows("validation"), strict=True))
    center, scale, mean = x.mean(0), x.std(0) + 1e-9, y.mean()
    x, held = (x - center) / scale, (held - center) / scale
    square, product = x.T @ x / len(x), x.T @ (y - mean) / len(x)
    weights = [np.linalg.solve(square + penalty * np.eye(len(square)), product) for penalty in PENALTIES]
    best = min(weights, key=lambda w: float(np.mean((held @ w + mean - wanted) ** 2)))
    predicted = []
    for c in parts["test"]:
        found = np.full_like(targets[c], np.nan)
        i, d = np.nonzero(np.isfinite(targets[c]))
        found[i, d] = (columns(c, i, i + d) - center) / scale @ best + mean
        predicted.append(found)
    return predicted


def score(
    predicted: Sequence[np.ndarray], targets: Sequence[np.ndarray], usual: np.ndarray
) -> dict[str, float]:
    """Return how well pairs of the test chromosomes are told, all together.

    `spearman` and `auroc` are of what distance leaves unexplained, the second of which pairs touch more than expected;
    `accuracy` stands beside that of the commoner answer, `majority`. `spearman_of_logs` is of the contacts themselves.
    """
    from jaxblt.training.objectives.label_scores import auroc

    x, y, base = (
        np.concatenate([own[np.isfinite(target)] for own, target in zip(each, targets, strict=True)])
        for each in (predicted, targets, [np.broadcast_to(usual, target.shape) for target in targets])
    )
    above = y > 0
    varies = np.ptp(x) > 0
    return {
        "pairs": len(y),
        "spearman": float(stats.spearmanr(x, y)[0]) if varies else 0.0,
        "auroc": float(auroc(x, above)) if varies else 0.5,
        "accuracy": float(np.mean((x > 0) == above)),
        "majority": float(max(above.mean(), 1 - above.mean())),
        "spearman_of_logs": float(stats.spearmanr(x + base, y + base)[0]),
    }


def near_place(i: np.ndarray, j: np.ndarray) -> np.ndarray:
    """Return columns of two signed distances in bins to a place: how near each is, and whether it lies between them."""
    near, far = np.minimum(abs(i), abs(j)), np.maximum(abs(i), abs(j))
    between = (i * j < 0).astype(float)[:, None]
    each = [_falling(near), _falling(far)]
    return np.concatenate([*each, between, between * each[0], between * _falling(abs(i + j))], 1)


def _ends(found: Sequence[Chromosome]) -> Columns:
    def columns(c: int, i: np.ndarray, j: np.ndarray) -> np.ndarray:
        last = len(found[c].logs) - 1
        to_ends = [np.minimum(at, last - at) for at in (i, j)]
        return np.concatenate([_falling(np.minimum(*to_ends)), _falling(np.maximum(*to_ends))], 1)

    return columns


def _both(table: Sequence[np.ndarray], windows: int) -> Columns:
    means = [own.reshape(-1, windows, own.shape[1]).mean(1) for own in table]
    return lambda c, i, j: np.concatenate([means[c][i] + means[c][j], abs(means[c][i] - means[c][j])], 1)


def _falling(distance: np.ndarray) -> np.ndarray:
    return np.exp(-distance[:, None] / np.array(SCALES))
