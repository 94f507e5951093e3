"""Meshes, rules that say what is split over them, several processes, and per-device islands."""

from jaxblt.parallel.distributed import (
    DistributedError,
    init_distributed,
    local_rows,
    make_global,
    process_table,
)
from jaxblt.parallel.islands import batch_axes, over_batch
from jaxblt.parallel.mesh import MeshConfig, make_mesh
from jaxblt.parallel.rules import (
    DEFAULT_RULES,
    batch_sharding,
    param_shardings,
    replicated,
    sharding_table,
    state_shardings,
)

__all__ = [
    "DEFAULT_RULES",
    "DistributedError",
    "MeshConfig",
    "batch_axes",
    "batch_sharding",
    "init_distributed",
    "local_rows",
    "make_global",
    "make_mesh",
    "over_batch",
    "param_shardings",
    "process_table",
    "replicated",
    "sharding_table",
    "state_shardings",
]
