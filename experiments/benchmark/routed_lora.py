"""Adapters of text whose domain changes unmarked: python -m experiments.benchmark routed_lora BASE_RUN --out FILE."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import tyro

from experiments.benchmark._arms import OVER_ORACLE, Settings
from jaxblt.validation import whole

if TYPE_CHECKING:
    from experiments.benchmark._adaptation import Program
    from experiments.benchmark._arms import Arm
    from experiments.benchmark._bases import Base
    from experiments.benchmark._mix import Mix
    from experiments.benchmark._reviews import Reviews
    from experiments.benchmark._scored import Scored
    from jaxblt import Run


def routed_lora(
    base_run: Annotated[str, tyro.conf.Positional],
    out: str,
    data: str = "data",
    mix: Literal["conflict", "natural", "reviews"] = "conflict",
    domains: int = 8,
    arms: tuple[str, ...] = (
        *("static", "oracle", "chunk", "token", "imitated", "bank", "prefix"),
        *("straight", "mixed", "reinforced", "ppo"),
    ),
    seeds: int = 3,
    settings: Settings = Settings(),
) -> dict[str, Any]:
    """Adapts a frozen model to a mix of domains by static, routed and labelled adapters, each for the same time.

    Arms have equal numbers of trained parameters, except static_one and full. Their test rows are the same, and
    figures are paired over them. `compared` has intervals by the BCa bootstrap, and p of Wilcoxon's test with q over
    all arms (Benjamini and Hochberg). Every seed stands in `arms`. Purity is the share of bytes whose domain is the one
    that most often picks the same expert.

    Arms over the oracle train a router alone, over the experts that the oracle left with the same seed. They take its
    seconds and as many again. A call with the file of an earlier one goes on with it, over a base of the same content
    hash: only an oracle whose experts others need is measured again. Four arms of three seeds fit into ten minutes.

    A base with patches takes the arms without experts. Its patcher is calibrated on the mix, and `overflow` is the
    share of boundaries that found no slot: BLT_RUN --mix natural --arms static chunk --seeds 1 --settings.hidden 32

    Reviews end in their label, one a row. `accuracy` is the share of test reviews whose own label is the likeliest,
    and `fewer_errors` compares arms by it: BASE_RUN --mix reviews --arms static prefix --settings.length 1024
    --settings.rows 32 --settings.test-rows 4096

    Args:
      base_run: folder of a run of a byte model, such as one of the recipe books_512, or of one with patches.
      out: file for the figures as JSON, written anew after each arm, or the file of an earlier call.
      data: folder with books/train/*.txt and books/test/*.txt; the natural mix also reads reviews/train*.tsv,
        reviews/test*.tsv, ecoli/*.fa, ecoli/*.faa and languages/*.txt. Names may end in .xz.
      mix: books under permutations of the letters, which contradict each other; five kinds of text; or reviews with
        their labels, which need no more than reviews/*.tsv.
      domains: permutations of the conflict mix, the first of them none.
      arms: names of `experiments.benchmark._arms.make_arm`, which tells them all; what is compared needs static and
        oracle, and so do mixed, reinforced and ppo.
      seeds: 0, 1, ... of so many for each arm.
      settings: of all of them.
    """
    import jaxblt
    from experiments.benchmark._arms import check_sizes, make_arm
    from experiments.benchmark._bases import open_base
    from experiments.benchmark._pieces import read_back
    from experiments.benchmark._scored import figures_of
    from jaxblt.adapters import join_params

    whole("--seeds", seeds, least=1, why=": each arm is trained once a seed")
    run = jaxblt.load(base_run, dtype=settings.dtype)
    train, test, names = open_mix(data, mix, domains, settings)
    base = open_base(run, train, settings)
    said: dict[str, Any] = {"settings": asdict(settings), "mix": mix, "domains": names, "seed_count": seeds}
    said["base_run"] = base.says(run)
    earlier = read_back(out, said)
    there = earlier.get("arms", {})
    made = in_order({name: make_arm(name, settings, len(names)) for name in left_over(arms, there)})
    programs, given = compiled(made, run, base, train, test, settings)
    counts = count_trained(programs, there)
    check_sizes(counts, [name for name in counts if make_arm(name, settings, len(names)).matched])
    figures: dict[str, Any] = said | {"base": earlier.get("base"), "arms": dict(there)}
    of_rows = {kind: dict(earlier.get(kind, {})) for kind in ("documents", "errors")}
    if not earlier:
        found = score_base(programs, given, test)
        figures["base"] = said["base_run"] | figures_of(found, names)
        _keep(of_rows, "base", [found])
    oracles: list[Any] = []
    for name, program in programs.items():
        under, own = given[name]
        bases = [join_params(under, e) for e in oracles] if program.arm.over_oracle else [under] * seeds
        found, scores, trained = measure_arm(program, bases, own, test, names)
        oracles = trained if name == "oracle" else oracles
        if name not in there:
            figures["arms"][name] = {"parameters": counts[name], **found}
            _keep(of_rows, name, scores)
        _save(out, figures, of_rows)
    return figures


def compiled(
    made: "Mapping[str, Arm]",
    run: "Run",
    base: "Base",
    train: "Mix | Reviews",
    test: "Mix | Reviews",
    settings: Settings,
) -> "tuple[dict[str, Program], dict[str, tuple[Any, Any]]]":
    """By arm its program, and its frozen parameters with what it is trained on."""
    from experiments.benchmark._adaptation import Program, compile_all
    from experiments.benchmark._bases import check_base, given_to

    check_base(base, made, test)
    programs = {name: Program(arm, base.model, settings, base.task) for name, arm in made.items()}
    given = {name: given_to(arm, run, base, train, settings) for name, arm in made.items()}
    compile_all(programs, given, test, print)
    return programs, given


def count_trained(programs: "Mapping[str, Program]", there: "Mapping[str, Any]") -> dict[str, int]:
    """Trained parameters by arm, of those over the oracle with their experts; also of the arms that a file has."""
    counts = {name: program.parameters for name, program in programs.items()}
    counts |= {name: counts[name] + counts["oracle"] for name, p in programs.items() if p.arm.over_oracle}
    return counts | {name: found["parameters"] for name, found in there.items()}


def left_over(arms: Sequence[str], there: "Mapping[str, Any]") -> list[str]:
    """The arms that an earlier call did not measure; with the oracle, whose experts it did not keep, if one needs it.

    Raises:
      ValueError: none is left.
    """
    left = [name for name in arms if name not in there]
    if not left:
        raise ValueError(f"--out has all of --arms {', '.join(arms)} already: name others, or another file")
    if "oracle" in there and any(name in OVER_ORACLE for name in left):
        left.append("oracle")
    return left


def open_mix(
    data: str, mix: str, domains: int, settings: Settings
) -> tuple["Mix | Reviews", "Mix | Reviews", list[str]]:
    """To train on and to test on, and the domains' names.

    Raises:
      ValueError: there is one domain alone, or a domain has less text than is read at once.
    """
    from experiments.benchmark._mix import check_texts, conflict_mix, natural_mix
    from experiments.benchmark._mix_files import read_books, read_natural, read_reviews
    from experiments.benchmark._reviews import open_reviews

    if domains < 2:
        raise ValueError(f"--domains must be at least 2, got {domains}: a single one never changes")
    if mix == "reviews":
        parts = read_reviews(data)
        labels = sorted({label for label, _ in parts[0]})
        train, test = (open_reviews(part, labels, settings.label_weight) for part in parts)
        return train, test, labels
    if mix == "natural":
        texts = read_natural(data)
        mixes, names = (natural_mix(texts.train), natural_mix(texts.test)), list(texts.train)
    else:
        train, test = (conflict_mix(text, domains, letters=settings.letters) for text in read_books(data))
        mixes, names = (train, test), [f"cipher {i}" for i in range(domains)]
    for each in mixes:
        check_texts(each, names, settings.length, settings.spans)
    return *mixes, names


def score_base(
    programs: "Mapping[str, Program]", given: "Mapping[str, tuple[Any, Any]]", test: "Mix | Reviews"
) -> "Scored":
    """The base's own score: every arm has it before training."""
    import jax

    program, base = next((program, given[name][0]) for name, program in programs.items())
    return program.scored(base, program.start(base, jax.random.key(0))[0], test)


def measure_arm(
    program: "Program",
    bases: Sequence[Any],
    train: "Mix | Reviews",
    test: "Mix | Reviews",
    domains: list[str],
) -> tuple[dict[str, Any], "list[Scored]", list[Any]]:
    """An arm's figures of every seed, its scores and what was trained.

    Args:
      program: of the arm.
      bases: the frozen parameters of each seed.
      train: what is trained on.
      test: what is scored.
      domains: their names.
    """
    from experiments.benchmark._scored import figures_of

    runs, scores, kept = [], [], []
    for seed, base in enumerate(bases):
        trained, found = program.train(base, train, seed)
        kept.append(trained)
        scores.append(program.scored(base, trained, test))
        runs.append({"seed": seed, **figures_of(scores[-1], domains), **found})
    means = {
        n: float(np.mean([run[n] for run in runs])) for n in ("bits_per_byte", "accuracy") if n in runs[0]
    }
    return {**means, "seeds": runs}, scores, kept


def in_order(arms: "Mapping[str, Arm]") -> "dict[str, Arm]":
    """The arms with those over the oracle last.

    Raises:
      ValueError: there are such arms, and the oracle is not among the others.
    """
    over = {name: arm for name, arm in arms.items() if arm.over_oracle}
    if over and "oracle" not in arms:
        raise ValueError(
            f"--arms {', '.join(over)} take the experts of oracle, which is not among them: add oracle"
        )
    return {**{name: arm for name, arm in arms.items() if name not in over}, **over}


def _keep(of_rows: dict[str, dict[str, Any]], name: str, scores: "Sequence[Scored]") -> None:
    """Puts an arm's bits per byte and errors beside those of the others, as means over seeds."""
    of_rows["documents"][name] = np.mean([scored.bits_per_byte for scored in scores], 0).tolist()
    rights = [scored.right for scored in scores if scored.right is not None]
    if rights:
        of_rows["errors"][name] = (1.0 - np.mean(rights, 0)).tolist()


def _save(out: str, figures: dict[str, Any], of_rows: "Mapping[str, Mapping[str, Any]]") -> None:
    """Writes the figures, with comparisons of what they have by now."""
    from experiments.benchmark._paired import compared, less_than_static
    from experiments.benchmark._schema import save

    figures |= {kind: rows for kind, rows in of_rows.items() if rows}
    documents, errors = (
        {name: np.asarray(values) for name, values in rows.items()} for rows in of_rows.values()
    )
    figures["compared"] = compared(documents) | ({"fewer_errors": less_than_static(errors)} if errors else {})
    save("routed_lora", out, figures)
