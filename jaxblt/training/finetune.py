"""The recipe that fine-tunes a run on labelled records."""

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from jaxblt.data.label_tasks import LabelTask
from jaxblt.data.labelled import LabelledDataConfig, number_statistics, read_parts, with_classes
from jaxblt.data.leaks import warn_near_copies
from jaxblt.data.letters import letters_of
from jaxblt.data.words import kind_of
from jaxblt.models.label_head import LabelHeadConfig
from jaxblt.models.labeller import HEAD, LabellerConfig
from jaxblt.models.task_heads import TaskHead, TaskHeadsConfig
from jaxblt.models.word_features import BOX, GAPS, LONGEST, MOST_PLACES, WordsConfig
from jaxblt.parallel.mesh import MeshConfig
from jaxblt.training.objectives.objectives import (
    Classify,
    ClassifyChain,
    ClassifyPositions,
    MultiTask,
    Regress,
    TaskLoss,
)
from jaxblt.training.objectives.task_scores import Weighting
from jaxblt.training.optimisers.adamw import AdamWConfig
from jaxblt.training.optimisers.by_optax import Optimizer
from jaxblt.training.recipe import Recipe
from jaxblt.training.stored.resolved import read_resolved
from jaxblt.training.train_config import TrainConfig

OPTIMIZER = AdamWConfig(learning_rate=3e-4, warmup_steps=50)
"""For fine-tuning: a lower peak than a model needs that starts from nothing."""
TRAIN = TrainConfig(steps=5000, log_every=20, eval_every=100, eval_start=True, keep_best=1, patience=10)
"""For fine-tuning: as long as evaluations improve, the start among them, where heads that read words begin well."""
WORD_RATE = 0.0
"""Factor of the learning rate of what words say: it stays as it was fitted, and the states learn what it lacks."""


def finetune_recipe(
    base_run: str | os.PathLike[str],
    data: LabelledDataConfig,
    *,
    name: str = "finetuned",
    pool: Literal["cls", "mean", "max", "attention"] = "mean",
    dropout: float = 0.0,
    crf: bool = False,
    words: int | None = None,
    places: int | None = None,
    strands: Literal["one", "both"] = "one",
    weights: Mapping[str, float] | None = None,
    weighting: Weighting = "fixed",
    freeze: tuple[str, ...] = (),
    optimizer: Optimizer = OPTIMIZER,
    train: TrainConfig = TRAIN,
    mesh: MeshConfig = MeshConfig(),
) -> Recipe:
    """Make a recipe for `jaxblt.training.loop.fit`: the base run's model under a new head, on labelled records.

    Patches are cut as the base run cuts them, by its entropy model and threshold. Letters have the case that the base
    run reads, unless `data.soft_mask` says otherwise. Classes that `data` leaves open are collected from its files.

    Args:
      base_run: folder of the run to start from.
      data: the records; its `target` decides head and objective, or its `tasks` those of each task.
      name: of the run.
      pool, dropout, crf: of the head, see `LabelHeadConfig`.
      words: letters of the longest words whose counts answer beside the states, or words of the longest phrases of text
        (`WordsConfig`). By default 6 for DNA, 3 for proteins and text. 0 for states alone, as for classes of positions.
      places: the first places of a record that answer too, by letters and words of DNA there. By default all if
        training records have one length of at most 1,024 and are read from one strand, else 0.
      strands: "both" for DNA whose label is the same on both strands: the model then reads each record on both.
      weights: of the losses of several tasks by name; 1 for a task that is not named.
      weighting: "fixed", "uncertainty" to learn the weights, or "gradnorm" and "dwa" to move them, see `TaskScores`.
      freeze: patterns of parameters that are not trained; ("embedding/*", "stack/*") leaves a ByteLM's head and norm.
      optimizer: and its schedule; `layer_decay` gives lower layers lower rates.
      train: length, precision, evaluations.
      mesh: how devices share the work.

    Raises:
      FileNotFoundError: there is no such run, or a path of `data` names no file.
      ValueError: bad data, or an option that does not go with the run.

    Warns:
      NearCopyWarning: validation and test hold near-copies of training records, which `split="groups"` keeps apart.
    """
    base = read_resolved(base_run).recipe
    if data.soft_mask is None:
        data = replace(data, soft_mask="upper" if letters_of(base.data).upper else "keep")
    data = with_classes(data)
    if data.split != "groups":
        parts = {name: [r.sequence for r in records] for name, records in read_parts(data).items()}
        warn_near_copies(parts["train"], parts["validation"] + parts["test"])
    _check_strands(data, strands)
    read = words_of(data, words, places, both_strands=data.reverse_complement or strands == "both")
    options = {"pool": pool, "dropout": dropout, "crf": crf, "words": read}
    if options["words"] is not None:
        optimizer = replace(optimizer, rates=(*optimizer.rates, (f"{HEAD}/*words/outputs/*", WORD_RATE)))
    _check_weights(data, weights or {}, weighting)
    heads = tuple(TaskHead(task.column, _head(task, options)) for task in data.tasks)
    balance = weighting if weighting in ("gradnorm", "dwa") else None
    head = TaskHeadsConfig(heads, weighting == "uncertainty", balance) if heads else _head(data, options)
    under = base.model.base if isinstance(base.model, LabellerConfig) else base.model
    return Recipe(
        name=name,
        model=LabellerConfig(under, head, strands),
        data=data,
        objective=_objective(data, under.causal, crf, weights or {}, weighting),
        optimizer=optimizer,
        train=train,
        mesh=mesh,
        patcher=base.patcher,
        bytes_per_patch=base.bytes_per_patch,
        entropy_run=base.entropy_run,
        entropy_model=base.entropy_model,
        init_from=os.fspath(base_run),
        fresh=(f"{HEAD}/*",),
        freeze=freeze,
    )


def words_of(
    data: LabelledDataConfig,
    longest: int | None = None,
    places: int | None = None,
    *,
    both_strands: bool | None = None,
) -> WordsConfig | None:
    """Return what a head reads of words and letters at places; by default as much as is worth its parameters.

    Args:
      data: of the records.
      longest: letters of the longest words, or words of the longest phrases of text; 0 for states alone.
      places: see `finetune_recipe`.
      both_strands: count words of DNA on both; by default where training reads both.

    Raises:
      ValueError: words or places are asked for classes of positions, or places of text or beside `longest` = 0.
    """
    records = [record.sequence for record in read_parts(data)["train"]]
    kind = kind_of(records)
    if data.target == "positions":
        if longest or places:
            raise ValueError(
                f"words = {longest} and places = {places} are of whole records, and these have classes of positions: "
                "set them to 0"
            )
        return None
    letters = "phrases" if kind == "text" else kind
    longest = LONGEST[letters] if longest is None else longest
    if not longest:
        if places:
            raise ValueError(f"places = {places} stand beside words, and words = 0: set words to 1 or more")
        return None
    both_strands = kind == "dna" and (data.reverse_complement if both_strands is None else both_strands)
    if places is None:
        length = len(records[0])
        is_aligned = all(len(record) == length for record in records) and length <= MOST_PLACES
        places = length if is_aligned and kind != "text" and not both_strands else 0
    box = BOX if places and kind == "dna" else 0
    gaps = 0 if places or kind != "protein" else GAPS
    return WordsConfig(letters, longest, both_strands, places, box, gaps)


def _check_strands(data: LabelledDataConfig, strands: str) -> None:
    if strands == "one":
        return
    kind = kind_of([record.sequence for record in read_parts(data)["train"]])
    if kind != "dna":
        raise ValueError(f"strands = 'both' are of DNA, and the training records are {kind}: set it to 'one'")


def _head(asked: LabelledDataConfig | LabelTask, options: Any) -> LabelHeadConfig:
    outputs = 1 if asked.target == "number" else len(asked.classes)
    return LabelHeadConfig(target=asked.target, outputs=outputs, **options)


def _check_weights(data: LabelledDataConfig, weights: Mapping[str, float], weighting: Weighting) -> None:
    names = [task.column for task in data.tasks]
    if unknown := [name for name in weights if name not in names]:
        known = ", ".join(names) or "none: name the columns in data.tasks"
        raise ValueError(
            f"there is a weight {weights[unknown[0]]} for task {unknown[0]!r}, and the tasks are {known}"
        )
    if weighting != "fixed" and not names:
        raise ValueError(f"weighting {weighting!r} is of several tasks: name their columns in data.tasks")
    if weighting != "fixed" and weights:
        raise ValueError(
            f"weighting {weighting!r} learns the weights of tasks, and they are given as {dict(weights)}: leave the "
            "weights out, or set weighting to 'fixed'"
        )


def _tasks(
    data: LabelledDataConfig, causal: bool, weights: Mapping[str, float], weighting: Weighting
) -> MultiTask:
    losses = []
    for task in data.tasks:
        is_number = task.target == "number"
        objective = Regress(causal, *number_statistics(data, task)) if is_number else Classify(causal)
        losses.append(TaskLoss(task.column, objective, float(weights.get(task.column, 1))))
    return MultiTask(tuple(losses), weighting, causal)


def _objective(
    data: LabelledDataConfig, causal: bool, crf: bool, weights: Mapping[str, float], weighting: Weighting
) -> MultiTask | Classify | ClassifyPositions | ClassifyChain | Regress:
    if data.tasks:
        return _tasks(data, causal, weights, weighting)
    if data.target == "class":
        return Classify(causal)
    if data.target == "positions":
        return ClassifyChain(causal) if crf else ClassifyPositions(causal)
    center, scale = number_statistics(data)
    return Regress(causal, center, scale)
