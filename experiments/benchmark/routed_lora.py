"""Adapters of text whose domain changes unmarked: python -m experiments.benchmark routed_lora BASE_RUN --out FILE."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import tyro

from experiments.benchmark._arms import OVER_ORACLE, Settings
from jaxblt.validation import whole

if TYPE_CHECKING:
    from experiments.benchmark._adaptation import Program, Scored
    from experiments.benchmark._arms import Arm
    from experiments.benchmark._mix import Mix


def routed_lora(
    base_run: Annotated[str, tyro.conf.Positional],
    out: str,
    data: str = "data",
    mix: Literal["conflict", "natural"] = "conflict",
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
    seconds and as many again.

    A call with the file of an earlier one goes on with it: arms that the file has are not measured again, except an
    oracle whose experts others need. So the arms fit into calls of ten minutes, four of three seeds each.

    Args:
      base_run: folder of a byte model's run without patches, such as one of the recipe books_512.
      out: file for the figures as JSON, written anew after each arm, or the file of an earlier call.
      data: folder with books/train/*.txt and books/test/*.txt; the natural mix also reads reviews/train*.tsv,
        reviews/test*.tsv, ecoli/*.fa, ecoli/*.faa and languages/*.txt. Names may end in .xz.
      mix: books under permutations of the letters, which contradict each other; or five kinds of text.
      domains: permutations of the conflict mix, the first of them none.
      arms: names of `experiments.benchmark._arms.make_arm`; what is compared needs static and oracle, and
        so do mixed, reinforced and ppo.
      seeds: 0, 1, ... of so many for each arm.
      settings: of all of them.
    """
    import jax

    import jaxblt
    from experiments.benchmark._adaptation import Program, compile_all
    from experiments.benchmark._arms import check_sizes, make_arm
    from experiments.benchmark._paired import compared
    from experiments.benchmark._pieces import read_back
    from experiments.benchmark._schema import save
    from jaxblt.adapters import join_params
    from jaxblt.training.flops import count_params

    whole("--seeds", seeds, least=1, why=": each arm is trained once a seed")
    run = jaxblt.load(base_run, dtype=settings.dtype)
    train, test, names = open_mix(data, mix, domains, settings)
    said: dict[str, Any] = {"settings": asdict(settings), "mix": mix, "domains": names, "seed_count": seeds}
    said["base_run"] = {"run": run.recipe.name, "step": run.step, "parameters": count_params(run.params)[0]}
    earlier = read_back(out, said)
    there = earlier.get("arms", {})
    made = in_order({name: make_arm(name, settings, len(names)) for name in left_over(arms, there)})
    programs = {name: Program(arm, rows_apart(run.recipe.model), settings) for name, arm in made.items()}
    compile_all(programs, run.params, train, test, print)
    counts = count_trained(programs, there)
    if matched := [name for name in counts if make_arm(name, settings, len(names)).matched]:
        check_sizes(counts, matched)
    documents = {name: np.asarray(bits) for name, bits in earlier.get("documents", {}).items()}
    figures: dict[str, Any] = said | {"base": earlier.get("base"), "arms": dict(there)}
    if not earlier:
        first = next(iter(programs.values()))
        start = first.scored(run.params, first.start(run.params, jax.random.key(0))[0], test)
        documents["base"], figures["base"] = _by_document(start), said["base_run"] | _figures(start, names)
    oracles: list[Any] = []
    for name, program in programs.items():
        over = made[name].over_oracle
        bases = [join_params(run.params, oracle) for oracle in oracles] if over else [run.params] * seeds
        found, bits, trained = measure_arm(program, bases, train, test, names)
        oracles = trained if name == "oracle" else oracles
        if name not in there:
            figures["arms"][name], documents[name] = {"parameters": counts[name], **found}, bits
        figures["compared"] = compared(documents)
        figures["documents"] = {name: bits.tolist() for name, bits in documents.items()}
        save("routed_lora", out, figures)
    return figures


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


def open_mix(data: str, mix: str, domains: int, settings: Settings) -> tuple["Mix", "Mix", list[str]]:
    """To train on and to test on, and the domains' names.

    Raises:
      ValueError: there is one domain alone, or a domain has less text than is read at once.
    """
    from experiments.benchmark._mix import check_texts, conflict_mix, natural_mix
    from experiments.benchmark._mix_files import read_books, read_natural

    if domains < 2:
        raise ValueError(f"--domains must be at least 2, got {domains}: a single one never changes")
    if mix == "natural":
        texts = read_natural(data)
        mixes, names = (natural_mix(texts.train), natural_mix(texts.test)), list(texts.train)
    else:
        train, test = (conflict_mix(text, domains, letters=settings.letters) for text in read_books(data))
        mixes, names = (train, test), [f"cipher {i}" for i in range(domains)]
    for each in mixes:
        check_texts(each, names, settings.length, settings.spans)
    return *mixes, names


def rows_apart(model: Any) -> Any:
    """A byte model's config for rows of one document each.

    Raises:
      ValueError: the model has patches.
    """
    from jaxblt.models import ByteLMConfig
    from jaxblt.models.row_layout import RowLayout

    if not isinstance(model, ByteLMConfig):
        raise ValueError(
            f"the base is a {type(model).__name__}, expected a ByteLMConfig: train one, such as books_512"
        )
    return model.in_rows(RowLayout(packed=False), RowLayout(packed=False))


def measure_arm(
    program: "Program", bases: Sequence[Any], train: "Mix", test: "Mix", domains: list[str]
) -> tuple[dict[str, Any], np.ndarray, list[Any]]:
    """An arm's figures of every seed, the bits per byte of each document as means over seeds, and what was trained.

    Args:
      program: of the arm.
      bases: the frozen parameters of each seed.
      train: what is trained on.
      test: what is scored.
      domains: their names.
    """
    runs, documents, kept = [], [], []
    for seed, base in enumerate(bases):
        trained, found = program.train(base, train, seed)
        kept.append(trained)
        scored = program.scored(base, trained, test)
        documents.append(_by_document(scored))
        runs.append({"seed": seed, **_figures(scored, domains), **found})
    mean = np.mean(documents, 0)
    return {"bits_per_byte": float(mean.mean()), "seeds": runs}, mean, kept


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


def _by_document(scored: "Scored") -> np.ndarray:
    return scored.nats.mean(1) / np.log(2)


def _figures(scored: "Scored", domains: list[str]) -> dict[str, Any]:
    from experiments.benchmark._paired import bits_by, by_distance

    nats, rows = scored.nats, scored.rows
    found: dict[str, Any] = {
        "bits_per_byte": float(_by_document(scored).mean()),
        "by_domain": dict(zip(domains, bits_by(nats, rows.target_domain, len(domains)), strict=True)),
        "by_distance": by_distance(nats, rows.since, nats.shape[1]),
    }
    if scored.picked is not None:
        found["purity"] = float(scored.picked.max(1).sum() / max(scored.picked.sum(), 1))
    return found
