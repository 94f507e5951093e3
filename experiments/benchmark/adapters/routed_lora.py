"""Adapters of text whose domain changes unmarked: python -m experiments.benchmark routed_lora BASE_RUN --out FILE."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import tyro

from experiments.benchmark.adapters.arms import Settings
from jaxblt.validation import whole

if TYPE_CHECKING:
    from experiments.benchmark.adapters.mixed_text import Mix
    from experiments.benchmark.adapters.scored import Scored
    from experiments.benchmark.adapters.training import Program


def routed_lora(
    base_run: Annotated[str, tyro.conf.Positional],
    out: str,
    data: str = "data",
    domains: int = 8,
    arms: tuple[str, ...] = ("static", "oracle", "chunk", "token", "token_imitated", "imitated_traces"),
    seeds: int = 3,
    settings: Settings = Settings(),
) -> dict[str, Any]:
    """Adapt a frozen model to a mix of domains by static, routed and labelled adapters, each for the same time.

    Arms have equal numbers of trained parameters. Their test rows are the same, and figures are paired
    over them. `compared` has intervals by the BCa bootstrap, and p of Wilcoxon's test with q over all arms (Benjamini
    and Hochberg). Every seed stands in `arms`. Purity is the share of bytes whose domain is the one that most often
    picks the same expert.

    A call with the file of an earlier one goes on with it, over a base of the same content hash. Four arms of three
    seeds fit into ten minutes.

    Args:
      base_run: folder of a run of a byte model, such as one of the recipe books_512.
      out: file for the figures as JSON, written anew after each arm, or the file of an earlier call.
      data: folder with books/train/*.txt and books/test/*.txt.
      domains: permutations of the letters of books, which contradict each other, the first of them none.
      arms: names that `make_arm` (adapters/arms.py) explains; what is compared needs static and oracle.
      seeds: 0, 1, ... of so many for each arm.
      settings: of all of them.
    """
    import jaxblt
    from experiments.benchmark.adapters.arms import check_sizes, make_arm
    from experiments.benchmark.adapters.bases import describe, model_of
    from experiments.benchmark.adapters.scored import figures_of
    from experiments.benchmark.adapters.training import Program, compile_all
    from experiments.benchmark.figures.resumed import read_back

    whole("--seeds", seeds, least=1, why=": each arm is trained once a seed")
    run = jaxblt.load(base_run, dtype=settings.dtype)
    train, test = open_mix(data, domains, settings)
    names = [f"cipher {i}" for i in range(domains)]
    said: dict[str, Any] = {
        "settings": asdict(settings),
        "mix": "conflict",
        "domains": names,
        "seed_count": seeds,
    }
    said["base_run"] = describe(run)
    earlier = read_back(out, said)
    there, model = earlier.get("arms", {}), model_of(run)
    made = {name: make_arm(name, settings, len(names)) for name in left_over(arms, there)}
    programs = {name: Program(arm, model, settings) for name, arm in made.items()}
    compile_all(programs, run.params, train, test, print)
    counts = {name: program.parameters for name, program in programs.items()}
    counts |= {name: found["parameters"] for name, found in there.items()}
    check_sizes(counts)
    figures: dict[str, Any] = said | {"base": earlier.get("base"), "arms": dict(there)}
    documents = dict(earlier.get("documents", {}))
    if not earlier:
        found = score_base(programs, run.params, test)
        figures["base"] = said["base_run"] | figures_of(found, names)
        documents["base"] = found.bits_per_byte.tolist()
    for name, program in programs.items():
        found, scores = measure_arm(program, run.params, train, test, names, seeds)
        figures["arms"][name] = {"parameters": counts[name], **found}
        documents[name] = np.mean([scored.bits_per_byte for scored in scores], 0).tolist()
        _save(out, figures, documents)
    return figures


def left_over(arms: Sequence[str], there: Mapping[str, Any]) -> list[str]:
    """Return the arms that an earlier call did not measure.

    Raises:
      ValueError: none is left.
    """
    left = [name for name in arms if name not in there]
    if not left:
        raise ValueError(f"--out has all of --arms {', '.join(arms)} already: name others, or another file")
    return left


def open_mix(data: str, domains: int, settings: Settings) -> tuple["Mix", "Mix"]:
    """Return a mix to train on and one to test on, of other authors.

    Raises:
      ValueError: there is only one domain, or less text than is read at once.
    """
    from experiments.benchmark.adapters.mixed_text import check_text, conflict_mix
    from jaxblt.data.sources.files import expand
    from jaxblt.data.sources.opening import read_all

    if domains < 2:
        raise ValueError(f"--domains must be at least 2, got {domains}: a single one never changes")
    files = (expand(Path(data) / "books" / split / "*.txt") for split in ("train", "test"))
    texts = (b"\n".join(read_all(file) for file in each) for each in files)
    train, test = (conflict_mix(text, domains, letters=settings.letters) for text in texts)
    check_text(train, settings.length)
    check_text(test, settings.length)
    return train, test


def score_base(programs: "Mapping[str, Program]", base: Any, test: "Mix") -> "Scored":
    """Return the base's own score: every arm has it before training."""
    import jax

    program = next(iter(programs.values()))
    return program.scored(base, program.start(base, jax.random.key(0))[0], test)


def measure_arm(
    program: "Program", base: Any, train: "Mix", test: "Mix", domains: list[str], seeds: int
) -> tuple[dict[str, Any], "list[Scored]"]:
    """Return an arm's figures of every seed, and its scores.

    Args:
      program: of the arm.
      base: its frozen parameters.
      train: what is trained on.
      test: what is scored.
      domains: their names.
      seeds: 0, 1, ... of so many.
    """
    from experiments.benchmark.adapters.scored import figures_of

    runs, scores = [], []
    for seed in range(seeds):
        trained, found = program.train(base, train, seed)
        scores.append(program.scored(base, trained, test))
        runs.append({"seed": seed, **figures_of(scores[-1], domains), **found})
    return {"bits_per_byte": float(np.mean([run["bits_per_byte"] for run in runs])), "seeds": runs}, scores


def _save(out: str, figures: dict[str, Any], documents: Mapping[str, Any]) -> None:
    """Write the figures, with comparisons of what they have by now."""
    from experiments.benchmark.adapters.paired_arms import compared
    from experiments.benchmark.figures.saved import save

    by_arm = {name: np.asarray(bits) for name, bits in documents.items()}
    save("routed_lora", out, figures | {"documents": documents, "compared": compared(by_arm)})
