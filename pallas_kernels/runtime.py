"""Helpers for a library built on these ops: choosing, explaining, measuring.

- Choose: `compiling_for` names the device that ops choose for, `record_choices` collects what they chose and why.
- Differentiate twice: inside `reference_ops` ops have no gradients of their own; `has_reference_ops` says so.
  `OwnGradient` is `jax.custom_vjp` with an error that names `reference_ops`.
- Check: inside `checked_ops` ops check the values that they are given; `check_values` and `check_documents` do so.
- Explain: `explain` says what a table picks on a `Device`; each op has an `explain` of its own.
- Measure: `measure`, `measure_all`, `compare` time a `Case`; `measure_ceilings` says what the machine can do;
  `alone` takes turns on it; traces.
- Export: `is_symbolic` tells of a size that `jax.export` leaves open.
- `varying_axes`, `vary_alike`, `may_vary`, `checks_varying` and `count_below` hide what depends on the version of JAX.
"""

from pallas_kernels._alone import alone
from pallas_kernels._compat import (
    checks_varying,
    count_below,
    is_symbolic,
    may_vary,
    vary_alike,
    varying_axes,
)
from pallas_kernels._dispatch import (
    Device,
    Implementation,
    choose,
    compiling_for,
    current_device,
    explain,
    has_reference_ops,
    record_choices,
    reference_ops,
)
from pallas_kernels._measure import (
    MIN_TRIALS,
    Case,
    Ceilings,
    Comparison,
    Machine,
    Measurement,
    Method,
    compare,
    compiled,
    forward_backward,
    measure,
    measure_all,
    measure_ceilings,
    this_machine,
)
from pallas_kernels._own_gradient import OwnGradient
from pallas_kernels._ranges import Range, check_documents, check_values, checked_ops, has_checked_ops
from pallas_kernels._statistics import Summary, median_interval, ratio_interval
from pallas_kernels._trace import device_events, device_instructions, read_trace

__all__ = [
    "MIN_TRIALS",
    "Case",
    "Ceilings",
    "Comparison",
    "Device",
    "Implementation",
    "Machine",
    "Measurement",
    "Method",
    "OwnGradient",
    "Range",
    "Summary",
    "alone",
    "check_documents",
    "check_values",
    "checked_ops",
    "checks_varying",
    "choose",
    "compare",
    "compiled",
    "compiling_for",
    "count_below",
    "current_device",
    "device_events",
    "device_instructions",
    "explain",
    "forward_backward",
    "has_checked_ops",
    "has_reference_ops",
    "is_symbolic",
    "may_vary",
    "measure",
    "measure_all",
    "measure_ceilings",
    "median_interval",
    "ratio_interval",
    "read_trace",
    "record_choices",
    "reference_ops",
    "this_machine",
    "vary_alike",
    "varying_axes",
]
