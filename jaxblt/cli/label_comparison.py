"""A fine-tuned run's test figures beside baselines on the same split, and a line where a simple one is ahead."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxblt.data.labelled import LabelledDataConfig
from jaxblt.data.words import kind_of
from jaxblt.models.word_features import LONGEST

FIGURES = ("accuracy", "mcc")
MOST_FITTED = 200_000
"""Training records times classes from which on the regression takes minutes, and is left out."""


class Comparison(NamedTuple):
    """Baselines by name with their figures, and lines to print."""

    baselines: dict[str, dict[str, float]]
    lines: tuple[str, ...]


def is_comparable(data: Any) -> bool:
    """Return whether baselines know such data: one class of each record."""
    return isinstance(data, LabelledDataConfig) and data.target == "class" and not data.tasks


def compare(data: LabelledDataConfig, found: Mapping[str, float]) -> Comparison:
    """Return the baselines' figures on the test split, beside those of a run.

    Args:
      data: of the run.
      found: figures of the run on the test split.
    """
    from jaxblt.evaluation.label_baselines import label_baselines, read_split, score_markov, score_nearest

    parts, notes = read_split(data), []
    sequences, y = parts["train"]
    if len(y) * len(data.classes) > MOST_FITTED:
        notes.append(
            f"baseline kmers left out: its fit to {len(y):,} records of {len(data.classes)} classes takes minutes; "
            "jaxblt.evaluation.label_baselines.score_kmers runs it"
        )
        baselines = {"markov": score_markov(parts), "nearest": score_nearest(parts)}
    else:
        is_dna = kind_of(sequences) == "dna"
        try:
            baselines = label_baselines(parts, **({} if is_dna else {"longest": (LONGEST["protein"],)}))
        except ImportError as error:
            notes.append(f"baseline kmers left out: {error}")
            baselines = {"markov": score_markov(parts), "nearest": score_nearest(parts)}
    kept = {name: {figure: scored[figure] for figure in FIGURES} for name, scored in baselines.items()}
    return Comparison(kept, (*_table({"this run": found, **kept}), *notes, _verdict(kept, found["mcc"])))


def _table(rows: Mapping[str, Mapping[str, float]]) -> list[str]:
    header = f"{'test split':12}" + "".join(f"{name:>10}" for name in FIGURES)
    lines = [
        f"{name:12}" + "".join(f"{row[figure]:10.4f}" for figure in FIGURES) for name, row in rows.items()
    ]
    return [header, *lines]


def _verdict(baselines: Mapping[str, Mapping[str, float]], mcc: float) -> str:
    best = max(baselines, key=lambda name: baselines[name]["mcc"])
    if baselines[best]["mcc"] > mcc:
        return (
            f"a simple baseline is ahead: {best} has mcc {baselines[best]['mcc']:.4f}, and this run {mcc:.4f}; more "
            "records, a base run of such sequences, or more steps may help"
        )
    return f"this run is no worse than the baselines: mcc {mcc:.4f}, and {best} {baselines[best]['mcc']:.4f}"
