"""A fine-tuned run's test figures beside baselines on the same split, and a line where a simple one is ahead."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxblt.data.labelled import LabelledDataConfig
from jaxblt.data.words import kind_of
from jaxblt.models.word_features import LONGEST

FIGURES = {"class": ("accuracy", "mcc"), "number": ("rmse", "spearman")}
"""By what records are labelled with; the last one tells who is ahead, and more of it is better."""
MOST_FITTED = 200_000
"""Training records times classes from which on the regression takes minutes, and is left out."""


class Comparison(NamedTuple):
    """Baselines by name with their figures, and lines to print."""

    baselines: dict[str, dict[str, float]]
    lines: tuple[str, ...]


def is_comparable(data: Any) -> bool:
    """Return whether baselines know such data: one class or number of each record."""
    return isinstance(data, LabelledDataConfig) and data.target in FIGURES and not data.tasks


def compare(data: LabelledDataConfig, found: Mapping[str, float]) -> Comparison:
    """Return the baselines' figures on the test split, beside those of a run.

    Args:
      data: of the run.
      found: figures of the run on the test split.
    """
    figures = FIGURES[data.target]
    baselines, notes = _numbers(data) if data.target == "number" else _classes(data)
    kept = {name: {figure: scored[figure] for figure in figures} for name, scored in baselines.items()}
    # Give a run whose answers are all equal the coefficient of the mean
    own = {figure: found.get(figure, 0.0) for figure in figures}
    lines = (*_table({"this run": own, **kept}, figures), *notes, _verdict(kept, own, figures[-1]))
    return Comparison(kept, lines)


def _numbers(data: LabelledDataConfig) -> tuple[dict[str, dict[str, float]], list[str]]:
    from jaxblt.evaluation.number_baselines import number_baselines

    return number_baselines(data), []


def _classes(data: LabelledDataConfig) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Return baselines and notes of what was left out."""
    from jaxblt.evaluation.label_baselines import label_baselines, read_split, score_markov, score_nearest

    parts, notes = read_split(data), []
    sequences, y = parts["train"]
    if len(y) * len(data.classes) > MOST_FITTED:
        notes.append(
            f"baseline kmers left out: its fit to {len(y):,} records of {len(data.classes)} classes takes minutes; "
            "jaxblt.evaluation.label_baselines.score_kmers runs it"
        )
        return {"markov": score_markov(parts), "nearest": score_nearest(parts)}, notes
    is_dna = kind_of(sequences) == "dna"
    try:
        return label_baselines(parts, **({} if is_dna else {"longest": (LONGEST["protein"],)})), notes
    except ImportError as error:
        notes.append(f"baseline kmers left out: {error}")
    return {"markov": score_markov(parts), "nearest": score_nearest(parts)}, notes


def _table(rows: Mapping[str, Mapping[str, float]], figures: tuple[str, ...]) -> list[str]:
    header = f"{'test split':12}" + "".join(f"{name:>10}" for name in figures)
    lines = [
        f"{name:12}" + "".join(f"{row[figure]:10.4f}" for figure in figures) for name, row in rows.items()
    ]
    return [header, *lines]


def _verdict(baselines: Mapping[str, Mapping[str, float]], own: Mapping[str, float], figure: str) -> str:
    best = max(baselines, key=lambda name: baselines[name][figure])
    theirs, ours = baselines[best][figure], own[figure]
    if theirs > ours:
        return (
            f"a simple baseline is ahead: {best} has {figure} {theirs:.4f}, and this run {ours:.4f}; more "
            "records, a base run of such sequences, or more steps may help"
        )
    return f"this run is no worse than the baselines: {figure} {ours:.4f}, and {best} {theirs:.4f}"
