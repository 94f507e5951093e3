"""Training: recipes, objectives, optimiser, the jitted step, checkpoints, the run log, and the loop.

`from jaxblt.training.loop import fit` trains; it loads Orbax and TensorBoard, which recipes do without.
"""

from jaxblt.training.objectives.objectives import Masked, NextByte, Objective, OrderAgnostic, Span
from jaxblt.training.objectives.protocol import OwnObjective
from jaxblt.training.optimisers.by_optax import AdafactorConfig, AdamWConfig, LionConfig, MuonConfig
from jaxblt.training.recipe import Recipe
from jaxblt.training.train_config import TrainConfig

__all__ = [
    "AdafactorConfig",
    "AdamWConfig",
    "LionConfig",
    "Masked",
    "MuonConfig",
    "NextByte",
    "Objective",
    "OrderAgnostic",
    "OwnObjective",
    "Recipe",
    "Span",
    "TrainConfig",
]
