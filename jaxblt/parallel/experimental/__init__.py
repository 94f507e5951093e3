"""Splits that no recipe uses: products over grids of devices, pipelines of stages, gradients in 8 bits.

They are exact and small, to measure and to learn from. Models split over `data`, `fsdp`, `seq` and `tensor`.
"""

from jaxblt.parallel.experimental.compressed import Mean, compressed_mean, zero_error
from jaxblt.parallel.experimental.grid_products import cube_product, grid_product, make_grid
from jaxblt.parallel.experimental.pipeline import make_stages, run_pipeline
from jaxblt.parallel.experimental.schedule import Schedule

__all__ = [
    "Mean",
    "Schedule",
    "compressed_mean",
    "cube_product",
    "grid_product",
    "make_grid",
    "make_stages",
    "run_pipeline",
    "zero_error",
]
