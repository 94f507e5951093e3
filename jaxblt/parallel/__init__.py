"""Meshes, rules that say what is split over them, several processes, and per-device islands."""

from jaxblt.parallel.attention import ContextParallel, context_attention
from jaxblt.parallel.distributed import (
    DistributedError,
    init_distributed,
    local_rows,
    make_global,
    process_table,
)
from jaxblt.parallel.islands import batch_axes, over_batch
from jaxblt.parallel.layout import CONTIGUOUS, ZIGZAG, SequenceLayout
from jaxblt.parallel.mesh import MeshConfig, make_mesh
from jaxblt.parallel.rules import (
    DEFAULT_RULES,
    batch_sharding,
    param_shardings,
    replicated,
    sharding_table,
    state_shardings,
)
from jaxblt.parallel.sequence import SeqAxis, over_sequence, seq_axis

__all__ = [
    "CONTIGUOUS",
    "DEFAULT_RULES",
    "ZIGZAG",
    "ContextParallel",
    "DistributedError",
    "MeshConfig",
    "SeqAxis",
    "SequenceLayout",
    "batch_axes",
    "batch_sharding",
    "context_attention",
    "init_distributed",
    "local_rows",
    "make_global",
    "make_mesh",
    "over_batch",
    "over_sequence",
    "param_shardings",
    "process_table",
    "replicated",
    "seq_axis",
    "sharding_table",
    "state_shardings",
]
