"""Learned boundaries: scores of bytes, and the router that ends patches by them, trained with the model's loss."""

from jaxblt.patching.learned.calibrate import calibrate_router
from jaxblt.patching.learned.config import BoundaryConfig
from jaxblt.patching.learned.motif_seeds import seed_motifs
from jaxblt.patching.learned.router import Router, RouterState, confidence, init_router, ratio_loss

__all__ = [
    "BoundaryConfig",
    "Router",
    "RouterState",
    "calibrate_router",
    "confidence",
    "init_router",
    "ratio_loss",
    "seed_motifs",
]
