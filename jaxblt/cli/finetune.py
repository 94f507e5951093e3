"""Fine-tunes a run on labelled records: jaxblt finetune BASE_RUN --data.paths FILE [--data.labels TABLE] [options]."""

import functools
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import tyro

from jaxblt.cli.label_comparison import compare, is_comparable
from jaxblt.cli.mesh import expand_mesh
from jaxblt.cli.parsing import parse_options
from jaxblt.cli.recipe_options import option_value, shorter_warmup
from jaxblt.cli.train import TrainOptions, run_recipe
from jaxblt.data.label_tasks import LabelTask
from jaxblt.data.labelled import LabelledDataConfig, fitting_length, label_lines, read_parts, with_classes
from jaxblt.parallel.mesh import MeshConfig
from jaxblt.training.finetune import OPTIMIZER, TRAIN, finetune_recipe
from jaxblt.training.objectives.task_scores import Weighting
from jaxblt.training.optimisers.adamw import AdamWConfig
from jaxblt.training.recipe import Recipe
from jaxblt.training.stored.resolved import read_resolved
from jaxblt.training.train_config import TrainConfig

ABOUT = (
    "Trains a run's model with a new head on labelled records, from the start or from the newest checkpoint in its run "
    "folder. `jaxblt evaluate` scores it, and `jaxblt classify` labels other records."
)
USAGE = "usage: jaxblt finetune BASE_RUN --data.paths FILE [--data.labels TABLE] [--head.pool mean] [--run-dir DIR]"


@dataclass(frozen=True, kw_only=True)
class HeadOptions:
    """Options of the new head.

    Attributes:
      pool: how states of bytes become one of the record: by the one that has seen all of it (cls), or by their mean,
        maximum or learned weighted mean (attention).
      dropout: share of the pooled channels, and of the records of classes whose words do not answer, in training.
      crf: for classes of positions, learn which class comes behind which (a linear-chain CRF).
      words: letters of the longest words whose counts answer beside the states, or words of the longest phrases of
        text; 0 for states alone. By default 6 for DNA, 3 for proteins and text, and 0 for classes of positions.
      places: first places of a record whose letters answer too, each at its place; 0 for none. By default all where
        records are of one length and read from one strand.
      strands: "both" reads records of DNA on both strands and answers with the mean, so that a record and its reverse
        complement have one answer.
    """

    pool: Literal["cls", "mean", "max", "attention"] = "mean"
    dropout: float = 0.0
    crf: bool = False
    words: int | None = None
    places: int | None = None
    strands: Literal["one", "both"] = "one"


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions(TrainOptions):
    """How to go on and what to say at the end.

    Attributes:
      baselines: at the end, score simple models on the same split beside the run, and say if one is ahead.
    """

    baselines: bool = True


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """Options of several tasks at once. Each is a column of the records, instead of `data.label`, and has a head of its
    own.

    Attributes:
      classes: columns whose labels are classes; cells may be empty.
      numbers: columns whose labels are numbers; cells may be empty.
      weighting: the loss is the sum of the tasks' losses with the weights of `weights` (fixed), or with weights that
        are learned (uncertainty). The others keep the gradients of tasks in balance (gradnorm) or follow their losses
        (dwa).
      weights: names of tasks and their weights, "family 1 stability 0.5"; 1 for the others.
    """

    classes: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    weighting: Weighting = "fixed"
    weights: dict[str, float] = field(default_factory=dict)

    @property
    def columns(self) -> tuple[LabelTask, ...]:
        """The value of `LabelledDataConfig.tasks`."""
        numbers = tuple(LabelTask(name, "number") for name in self.numbers)
        return (*map(LabelTask, self.classes), *numbers)


def parse_finetune(argv: Sequence[str]) -> tuple[Recipe, str, FinetuneOptions]:
    """Return the recipe of a command line, its run folder and how to go on.

    Exits with a usage where no run is named.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print(f"{USAGE}\n\n{ABOUT}\n\noptions: jaxblt finetune BASE_RUN --help")
        raise SystemExit(0 if argv else 2)
    base_run, *rest = argv
    rest = expand_mesh(rest)
    base = read_resolved(base_run).recipe
    name = f"{base.name}_finetuned"

    def command(
        data: LabelledDataConfig,
        run_dir: Annotated[
            str, tyro.conf.arg(help="folder of the run; an existing run goes on")
        ] = f"runs/{name}",
        head: HeadOptions = HeadOptions(),
        tasks: TaskOptions = TaskOptions(),
        freeze: Annotated[
            tuple[str, ...], tyro.conf.arg(help='patterns of parameters that stay as they are, "embedding/*"')
        ] = (),
        optimizer: AdamWConfig = OPTIMIZER,
        train: TrainConfig = replace(TRAIN, dtype=base.train.dtype),
        mesh: MeshConfig = MeshConfig(),
        own: Annotated[FinetuneOptions, tyro.conf.arg(name="")] = FinetuneOptions(),
    ) -> tuple[Recipe, str, FinetuneOptions]:
        options = {**asdict(head), "freeze": freeze, "mesh": mesh, "name": name}
        options |= {"weighting": tasks.weighting, "weights": tasks.weights}
        optimizer = _fitting_warmup(optimizer, train.steps, rest)
        data = with_classes(_fitting_data(replace(data, tasks=tasks.columns), rest))
        recipe = finetune_recipe(base_run, data, optimizer=optimizer, train=train, **options)
        for line in label_lines(data):
            print(line)
        return recipe, run_dir, own

    @functools.wraps(command)
    def bound(*args: Any, **options: Any) -> Any:
        return functools.partial(command, *args, **options)

    # Call outside of the parser: an error of the data is none of the command line.
    flags = (tyro.conf.AvoidSubcommands,)
    return parse_options(bound, rest, prog=f"jaxblt finetune {base_run}", description=ABOUT, config=flags)()


def _fitting_warmup(optimizer: AdamWConfig, steps: int, argv: Sequence[str]) -> AdamWConfig:
    if option_value(argv, "--optimizer.warmup-steps") is not None:
        return optimizer
    return shorter_warmup(optimizer, steps)


def _fitting_data(data: LabelledDataConfig, argv: Sequence[str]) -> LabelledDataConfig:
    """Return `data` in rows that hold its longest record."""
    if option_value(argv, "--data.seq-len") is not None:
        return data
    length = fitting_length(data)
    print(f"data.seq_len = {length}, which holds the longest record; --data.seq-len sets another")
    budget = data.max_tokens if data.max_tokens is None else max(data.max_tokens, length)
    return replace(data, seq_len=length, max_tokens=budget)


def main(argv: Sequence[str]) -> None:
    """Parse, fine-tune, compare with baselines, and say what to do next."""
    import jaxblt

    recipe, run_dir, options = parse_finetune(argv)
    own = {field.name: getattr(options, field.name) for field in fields(TrainOptions)}
    fitted = run_recipe(recipe, run_dir, TrainOptions(**own))
    if not Path(run_dir).is_dir():
        return
    data = recipe.data
    has_best = fitted.finished or bool(fitted.validation)
    is_asked = options.baselines and (fitted.finished or fitted.timed_out) and jax.process_count() == 1
    if is_asked and isinstance(data, LabelledDataConfig) and is_comparable(data) and read_parts(data)["test"]:
        run = jaxblt.load(run_dir, step="best" if recipe.train.keep_best and has_best else None)
        print("\n".join(compare(data, run.evaluate("test")).lines))
        if run.step == 0:
            print("the best checkpoint is the start: on validation, training came to nothing better")
    best = " --step best" if has_best else ""
    print(f"next: jaxblt evaluate {shlex.quote(run_dir)}{best} --predictions predictions.tsv")
