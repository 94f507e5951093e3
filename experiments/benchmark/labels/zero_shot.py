"""Effects of unseen variants: python -m experiments.benchmark zero_shot brca1 FOLDER --run RUN --out FILE."""

import csv
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import tyro

Kind = Literal["brca1", "mpra", "dms"]
ORDER = 5
"""Bases of context of the Markov model."""
TURN = bytes.maketrans(b"ACGT", b"TGCA")
LEAST_BARCODES = 10
"""Barcodes from which on a variant of a reporter assay counts (Kircher et al. 2019)."""


class Rated(NamedTuple):
    """A variant: windows with the reference and the alternate, a measured number, where it lies, and of what.

    Attributes:
      reference, alternate: windows.
      label: measured; higher is fitter, or more expression.
      place: changed position, or positions.
      group: experiment.
    """

    reference: bytes
    alternate: bytes
    label: float
    place: Any
    group: str


class Variants(NamedTuple):
    """Variants, and the DNA that a Markov model is counted on; b"" for proteins."""

    rated: list[Rated]
    text: bytes
    lost: np.ndarray | None = None


def zero_shot(
    kind: Annotated[Kind, tyro.conf.Positional],
    path: Annotated[str, tyro.conf.Positional],
    run: str,
    out: str,
    context: int = 512,
    most: int = 2000,
    batch_size: int = 32,
    seed: int = 0,
) -> dict[str, Any]:
    """Rate variants by log p(alternate) - log p(reference) of a run, beside simple models on the same variants.

    Figures are Spearman's coefficients with what was measured, and of BRCA1 the AUROC of loss of function too. `markov`
    is the same ratio by an order-5 Markov model counted on the reference. `place` is no zero-shot model: it gives a
    variant the mean measured number of the others at its position, or of all others where there is none. `changes` is
    minus the number of changed letters. DNA is read on both strands.

    Args:
      kind: BRCA1 (Findlay et al. 2018), reporter assays (Kircher et al. 2019), or a deep mutational scan (nn4dms).
      path: folder with snvs.tsv and the chromosome's FASTA; variants.tsv; or a scan's table. May end in `.xz`.
      run: folder or name of a run that predicts the next byte.
      out: file for the figures as JSON.
      context: letters of a window of DNA at most.
      most: variants that are drawn.
      batch_size: windows that are read at once.
      seed: of the draw.
    """
    import jaxblt
    from experiments.benchmark.figures.saved import save

    read: dict[str, Callable[[Path, int], Variants]] = {"brca1": brca1, "mpra": mpra, "dms": scan}
    found = read[kind](Path(path), context)
    drawn = np.sort(np.random.default_rng(seed).permutation(len(found.rated))[:most])
    rated = [found.rated[i] for i in drawn]
    lost = None if found.lost is None else found.lost[drawn]
    rates = {"run": rate_by_run(jaxblt.load(run), rated, both_strands=kind != "dms", batch_size=batch_size)}
    rates |= baselines(rated, found.text)
    settings = {"context": context, "most": most, "seed": seed, "order": ORDER}
    figures = {"set": kind, "run": Path(run).name, "settings": settings, "variants": len(rated)}
    figures["models"] = {name: figures_of(rate, rated, lost) for name, rate in rates.items()}
    save("zero_shot", out, figures)
    return figures


def rate_by_run(run: Any, rated: Sequence[Rated], *, both_strands: bool, batch_size: int) -> np.ndarray:
    """Return log p(alternate) - log p(reference) of each variant in nats; each window is read once."""
    windows = list(dict.fromkeys(window for one in rated for window in (one.reference, one.alternate)))
    longest = min(run.recipe.data.seq_len, max(map(len, windows)) + 2)
    scores = run.score(windows, both_strands=both_strands, window=longest, batch_size=batch_size)
    nats = dict(zip(windows, scores.log_likelihood, strict=True))
    return np.array([nats[one.alternate] - nats[one.reference] for one in rated])


def baselines(rated: Sequence[Rated], text: bytes) -> dict[str, np.ndarray]:
    """Return the rates of the simple models, see `zero_shot`."""
    from jaxblt.evaluation import fit_markov

    places: dict[Any, list[float]] = defaultdict(list)
    for one in rated:
        places[one.group, one.place].append(one.label)
    mean = float(np.mean([one.label for one in rated]))

    def others(one: Rated) -> float:
        held = places[one.group, one.place]
        return (sum(held) - one.label) / (len(held) - 1) if len(held) > 1 else mean

    changes = [-sum(a != b for a, b in zip(one.reference, one.alternate, strict=True)) for one in rated]
    rates = {"place": np.array([others(one) for one in rated])}
    if len(set(changes)) > 1:
        rates["changes"] = np.array(changes, float)
    if text:
        model = fit_markov(text, order=ORDER)
        rates["markov"] = np.array(
            [_nats(model, one.alternate) - _nats(model, one.reference) for one in rated]
        )
    return rates


def _nats(model: Any, window: bytes) -> float:
    both = (window, window.translate(TURN)[::-1])
    return -float(np.mean([model.bits(strand).sum() for strand in both]) * np.log(2))


def figures_of(rate: np.ndarray, rated: Sequence[Rated], lost: np.ndarray | None) -> dict[str, Any]:
    """Return Spearman's coefficient as the mean over groups of ten variants or more, their number, and AUROC.

    A group that a model rates all alike is left out; the coefficient is None if none is left.
    """
    from scipy.stats import spearmanr

    from jaxblt.training.objectives.label_scores import auroc

    labels, groups = np.array([one.label for one in rated]), np.array([one.group for one in rated])
    each = []
    for group in np.unique(groups):
        own = groups == group
        if own.sum() >= 10 and np.ptp(rate[own]) > 0:
            each.append(float(spearmanr(rate[own], labels[own])[0]))
    found: dict[str, Any] = {"spearman": float(np.mean(each)) if each else None, "groups": len(each)}
    if lost is not None:
        found["auroc"] = float(auroc(-rate, lost))
    return found


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
        Rated(
            *windows(plus, int(p) - start, row["alt"], context), float(row["function.score.mean"]), int(p), ""
        )
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


def mpra(file: Path, context: int) -> Variants:
    """Return single-base variants of reporter assays; a base that no variant names is N."""
    table = [row for row in _table(file) if "NA" not in (row["Pos"], row["Barcodes"], row["Coefficient"])]
    rows = [row for row in table if row["Alt"] in list("ACGT") and int(row["Barcodes"]) >= LEAST_BARCODES]
    elements: dict[str, dict[int, str]] = defaultdict(dict)
    for row in table:
        elements[row["Element"]][int(row["Pos"])] = row["Ref"]
    spans = {name: (min(bases), max(bases)) for name, bases in elements.items()}
    texts = {
        name: "".join(elements[name].get(p, "N") for p in range(a, b + 1)).encode()
        for name, (a, b) in spans.items()
    }
    rated = []
    for row in rows:
        name, place = row["Element"], int(row["Pos"])
        pair = windows(texts[name], place - spans[name][0], row["Alt"], context)
        rated.append(Rated(*pair, float(row["Coefficient"]), (row["Chrom"], place), name))
    return Variants(rated, b"N".join(texts.values()))


def scan(file: Path, context: int) -> Variants:
    """Return the variants of a deep mutational scan, whole proteins whatever the context."""
    variants = read_variants(file)
    length = len(variants[0][0])
    columns = [[s[i] for s, *_, places in variants if i not in places][:1] for i in range(length)]
    wild = "".join(held[0] if held else "X" for held in columns).encode()
    return Variants([Rated(wild, s.encode(), y, places, "") for s, y, places in variants], b"")


def read_variants(file: Path) -> list[tuple[str, float, tuple[int, ...]]]:
    """Return sequence, score and changed positions of each variant whose letters are amino acids.

    The wild type's letters are those that variants say; a position that none changes is X.

    Raises:
      ValueError: the table has no column "variant" or "score", or two variants disagree on the wild type.
    """
    from jaxblt.models.word_features import LETTERS

    rows = _table(file)
    if not rows or not {"variant", "score"} <= rows[0].keys():
        raise ValueError(f"{file} has no columns 'variant' and 'score' of tab-separated values")
    changes = [[(m[0], int(m[1:-1]), m[-1]) for m in row["variant"].split(",")] for row in rows]
    wild: dict[int, str] = {}
    for letter, place, _ in (change for found in changes for change in found):
        if wild.setdefault(place, letter) != letter:
            raise ValueError(f"{file}: variants say {wild[place]} and {letter} of position {place}")
    first, last = min(wild), max(wild)
    letters = [wild.get(place, "X") for place in range(first, last + 1)]
    variants = []
    for row, found in zip(rows, changes, strict=True):
        if row["score"] in ("", "nan") or any(new not in LETTERS["protein"] for *_, new in found):
            continue
        own = letters.copy()
        for _, place, new in found:
            own[place - first] = new
        variants.append(("".join(own), float(row["score"]), tuple(place - first for _, place, _ in found)))
    return variants


def windows(text: bytes, index: int, alternate: str, context: int) -> tuple[bytes, bytes]:
    """Return the window round a base, and the same with another base in its place."""
    start = max(min(index - context // 2, len(text) - context), 0)
    window = text[start : start + context]
    return window, window[: index - start] + alternate.encode() + window[index - start + 1 :]


def _table(file: Path) -> list[dict[str, str]]:
    from jaxblt.data.sources.opening import read_lines

    return list(csv.DictReader(read_lines(file), delimiter="\t"))
