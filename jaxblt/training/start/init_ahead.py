"""The program that draws parameters, traced before the patcher's capacity is known."""

from dataclasses import replace
from typing import Any

import flax.linen as nn

from jaxblt.adapters.code.router import Router
from jaxblt.patching import PatcherConfig
from jaxblt.training.packing import mean_slots
from jaxblt.training.recipe import Recipe
from jaxblt.training.start.kept_step import is_ours
from jaxblt.training.start.setup import TracedInit, make_task, trace_init


class InitAhead:
    """What draws a recipe's parameters, which a start traces while the calibration of patches compiles.

    No parameter of jaxblt's own models depends on the number of slots, so a trace with a guess of it draws what the
    trace with the calibrated number does. Classes from elsewhere promise nothing of the kind. A model
    with routers is traced later, as `check_first_codes` counts its slots, and so is one in FP8, whose products are
    found by that trace.
    """

    _found: TracedInit | None = None
    _of: Any = None

    def trace(self, recipe: Recipe) -> None:
        """Trace the recipe, whose patcher is still open; a model that cannot be traced so is left for later."""
        if recipe.train.precision == "fp8" or recipe.patcher is None or not is_ours(recipe):
            return
        routers: list[Any] = []

        def look(call: Any, args: Any, options: Any, context: Any) -> Any:
            if isinstance(context.module, Router):
                routers.append(context.module)
            return call(*args, **options)

        try:
            guessed = replace(recipe, patcher=_guessed(recipe, recipe.patcher))
            with nn.intercept_methods(look):
                found = trace_init(make_task(guessed), guessed)
        except Exception:  # The guess may not fit the model; what else is wrong is raised later
            return
        if not routers:
            self._found, self._of = found, _read(recipe)

    def of(self, recipe: Recipe) -> TracedInit | None:
        """Return the trace, if it is one of this recipe but for its patcher; else None."""
        return self._found if self._found is not None and self._of == _read(recipe) else None


def _guessed(recipe: Recipe, patcher: PatcherConfig) -> PatcherConfig:
    """Return the patcher with any threshold, and slots for a mean length where one is asked for."""
    threshold, capacity, mean = patcher.threshold, patcher.capacity, recipe.bytes_per_patch
    if patcher.has_threshold and threshold is None:
        threshold = 0.0
    if capacity is None and mean is not None:
        capacity = mean_slots(recipe.model, recipe.data, patcher, mean)
    return replace(patcher, threshold=threshold, capacity=capacity)


def _read(recipe: Recipe) -> Any:
    """Return what parameters are drawn from, without what calibration finds."""
    patcher = recipe.patcher
    if patcher is not None:
        patcher = replace(patcher, threshold=None, margin=None, capacity=None)
    return recipe.model, recipe.data, patcher, recipe.objective, recipe.train.dtype, recipe.train.seed
