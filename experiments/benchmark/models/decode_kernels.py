"""The kernels that a decoded byte launches, by kind and longest first, and how long the device takes for them."""

import tempfile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxblt.profiling import KernelTotal

SINGLY = {"xla_gpu_enable_command_buffer": ""}
"""Options of the compiler that launch kernels one by one: a trace does not tell the parts of a command buffer."""

MOST = 25
"""Kernels that are told of, longest first."""


def decode_kernels(decoder: Any, params: Any, *, rows: int, capacity: int, rounds: int) -> dict[str, Any]:
    """Return what a byte of all rows launches in an engine's decoding program, and the milliseconds of its rounds.

    Rounds are those of the program as it serves, each waited for; kernels are counted in one that launches them singly.

    Args:
      decoder, params: of the model.
      rows: of the lane; all draw all the time.
      capacity: of the lane.
      rounds: of each program.
    """
    import time

    import jax
    import numpy as np

    from experiments.benchmark.models.engine_delays import make_engine
    from jaxblt.inference.engine import Request, Sampling, programs
    from jaxblt.profiling import kernel_totals, trace

    engine = make_engine(decoder, params, rows, capacity, 0)
    (lane,), ids = engine._lanes, np.ones(1, np.int32)
    request = Request(b"", capacity, Sampling(temperature=float(decoder.needs_entropies)))
    prompts, _ = lane.read([None], [ids], engine._sizes[0])
    for slot in range(rows):
        lane.enter(prompts, [slot], [request], [ids])
    live, taken = set(range(rows)), []
    for _ in range(rounds + 1):
        begun = time.perf_counter()
        jax.block_until_ready(lane.decode(live))
        taken.append(time.perf_counter() - begun)
    which = np.ones(rows, bool)
    lowered = programs._decode.lower(lane._apart, lane._layout, lane._narrow, lane._rows, which)
    single = lowered.compile(compiler_options=SINGLY if jax.default_backend() == "gpu" else None)

    def run() -> None:
        lane._rows, _ = jax.block_until_ready(single(lane._narrow, lane._rows, which))

    run()
    with tempfile.TemporaryDirectory() as folder:
        with trace(folder):
            for _ in range(rounds):
                run()
        totals = kernel_totals(folder, single.as_text() or "")
    return {
        "rows": rows,
        "round_ms": 1e3 * float(np.median(taken[1:])),
        **_told(totals, rounds * programs.STEPS),
    }


def _told(totals: "list[KernelTotal]", steps: int) -> dict[str, Any]:
    """Return launches and microseconds a byte: of all, by kind, and of the longest."""

    def of(some: "list[KernelTotal]") -> dict[str, float]:
        return {
            "count": sum(one.count for one in some) / steps,
            "us": 1e6 * sum(one.seconds for one in some) / steps,
        }

    kinds = {one.kind for one in totals}
    by_kind = {kind: of([one for one in totals if one.kind == kind]) for kind in sorted(kinds)}
    longest = [{"name": one.name, "path": one.path, "kind": one.kind, **of([one])} for one in totals[:MOST]]
    return {"all": of(totals), "kinds": by_kind, "longest": longest}
