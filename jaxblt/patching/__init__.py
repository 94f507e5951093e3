"""Patching: where a sequence of bytes is cut into patches, by entropy or by simpler rules, inside jit."""

from jaxblt.patching.calibrate import (
    calibrate_capacity,
    calibrate_cut,
    calibrate_threshold,
    patches_per_block,
    threshold_margin,
)
from jaxblt.patching.config import Mode, PatcherConfig
from jaxblt.patching.contexts import ContextState, entropies_in_windows, init_contexts, next_entropies
from jaxblt.patching.entropy import byte_entropies, stream_entropies
from jaxblt.patching.logits import entropies_from_logits
from jaxblt.patching.margin import boundary_margin, decided, flip_rate
from jaxblt.patching.optimal import segmentation_cost
from jaxblt.patching.overflow import PatchOverflowWarning, warn_overflow
from jaxblt.patching.patches import Patches, bytes_per_patch, from_closed
from jaxblt.patching.plot import plot_boundaries, plot_entropies
from jaxblt.patching.render import render_patches, split_patches
from jaxblt.patching.segment import closes, make_patches, read_entropies
from jaxblt.patching.stream import PatcherState, init_patcher, prefill_patcher, step_patcher, stream_patcher

__all__ = [
    "ContextState",
    "Mode",
    "PatchOverflowWarning",
    "PatcherConfig",
    "PatcherState",
    "Patches",
    "boundary_margin",
    "byte_entropies",
    "bytes_per_patch",
    "calibrate_capacity",
    "calibrate_cut",
    "calibrate_threshold",
    "closes",
    "decided",
    "entropies_from_logits",
    "entropies_in_windows",
    "flip_rate",
    "from_closed",
    "init_contexts",
    "init_patcher",
    "make_patches",
    "next_entropies",
    "patches_per_block",
    "plot_boundaries",
    "plot_entropies",
    "prefill_patcher",
    "read_entropies",
    "render_patches",
    "segmentation_cost",
    "split_patches",
    "step_patcher",
    "stream_entropies",
    "stream_patcher",
    "threshold_margin",
    "warn_overflow",
]
