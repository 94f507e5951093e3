"""Splits that no recipe uses: matrix products over grids of devices, and pipelines of stages.

They are exact and small, to measure and to learn from. Models split over `data`, `fsdp`, `seq` and `tensor`.
"""

from jaxblt.parallel.experimental.grid_products import cube_product, grid_product, make_grid
from jaxblt.parallel.experimental.pipeline import make_stages, run_pipeline
from jaxblt.parallel.experimental.schedule import Schedule

__all__ = ["Schedule", "cube_product", "grid_product", "make_grid", "make_stages", "run_pipeline"]
