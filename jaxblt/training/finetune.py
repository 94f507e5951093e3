"""The recipe that fine-tunes a run on labelled records."""

import os
from typing import Literal

from jaxblt.data.labelled import LabelledDataConfig, number_statistics, with_classes
from jaxblt.models.label_head import LabelHeadConfig
from jaxblt.models.labeller import HEAD, LabellerConfig
from jaxblt.parallel.mesh import MeshConfig
from jaxblt.training.objectives import Classify, ClassifyChain, ClassifyPositions, Regress
from jaxblt.training.optimizer import AdamWConfig
from jaxblt.training.optimizers import Optimizer
from jaxblt.training.recipe import Recipe, TrainConfig
from jaxblt.training.resolved import read_resolved

OPTIMIZER = AdamWConfig(learning_rate=3e-4, warmup_steps=50)
"""For fine-tuning: a lower peak than a model needs that starts from nothing."""
TRAIN = TrainConfig(steps=1000, log_every=20, eval_every=100, keep_best=1)


def finetune_recipe(
    base_run: str | os.PathLike[str],
    data: LabelledDataConfig,
    *,
    name: str = "finetuned",
    pool: Literal["cls", "mean", "max", "attention"] = "mean",
    dropout: float = 0.0,
    crf: bool = False,
    freeze: tuple[str, ...] = (),
    optimizer: Optimizer = OPTIMIZER,
    train: TrainConfig = TRAIN,
    mesh: MeshConfig = MeshConfig(),
) -> Recipe:
    """A recipe for `jaxblt.training.loop.fit`: the base run's model under a new head, on labelled records.

    Patches are cut as the base run cuts them, by its entropy model and threshold. Classes that `data` leaves open are
    collected from its files.

    Args:
      base_run: folder of the run to start from.
      data: the records; its `target` decides head and objective.
      name: of the run.
      pool, dropout, crf: of the head, see `LabelHeadConfig`.
      freeze: patterns of parameters that are not trained; ("embedding/*", "stack/*") leaves a ByteLM's head and norm.
      optimizer: and its schedule; `layer_decay` gives lower layers lower rates.
      train: length, precision, evaluations.
      mesh: how devices share the work.

    Raises:
      FileNotFoundError: there is no such run, or a path of `data` names no file.
      ValueError: bad data, or an option that does not go with the run.
    """
    base = read_resolved(base_run).recipe
    data = with_classes(data)
    outputs = 1 if data.target == "number" else len(data.classes)
    head = LabelHeadConfig(target=data.target, outputs=outputs, pool=pool, dropout=dropout, crf=crf)
    under = base.model.base if isinstance(base.model, LabellerConfig) else base.model
    model = LabellerConfig(under, head)
    return Recipe(
        name=name,
        model=model,
        data=data,
        objective=_objective(data, model.causal, crf),
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


def _objective(
    data: LabelledDataConfig, causal: bool, crf: bool
) -> Classify | ClassifyPositions | ClassifyChain | Regress:
    if data.target == "class":
        return Classify(causal)
    if data.target == "positions":
        return ClassifyChain(causal) if crf else ClassifyPositions(causal)
    center, scale = number_statistics(data)
    return Regress(causal, center, scale)
