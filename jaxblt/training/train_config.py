"""The settings of the loop: how long a run lasts, in which precision, and what it writes on the way."""

from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp

from jaxblt.precision.config import Fp8Config
from jaxblt.precision.loss_scale import LossScaleConfig
from jaxblt.training.best import check_followed
from jaxblt.training.state import Weights
from jaxblt.validation import MOST_SEED, check_bounds, check_fields, check_read

USER_CACHE = "user"
"""Stands for the folder of compiled programs in the user's cache."""


@dataclass(frozen=True)
class TrainConfig:
    """Length, precision and output of a run; every `*_every` counts steps.

    Attributes:
      steps: optimiser steps, the learning rate's horizon.
      accumulate: micro-batches that a batch is cut into, to fit in memory; the gradient is the whole batch's.
      seed: the seed of parameters, objective and dropout.
      dtype: dtype of the computation; parameters and reductions are fp32. "float16" scales the loss.
      precision: "fp8" runs products with weights in FP8 where a step trains; all else computes in `dtype`.
      fp8: how it does so, and which products it leaves.
      loss_scale: of "float16". Steps that overflow are skipped; above a scale of 1 they do not count for `max_skips`.
      ema: decay of an exponential moving average of the parameters, such as 0.999, which evaluations then score and
        `jaxblt.load` reads; None for none. It takes the memory of the parameters once more.
      trackers: where figures, pictures and texts go. "jsonl" is `metrics.jsonl`, which `jaxblt sweep` reads, and
        "tensorboard" the events in the run folder. "wandb" and "trackio" are extras to install.
      sample_bytes: bytes of text that the model generates at each evaluation, from the beginning of the validation
        split; 0 for none. The first one compiles the decoder.
      layer_norms: log the gradient's norm by block too, as `grad_norm/stack/periods/block_0/3` of the fourth period.
      log_every: steps between log lines; a line describes the step it is written at.
      eval_every: steps between evaluations on the validation split, which also follow the last step; 0 for none at all.
      eval_start: evaluate before the first step too, so that the start may be kept as the best.
      eval_batches: the most batches of an evaluation during training, evenly spread over the split; None for all of it.
      checkpoint_every: steps between checkpoints; the last step is always saved.
      checkpoint_every_s: the most seconds between checkpoints, whatever the steps; None for no limit.
      keep: checkpoints kept, the newest ones.
      keep_best: checkpoints kept besides: those of the evaluations with the best headline figures, saved as they are
        found. `jaxblt.load(run_dir, step="best")` reads the best one.
      patience: evaluations in a row without a better headline figure after which the run ends; None for no such end.
      best_by: figure that `keep_best` and `patience` go by instead of the headline one, such as "mcc", or "NAME/mcc" of
        one of several tasks.
      max_skips: steps in a row whose gradient may be non-finite (and is not applied) before the run fails.
      max_overflow: share of patch boundaries that may be refused for want of slots before the run fails.
      time_limit_s: seconds of training after which the run saves and ends, whatever the step; None for no limit. Those
        of all processes of the run count: raise it to go on in another piece.
      profile_steps: (first, last) steps to trace with the profiler; None for none.
      compilation_cache: folder in which compiled programs, the step and calibrations outlive the process. "user" is the
        one in the user's cache (not on CPUs), None is none. Its executables are trusted.
    """

    steps: int = 1000
    accumulate: int = 1
    seed: int = 0
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    precision: Literal["dtype", "fp8"] = "dtype"
    fp8: Fp8Config = Fp8Config()
    loss_scale: LossScaleConfig = LossScaleConfig()
    ema: float | None = None
    trackers: tuple[Literal["jsonl", "tensorboard", "wandb", "trackio"], ...] = ("jsonl", "tensorboard")
    sample_bytes: int = 0
    layer_norms: bool = False
    log_every: int = 10
    eval_every: int = 200
    eval_start: bool = False
    eval_batches: int | None = None
    checkpoint_every: int = 200
    checkpoint_every_s: float | None = 300.0
    keep: int = 2
    keep_best: int = 0
    patience: int | None = None
    best_by: str | None = None
    max_skips: int = 5
    max_overflow: float = 0.1
    time_limit_s: float | None = None
    profile_steps: tuple[int, int] | None = None
    compilation_cache: str | None = USER_CACHE

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "steps", "accumulate", "log_every", "checkpoint_every", "max_skips", least=1)
        check_bounds(self, "eval_every", least=0, why=": 0 evaluates never")
        check_bounds(self, "eval_batches", least=1, why=": None takes the whole split")
        check_bounds(self, "seed", least=0, most=MOST_SEED)
        check_bounds(self, "ema", above=0, below=1, why=": it is a decay, and None averages nothing")
        check_bounds(self, "keep", least=2, why=", so that there is one to fall back to")
        check_bounds(self, "keep_best", "sample_bytes", least=0)
        check_bounds(self, "patience", least=1, why=": None ends no run early")
        for name in ("eval_start", "keep_best", "patience", "best_by", "sample_bytes"):
            check_read(self, name, needed="eval_every above 0", is_read=self.eval_every > 0)
        check_bounds(self, "max_overflow", least=0, most=1, why=": it is a share")
        if self.precision == "fp8" and self.dtype != "bfloat16":
            raise ValueError(
                f"TrainConfig.precision='fp8' rounds products that are else in bfloat16, got dtype={self.dtype!r}: set "
                "dtype='bfloat16', or precision='dtype'"
            )
        check_read(self, "fp8", needed="precision='fp8'", is_read=self.precision == "fp8")
        check_read(self, "loss_scale", needed="dtype='float16'", is_read=self.dtype == "float16")
        check_bounds(self, "checkpoint_every_s", "time_limit_s", above=0, why=": seconds, None sets no limit")
        check_bounds(self, "profile_steps", least=0)
        if self.profile_steps is not None and self.profile_steps[0] > self.profile_steps[1]:
            raise ValueError(
                f"TrainConfig.profile_steps is (first, last) with first <= last, got {self.profile_steps}"
            )

    def check(self, recipe: Any) -> None:
        """Check that the objective has the figure `best_by`."""
        check_followed(recipe)

    @property
    def weights(self) -> Weights:
        """The parameters that the run is judged by: their average, if it has one."""
        return "raw" if self.ema is None else "ema"

    @property
    def compute_dtype(self) -> Any:
        """`dtype` as JAX knows it."""
        return jnp.dtype(self.dtype)
