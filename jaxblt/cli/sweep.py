"""Trains a recipe with several sets of overrides: jaxblt sweep RECIPE --vary optimizer.learning-rate=1e-3,3e-4."""

import contextlib
import hashlib
import io
import itertools
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import tyro

from jaxblt.cli.catalogue import fetch_hint
from jaxblt.cli.recipe_options import parse_recipe, parse_recipe_and
from jaxblt.training.recipe import Recipe

ABOUT = (
    "Trains a recipe with each of several sets of overrides, one run after the other, each in its own folder below "
    "--run-dir. A table sorted by the metric ends it, and lies there as sweep.json and sweep.tsv. The same command "
    "goes on with a stopped sweep; finished runs are not run again. Other options of the recipe hold for every run."
)
LONGEST = 100
"""Characters of a run's name."""


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """The fields that vary, and the figure that runs are compared by: give `runs` or `vary`.

    Attributes:
      runs: file with a run a line, as options of jaxblt train: "--optimizer.learning-rate 1e-3 --data.seq-len 4096".
        Empty lines and what follows a # do not count.
      vary: an option of the recipe with values between commas, "optimizer.learning-rate=1e-3,3e-4". It may come
        several times: every value of one then goes with every value of the others.
      metric: figure of the run log to sort by; by default the validation's bits_per_byte or accuracy. A run counts by
        its best value.
      order: whether the "lowest" or the "highest" is the best; by default it follows from the metric.
    """

    runs: str | None = None
    vary: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    metric: str | None = None
    order: Literal["lowest", "highest"] | None = None


def main(argv: Sequence[str]) -> int:
    """Parse everything, then train run after run.

    Returns 1 if a run failed or was stopped.
    """
    recipe, run_dir, options = parse_recipe_and(
        argv, SweepOptions(), prog="jaxblt sweep", about=ABOUT, folder="runs/{name}_sweep"
    )
    changes = read_changes(options)
    shared = without_options(argv[1:], ("runs", "vary", "metric", "order", "run-dir"))
    from jaxblt.parallel import init_distributed
    from jaxblt.training.sweep import Trial, default_ranking, sweep, table_of

    init_distributed()
    ranking = default_ranking(recipe, options.metric, options.order)
    trials = [
        Trial(name, parsed(argv[0], shared, words, name), option_pairs(words))
        for name, words in named(changes).items()
    ]
    try:
        outcomes = sweep(trials, run_dir, ranking, say=partial(print, flush=True))
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}{fetch_hint(recipe)}") from error
    print(f"\n{table_of(outcomes, ranking)}\n")
    best = outcomes[0]
    place = shlex.quote(str(Path(run_dir) / best.name))
    print(f"{run_dir}/sweep.tsv holds the table; next: jaxblt evaluate {place}")
    return int(any(outcome.status != "finished" for outcome in outcomes))


def read_changes(options: SweepOptions) -> list[list[str]]:
    """Return the words of each run's overrides.

    Raises:
      ValueError: not one of `runs` and `vary` was given, or it names no run.
      FileNotFoundError: the file is not there.
    """
    if bool(options.vary) == (options.runs is not None):
        raise ValueError("give --runs FILE or --vary OPTION=VALUE,VALUE, and one of them only")
    if options.runs is not None:
        lines = Path(options.runs).read_text(encoding="utf-8").splitlines()
        found = [words for line in lines if (words := shlex.split(line, comments=True))]
        if not found:
            raise ValueError(
                f"--runs {options.runs}: the file holds no run; write a line of options for each"
            )
        return found
    axes = []
    for text in options.vary:
        option, equals, values = text.partition("=")
        if not equals or not option or not all(values.split(",")):
            raise ValueError(f"--vary {text!r}: expected OPTION=VALUE,VALUE")
        axes.append([[f"--{option.removeprefix('--')}", *shlex.split(value)] for value in values.split(",")])
    return [list(itertools.chain(*choice)) for choice in itertools.product(*axes)]


def option_pairs(words: Sequence[str]) -> dict[str, str]:
    """Return {"optimizer.learning-rate": "1e-3"} of the words of overrides."""
    found: dict[str, list[str]] = {}
    last = ""
    for word in words:
        if word.startswith("--"):
            last, equals, value = word.removeprefix("--").replace("_", "-").partition("=")
            found[last] = [value] if equals else []
        else:
            found.setdefault(last, []).append(word)
    return {option: " ".join(values) for option, values in found.items()}


def named(changes: Sequence[Sequence[str]]) -> Mapping[str, Sequence[str]]:
    """Name runs by their overrides only, so that another line of a file moves no folder.

    Raises:
      ValueError: two runs have the same overrides.
    """
    pairs = [option_pairs(words) for words in changes]
    options = {option for own in pairs for option in own}
    ends = [option.rpartition(".")[2] for option in options]
    found: dict[str, Sequence[str]] = {}
    for words, own in zip(changes, pairs, strict=True):
        parts = []
        for option, value in own.items():
            short = option.rpartition(".")[2]
            parts.append(f"{short if ends.count(short) == 1 else option}={value}")
        name = re.sub(r"[^A-Za-z0-9._=,+-]+", "_", ",".join(parts))
        if len(name) > LONGEST:
            name = name[: LONGEST - 9] + "-" + hashlib.sha256(name.encode()).hexdigest()[:8]
        if name in found:
            raise ValueError(f"two runs of the sweep are the same, {name}: leave one of them out")
        found[name] = words
    return found


def parsed(given: str, shared: Sequence[str], words: Sequence[str], name: str) -> Recipe:
    """Return the recipe of one run.

    Raises:
      ValueError: an override is none of the recipe, or out of range.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            return parse_recipe([given, *shared, *words], prog="jaxblt sweep", about=ABOUT)[0]
    except SystemExit as stopped:
        raise ValueError(f"run {name}: {said.getvalue().strip().removeprefix('error: ')}") from stopped
    except ValueError as error:
        raise ValueError(f"run {name}: {error}") from error


def without_options(argv: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return `argv` without some options, each of which has one value."""
    found, left = [], list(argv)
    while left:
        word = left.pop(0)
        name, equals, _ = word.removeprefix("--").replace("_", "-").partition("=")
        if not word.startswith("--") or name not in names:
            found.append(word)
        elif not equals and left:
            left.pop(0)
    return found
