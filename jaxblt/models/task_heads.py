"""Several heads over the same states: one a task, and what training learns of how far each task is to be trusted."""

import dataclasses
from typing import Any, Literal

import flax.linen as nn
import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxblt.data.label_tasks import check_task_names
from jaxblt.layers import named
from jaxblt.models.label_head import LabelHead, LabelHeadConfig, check_crf
from jaxblt.validation import check_fields

LOG_VARIANCES = "log_variances"
"""The parameter of `TaskHeads` with s = log σ² of each task, in their order; no task has this name."""
TASK_WEIGHTS = "task_weights"
"""The parameter with the weight of each task's loss, which `jaxblt.training.objectives.balance` moves."""
PROBES = "probes"
"""The parameter e = 0 by which the states that a task's head reads are scaled, 1 + e: its gradient is GradNorm's."""


@flax.struct.dataclass
class TaskAnswers:
    """The answers of a model with several heads.

    Attributes:
      outputs: by task, logits of classes [B, C] or numbers [B, 1], in fp32.
      log_variances: by task, the trained s of `jaxblt.training.objectives.task_scores`; None where weights are fixed.
      weights: by task, those of its loss; None where they are fixed.
    """

    outputs: dict[str, Float[Array, "B _"]]
    log_variances: dict[str, Float[Array, ""]] | None = None
    weights: dict[str, Float[Array, ""]] | None = None


@dataclasses.dataclass(frozen=True)
class TaskHead:
    """A task and the head that answers it.

    Attributes:
      name: of the task, and of the head's parameters.
      head: for a class or a number of the row.
    """

    name: str
    head: LabelHeadConfig = LabelHeadConfig()

    def __post_init__(self) -> None:
        check_fields(self)
        if self.head.target == "positions":
            raise ValueError(
                f"TaskHead.head of task {self.name!r} asks for 'positions', and tasks are of rows: set its target to "
                "'class' or 'number'"
            )
        if self.name in ("", LOG_VARIANCES, TASK_WEIGHTS, PROBES) or "/" in self.name:
            raise ValueError(f"TaskHead.name is {self.name!r}, which names no submodule: rename the task")


@dataclasses.dataclass(frozen=True)
class TaskHeadsConfig:
    """Heads for several tasks at once.

    Attributes:
      tasks: with their heads, which share nothing but the states that they read.
      uncertainty: learn a log-variance s for each task, 0 at the start, which `MultiTask` weighs losses by.
      balance: hold a weight for each task, 1 at the start, which follows gradients or losses; None for none.
    """

    tasks: tuple[TaskHead, ...]
    uncertainty: bool = False
    balance: Literal["gradnorm", "dwa"] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        names = [task.name for task in self.tasks]
        if not names or len(set(names)) != len(names):
            raise ValueError(
                f"TaskHeadsConfig.tasks must be at least one, with different names, got {tuple(names)}"
            )

    def check(self, recipe: Any) -> None:
        """Check that each head has labels of its task and an objective, and that no objective asks for a CRF."""
        check_task_names(recipe)
        check_crf(recipe)

    def build(self, causal: bool, dtype: Any) -> "TaskHeads":
        """Build the module, over states of a causal model or not."""
        return TaskHeads(self, causal, dtype)


class TaskHeads(nn.Module):
    """A `LabelHead` for each task, called as it is."""

    config: TaskHeadsConfig
    causal: bool
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], ids: Int[Array, "B T"], segment_ids: Int[Array, "B T"] | None
    ) -> TaskAnswers:
        """Return the answers of all heads; arguments are those of `LabelHead`."""
        tasks, balance, states = self.config.tasks, self.config.balance, [x] * len(self.config.tasks)
        init: Any = named(nn.initializers.zeros, None)
        if balance == "gradnorm":
            zeros: Any = named(nn.initializers.zeros, None, None)
            probes = self.param(PROBES, zeros, (len(tasks), x.shape[-1]), jnp.float32)
            states = [x * (1 + e[None, None]).astype(x.dtype) for e in probes]
        outputs = {
            task.name: LabelHead(task.head, self.causal, self.dtype, name=task.name)(own, ids, segment_ids)
            for task, own in zip(tasks, states, strict=True)
        }
        if balance is not None:
            ones: Any = named(nn.initializers.ones, None)
            w = self.param(TASK_WEIGHTS, ones, (len(tasks),), jnp.float32)
            return TaskAnswers(outputs, weights={task.name: w[i] for i, task in enumerate(tasks)})
        if not self.config.uncertainty:
            return TaskAnswers(outputs)
        s = self.param(LOG_VARIANCES, init, (len(tasks),), jnp.float32)
        return TaskAnswers(outputs, {task.name: s[i] for i, task in enumerate(tasks)})
