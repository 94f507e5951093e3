"""Where the time before the first step goes, and compiled programs that outlive a process to spare most of it."""

import os
import time
from dataclasses import dataclass, field

import jax

from jaxblt.remote import user_cache
from jaxblt.remote.urls import url_of
from jaxblt.training.train_config import USER_CACHE

LEAST_TIME = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
"""JAX's variable for the seconds from which a compilation is kept; what a user has set stays."""


def keep_compiled(folder: str | None) -> None:
    """Keep this process's compiled programs in a folder, and take from it what another process compiled.

    Args:
      folder: a path, or "user" for jaxblt's folder in the user's cache (`XDG_CACHE_HOME`, else ~/.cache). None changes
        nothing, nor does "user" on CPUs: their programs are compiled in seconds and for one kind of processor.
    """
    if (place := cache_folder(folder)) is None:
        return
    jax.config.update("jax_compilation_cache_dir", place)
    if not url_of(place) and LEAST_TIME not in os.environ:
        # JAX would compile again, at each start, what takes less than a second: the draws of parameters
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def cache_folder(folder: str | None) -> str | None:
    """Return the folder that `keep_compiled` keeps programs in, or None."""
    if folder is None or (folder == USER_CACHE and jax.default_backend() == "cpu"):
        return None
    return str(user_cache("compiled")) if folder == USER_CACHE else folder


@dataclass
class Startup:
    """Seconds of each stage between a call of `fit` and its first step, in order.

    "set-up" is what the step depends on: frozen parts, calibration, or the checkpoint that a run goes on from. The step
    compiles during "parameters" and "report", and the last stage has what is left of that.
    """

    stages: dict[str, float] = field(default_factory=dict)
    since: float = field(default_factory=lambda: time.perf_counter())

    def done(self, stage: str) -> None:
        """End a stage, and begin the next."""
        now = time.perf_counter()
        self.stages[stage], self.since = now - self.since, now

    def line(self) -> str:
        """Write for people: "first step after 51.0 s: data 1.2, set-up 8.0, ..."."""
        stages = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in self.stages.items())
        return f"first step after {sum(self.stages.values()):.1f} s: {stages}"
