"""Measurements of time, memory and what ran: timing with statistics, memory of a block, traces.

The statistics are those of `pallas_kernels`: one ruler for ops and library.
"""

from jaxblt.profiling.comparison import Comparison, compare
from jaxblt.profiling.cost import cost_per_thousand
from jaxblt.profiling.kernels import KernelTotal, kernel_totals
from jaxblt.profiling.memory import MemoryProfile, profile_memory
from jaxblt.profiling.monitor import Monitor, WindowReport
from jaxblt.profiling.scopes import scope_totals
from jaxblt.profiling.timer import PartTime, Timer
from jaxblt.profiling.trace import OpTotal, op_totals, trace
from pallas_kernels.runtime import (
    MIN_TRIALS,
    Case,
    Ceilings,
    Machine,
    Measurement,
    Method,
    Summary,
    compiled,
    forward_backward,
    measure,
    measure_all,
    measure_ceilings,
    median_interval,
    ratio_interval,
    this_machine,
)

__all__ = [
    "MIN_TRIALS",
    "Case",
    "Ceilings",
    "Comparison",
    "KernelTotal",
    "Machine",
    "Measurement",
    "MemoryProfile",
    "Method",
    "Monitor",
    "OpTotal",
    "PartTime",
    "Summary",
    "Timer",
    "WindowReport",
    "compare",
    "compiled",
    "cost_per_thousand",
    "forward_backward",
    "kernel_totals",
    "measure",
    "measure_all",
    "measure_ceilings",
    "median_interval",
    "op_totals",
    "profile_memory",
    "ratio_interval",
    "scope_totals",
    "this_machine",
    "trace",
]
