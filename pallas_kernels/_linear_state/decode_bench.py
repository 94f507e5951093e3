"""The benchmark of one step with a state, as in decoding: what ops with a matrix of state per head share."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax

from pallas_kernels._bench import Plan, Work
from pallas_kernels._dispatch import Implementation, current_device
from pallas_kernels._measure import Case

KERNEL = "mosaic_gpu_step"


def decode_plan(op: Callable[..., Any], table: Sequence[Implementation], streams: Mapping[str, Any]) -> Plan:
    """The kernel of one step against XLA, or a loop where it does not run; all checked against the loop.

    The floor is the state read once and written once, and the streams, at the bandwidth of a copy.
    """
    k, v = streams["k"], streams["v"]
    state = jax.random.normal(jax.random.key(2), (v.shape[0], v.shape[2], k.shape[3], v.shape[3]))
    given = {**streams, "initial_state": state}

    def case(implementation: str) -> Case:
        return Case(implementation, partial(_call, op, implementation, tuple(given)), tuple(given.values()))

    entry = next(entry for entry in table if entry.name == KERNEL)
    runs = entry.why_not(current_device(), *(streams[name] for name in "qkv")) is None
    moved = float(sum(x.nbytes for x in given.values()) + state.nbytes + v.nbytes)
    return Plan(
        truth=case("reference"),
        plain=case("xla"),
        versions=[case(KERNEL if runs else "reference")],
        work={"forward": Work(6.0 * state.size, moved)},
    )


def _call(op: Callable[..., Any], implementation: str, names: tuple[str, ...], *args: Any) -> Any:
    given = dict(zip(names, args, strict=True))
    return op(**given, output_final_state=True, implementation=implementation)
