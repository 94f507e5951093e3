"""Effects of variants of loci kept back: python -m experiments.benchmark loci TABLE --run genes --out FILE."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import tyro

from experiments.benchmark.labels.labelled_runs import seeds_of
from experiments.benchmark.labels.zero_shot import TURN, Rated, mpra, rate_by_run

PENALTIES = (0.01, 0.1, 1.0, 10.0)
"""Of a ridge on standardised columns, a row's share; validation picks one."""
REACH = 10
"""Bases on each side of a variant whose words are read."""
SCALES = (5.0, 20.0, 80.0)
"""Bases over which the columns of a distance fall by e."""
BAR = ("changes", "place", "words", "simple")
"""Models that read no run; the last has all of their columns."""


class Table(NamedTuple):
    """Variants as rows.

    Attributes:
      columns: Float[N, D] by model.
      label: Float[N], in deviations from its experiment's mean.
      group: experiment of each.
      locus: number of the locus of each.
    """

    columns: dict[str, np.ndarray]
    label: np.ndarray
    group: np.ndarray
    locus: np.ndarray


def loci(
    file: Annotated[str, tyro.conf.Positional],
    out: str,
    run: str | None = None,
    context: int = 64,
    most: int = 6000,
    folds: int = 5,
    seeds: int = 3,
    first_seed: int = 0,
    batch_size: int = 256,
) -> dict[str, Any]:
    """Predict the effects of variants in loci that training never saw, with and without a run's states.

    Experiments whose stretches overlap are of one locus. A seed deals loci to folds: each is the test once, the next
    one validates, the others train. Models are ridges: `changes` on which base became which, `place` on distances to
    the ends of the assayed stretch and the share of G and C around, `words` on the words that are gained and lost and
    on those around, `simple` on all of these. `ratio` is log p(alternate) - log p(reference) of the run as it is,
    `states` a ridge on it, on the run's mean states of the reference and on how the alternate moves them, `hybrid` one
    on `simple` and `states`. `chosen` is `hybrid` or `simple`, whichever validation prefers.

    A figure is Spearman's coefficient with what was measured, the mean over experiments of a locus and then over loci.

    Args:
      file: table of variants of reporter assays (Kircher et al. 2019); may end in `.xz`.
      out: file for the figures as JSON.
      run: folder or name of a run that predicts the next base; None for models without one.
      context: bases of the windows that the run reads.
      most: variants that are drawn.
      folds: into which loci are dealt.
      seeds: how many, from `first_seed` on.
      first_seed: see there.
      batch_size: windows that are read at once.
    """
    from experiments.benchmark.figures.saved import save

    chosen, found = seeds_of(first_seed, seeds), mpra(Path(file), context).rated
    drawn = np.sort(np.random.default_rng(0).permutation(len(found))[:most])
    table = read_table([found[i] for i in drawn], found, run, batch_size)
    settings = {"context": context, "most": most, "folds": folds}
    figures: dict[str, Any] = {"settings": settings, "run": run and Path(run).name, "variants": len(drawn)}
    figures |= {"loci": int(table.locus.max()) + 1, "experiments": len(np.unique(table.group)), "runs": []}
    predicted: dict[str, list[np.ndarray]] = defaultdict(list)
    for seed in chosen:
        for model, rate in predict(table, folds, seed).items():
            predicted[model].append(by_locus(rate, table))
            found_mean = float(np.mean(predicted[model][-1]))
            figures["runs"].append({"model": model, "seed": seed, "spearman": found_mean})
    means = {model: np.mean(each, 0) for model, each in predicted.items()}
    figures["by_locus"] = {
        "names": ["/".join(np.unique(table.group[table.locus == i])) for i in range(figures["loci"])],
        **{model: each.tolist() for model, each in means.items()},
    }
    figures["gain"] = {
        model: gain_interval(each - means["simple"]) for model, each in means.items() if model not in BAR
    }
    save("loci", out, figures)
    return figures


def read_table(rated: Sequence[Rated], all_rated: Sequence[Rated], run: str | None, batch_size: int) -> Table:
    """Return the columns of all models, and labels by experiment."""
    group = np.array([one.group for one in rated])
    label = np.array([one.label for one in rated])
    for name in np.unique(group):
        own = group == name
        label[own] = (label[own] - label[own].mean()) / (label[own].std() + 1e-9)
    columns = simple_columns(rated, spans_of(all_rated))
    columns["simple"] = np.concatenate([columns[name] for name in BAR[:-1]], 1)
    if run is not None:
        columns |= run_columns(rated, run, batch_size)
        columns["hybrid"] = np.concatenate([columns["simple"], columns["states"]], 1)
    numbers = number_loci(spans_of(all_rated))
    return Table(columns, label, group, np.array([numbers[one.group] for one in rated]))


def spans_of(rated: Sequence[Rated]) -> dict[str, tuple[str, int, int]]:
    """Return the chromosome, and the first and the last place of each experiment."""
    places: dict[str, list[Any]] = defaultdict(list)
    for one in rated:
        places[one.group].append(one.place)
    return {name: (own[0][0], min(own)[1], max(own)[1]) for name, own in places.items()}


def number_loci(spans: Mapping[str, tuple[str, int, int]]) -> dict[str, int]:
    """Return the locus of each experiment: stretches that overlap, and those that such stretches link, are one."""
    numbers: dict[str, int] = {}
    reached, number = ("", 0), -1
    for name, (chromosome, first, last) in sorted(spans.items(), key=lambda item: item[1]):
        if chromosome != reached[0] or first > reached[1]:
            number, reached = number + 1, (chromosome, last)
        numbers[name], reached = number, (chromosome, max(reached[1], last))
    return numbers


def simple_columns(
    rated: Sequence[Rated], spans: Mapping[str, tuple[str, int, int]]
) -> dict[str, np.ndarray]:
    """Return what needs no run: see `loci`."""
    before, after = (np.array([cut(one, which) for one in rated]) for which in ("reference", "alternate"))
    changed = np.array(
        [4 * "ACGT".find(b[REACH]) + "ACGT".find(a[REACH]) for b, a in zip(before, after, strict=True)]
    )
    to_ends = np.array(
        [(one.place[1] - spans[one.group][1], spans[one.group][2] - one.place[1]) for one in rated], float
    )
    around = np.array([sum(base in "GC" for base in bases) / len(bases) for bases in before])
    falling = [np.exp(-to_ends / scale) for scale in SCALES]
    place = np.concatenate([*falling, to_ends / to_ends.sum(1, keepdims=True), around[:, None]], 1)
    read, new = count(before), count(after)
    return {"changes": np.eye(16)[changed], "place": place, "words": np.concatenate([new - read, read], 1)}


def cut(one: Rated, which: str) -> str:
    """Return the bases around a variant; N stands for those beyond the window."""
    window: bytes = getattr(one, which)
    at = next(i for i, (a, b) in enumerate(zip(one.reference, one.alternate, strict=True)) if a != b)
    bases = b"N" * REACH + window + b"N" * REACH
    return bases[at : at + 2 * REACH + 1].decode()


def count(bases: np.ndarray, longest: int = 4) -> np.ndarray:
    """Return how often each word of up to `longest` bases occurs, on both strands together."""
    import jax
    import jax.numpy as jnp

    from jaxblt.data.vocab import OFFSET
    from jaxblt.models import WordsConfig
    from jaxblt.models.word_features import count_words

    ids = np.array([list(one.encode()) for one in bases], np.int32) + OFFSET
    config = WordsConfig("dna", longest, both_strands=True)
    counted = jax.jit(lambda rows: count_words(rows, jnp.ones(rows.shape, bool), config))
    return np.asarray(counted(ids), np.float64)


def run_columns(rated: Sequence[Rated], name: str, batch_size: int) -> dict[str, np.ndarray]:
    """Return the log-likelihood ratio of a run, and its mean states of the reference and how they move."""
    import jaxblt

    run = jaxblt.load(name)
    ratio = rate_by_run(run, rated, both_strands=True, batch_size=batch_size)[:, None]
    before, after = (
        mean_states(run, [cut(one, which) for one in rated]) for which in ("reference", "alternate")
    )
    moved = after - before
    return {"ratio": ratio, "states": np.concatenate([ratio, before, moved], 1)}


def mean_states(run: Any, bases: Sequence[str]) -> np.ndarray:
    """Return the run's mean states of each stretch, the mean over both strands."""
    once = list(dict.fromkeys(one.strip("N").encode() for one in bases))
    both = [
        np.array(run.embed(strand, window=2 * REACH + 3, batch_size=512).arrays)
        for strand in (once, [complement(one) for one in once])
    ]
    states = dict(zip(once, (both[0] + both[1]) / 2, strict=True))
    return np.array([states[one.strip("N").encode()] for one in bases])


def complement(bases: bytes) -> bytes:
    """Return the other strand."""
    return bases.translate(TURN)[::-1]


def predict(table: Table, folds: int, seed: int) -> dict[str, np.ndarray]:
    """Return the predictions of all models, each of a variant whose locus the model never saw."""
    order = np.random.default_rng(seed).permutation(int(table.locus.max()) + 1)
    fold = np.empty(len(order), int)
    fold[order] = np.arange(len(order)) % folds
    of = fold[table.locus]
    found = {name: np.empty(len(of)) for name in table.columns}
    if "hybrid" in found:
        found["chosen"] = np.empty(len(of))
    for test in range(folds):
        held = (test + 1) % folds
        parts = [(of != test) & (of != held), of == held, of == test]
        scores: dict[str, float] = {}
        for name, x in table.columns.items():
            if name == "ratio":
                found[name][parts[2]] = x[parts[2], 0]
                continue
            scores[name], found[name][parts[2]] = fit_ridge(x, table, parts)
        if "hybrid" in found:
            better = max(("simple", "hybrid"), key=scores.__getitem__)
            found["chosen"][parts[2]] = found[better][parts[2]]
    return found


def fit_ridge(x: np.ndarray, table: Table, parts: Sequence[np.ndarray]) -> tuple[float, np.ndarray]:
    """Return the figure on validation of the penalty that is the best there, and its predictions of the test."""
    train, held, test = parts
    center, scale = x[train].mean(0), x[train].std(0) + 1e-9
    shown, y = (x[train] - center) / scale, table.label[train]
    square, product = shown.T @ shown / len(y), shown.T @ (y - y.mean()) / len(y)
    best: tuple[float, np.ndarray] = (-np.inf, y)
    for penalty in PENALTIES:
        weights = np.linalg.solve(square + penalty * np.eye(len(square)), product)
        rate = (x - center) / scale @ weights
        figure = float(np.nanmean(by_locus(np.where(held, rate, np.nan), table)))
        best = max(best, (figure, rate[test]), key=lambda found: found[0])
    return best


def by_locus(rate: np.ndarray, table: Table) -> np.ndarray:
    """Return Spearman's coefficient of each locus, the mean over its experiments; NaN of one without predictions."""
    from scipy.stats import spearmanr

    found = np.full(int(table.locus.max()) + 1, np.nan)
    for number in range(len(found)):
        each = []
        for name in np.unique(table.group[table.locus == number]):
            own = (table.group == name) & np.isfinite(rate)
            if own.any():
                each.append(spearmanr(rate[own], table.label[own])[0] if np.ptp(rate[own]) > 0 else 0.0)
        if each:
            found[number] = np.mean(each)
    return found


def gain_interval(gains: np.ndarray) -> dict[str, float]:
    """Return the mean gain over loci with its 95 % interval, by resampled loci."""
    drawn = np.random.default_rng(0).choice(gains, (10_000, len(gains))).mean(1)
    low, high = np.quantile(drawn, (0.025, 0.975))
    return {"value": float(gains.mean()), "low": float(low), "high": float(high)}
