"""Effects of unseen variants of BRCA1: python -m experiments.benchmark zero_shot FOLDER --run RUN --out FILE."""

import csv
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import tyro

ORDER = 5
"""Bases of context of the Markov model."""
TURN = bytes.maketrans(b"ACGT", b"TGCA")


class Rated(NamedTuple):
    """A variant: windows with the reference and the alternate, a measured number, and its position.

    Attributes:
      reference, alternate: windows.
      label: measured; higher is fitter.
      place: changed position.
    """

    reference: bytes
    alternate: bytes
    label: float
    place: int


class Variants(NamedTuple):
    """Variants, the DNA that a Markov model is counted on, and which variants lose the function."""

    rated: list[Rated]
    text: bytes
    lost: np.ndarray


def zero_shot(
    path: Annotated[str, tyro.conf.Positional],
    run: str,
    out: str,
    context: int = 512,
    most: int = 2000,
    batch_size: int = 32,
    seed: int = 0,
) -> dict[str, Any]:
    """Rate variants by log p(alternate) - log p(reference) of a run, beside simple models on the same variants.

    Figures are Spearman's coefficient with what was measured, and the AUROC of loss of function. `markov` is the same
    ratio by an order-5 Markov model counted on the reference. `place` is no zero-shot model: it gives a variant the
    mean measured number of the others at its position, or of all others where there is none. DNA is read on both
    strands. Variants are those of Findlay et al. 2018.

    Args:
      path: folder with snvs.tsv and the chromosome's FASTA; they may end in `.xz`.
      run: folder or name of a run that predicts the next byte.
      out: file for the figures as JSON.
      context: letters of a window at most.
      most: variants that are drawn.
      batch_size: windows that are read at once.
      seed: of the draw.
    """
    import jaxblt
    from experiments.benchmark.figures.saved import save

    found = brca1(Path(path), context)
    drawn = np.sort(np.random.default_rng(seed).permutation(len(found.rated))[:most])
    rated, lost = [found.rated[i] for i in drawn], found.lost[drawn]
    rates = {
        "run": rate_by_run(jaxblt.load(run), rated, batch_size=batch_size),
        **baselines(rated, found.text),
    }
    settings = {"context": context, "most": most, "seed": seed, "order": ORDER}
    figures = {"set": "brca1", "run": Path(run).name, "settings": settings, "variants": len(rated)}
    figures["models"] = {name: figures_of(rate, rated, lost) for name, rate in rates.items()}
    save("zero_shot", out, figures)
    return figures


def rate_by_run(run: Any, rated: Sequence[Rated], *, batch_size: int) -> np.ndarray:
    """Return log p(alternate) - log p(reference) of each variant in nats; each window is read once."""
    windows = list(dict.fromkeys(window for one in rated for window in (one.reference, one.alternate)))
    longest = min(run.recipe.data.seq_len, max(map(len, windows)) + 2)
    scores = run.score(windows, both_strands=True, window=longest, batch_size=batch_size)
    nats = dict(zip(windows, scores.log_likelihood, strict=True))
    return np.array([nats[one.alternate] - nats[one.reference] for one in rated])


def baselines(rated: Sequence[Rated], text: bytes) -> dict[str, np.ndarray]:
    """Return the rates of the simple models, see `zero_shot`."""
    from jaxblt.evaluation import fit_markov

    places: dict[int, list[float]] = defaultdict(list)
    for one in rated:
        places[one.place].append(one.label)
    mean = float(np.mean([one.label for one in rated]))

    def others(one: Rated) -> float:
        held = places[one.place]
        return (sum(held) - one.label) / (len(held) - 1) if len(held) > 1 else mean

    model = fit_markov(text, order=ORDER)
    ratios = [_nats(model, one.alternate) - _nats(model, one.reference) for one in rated]
    return {"place": np.array(list(map(others, rated))), "markov": np.array(ratios)}


def _nats(model: Any, window: bytes) -> float:
    both = (window, window.translate(TURN)[::-1])
    return -float(np.mean([model.bits(strand).sum() for strand in both]) * np.log(2))


def figures_of(rate: np.ndarray, rated: Sequence[Rated], lost: np.ndarray) -> dict[str, Any]:
    """Return Spearman's coefficient, None where a model rates all variants alike, and the AUROC."""
    from scipy.stats import spearmanr

    from jaxblt.training.objectives.label_scores import auroc

    labels = [one.label for one in rated]
    spearman = float(spearmanr(rate, labels)[0]) if np.ptp(rate) > 0 else None
    return {"spearman": spearman, "auroc": float(auroc(-rate, lost))}


def brca1(folder: Path, context: int) -> Variants:
    """Return the variants of BRCA1 in windows of the chromosome, whose offset is found by matching.

    Raises:
      ValueError: no offset, or more than one, makes all reference bases agree.
    """
    from jaxblt.data.sources import FastaSource, read_document
    from jaxblt.data.sources.files import expand_one

    rows = _table(expand_one(folder / "snvs.tsv*"))
    strand = read_document(FastaSource(expand_one(folder / "*.fa*")), 0).upper()
    plus = strand.translate(TURN)[::-1]
    positions = np.array([int(row["position (hg19)"]) for row in rows])
    asked = np.frombuffer("".join(row["reference"] for row in rows).encode(), np.uint8)
    start = find_offset(np.frombuffer(plus, np.uint8), positions, asked)
    rated = [
        Rated(*windows(plus, int(p) - start, row["alt"], context), float(row["function.score.mean"]), int(p))
        for row, p in zip(rows, positions, strict=True)
    ]
    return Variants(rated, plus, np.array([row["func.class"] == "LOF" for row in rows]))


def find_offset(bases: np.ndarray, positions: np.ndarray, asked: np.ndarray) -> int:
    """Return the one number that positions are ahead of indexes of bases, so that all asked bases agree."""
    candidates = np.arange(positions.max() - len(bases) + 1, positions.min() + 1)
    for position, base in zip(positions, asked, strict=True):
        candidates = candidates[bases[position - candidates] == base]
    if len(candidates) != 1:
        raise ValueError(
            f"{len(candidates)} offsets make all {len(asked)} reference bases agree with the record, expected one: "
            "take the chromosome that the variants are of"
        )
    return int(candidates[0])


def windows(text: bytes, index: int, alternate: str, context: int) -> tuple[bytes, bytes]:
    """Return the window round a base, and the same with another base in its place."""
    start = max(min(index - context // 2, len(text) - context), 0)
    window = text[start : start + context]
    return window, window[: index - start] + alternate.encode() + window[index - start + 1 :]


def _table(file: Path) -> list[dict[str, str]]:
    from jaxblt.data.sources.opening import read_lines

    return list(csv.DictReader(read_lines(file), delimiter="\t"))
