"""A memory whose weights learn while it reads: gradient steps on pairs of key and value, a chunk at a time."""

from pallas_kernels.neural_memory.api import TABLE, explain, neural_memory
from pallas_kernels.neural_memory.chunks import (
    Chunk,
    MemoryState,
    Trace,
    multiply,
    read_memory,
    write_memory,
)
from pallas_kernels.neural_memory.windows import (
    choose,
    cut_rows,
    leave_windows,
    scan_windows,
    take_windows,
    window_size,
)

__all__ = [
    "TABLE",
    "Chunk",
    "MemoryState",
    "Trace",
    "choose",
    "cut_rows",
    "explain",
    "leave_windows",
    "multiply",
    "neural_memory",
    "read_memory",
    "scan_windows",
    "take_windows",
    "window_size",
    "write_memory",
]
