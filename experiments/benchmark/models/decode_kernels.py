"""The kernels that a decoded byte launches, by kind and longest first, and how long the device takes for them."""

import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from experiments.benchmark.models.drawn_text import make_prompts

if TYPE_CHECKING:
    from jaxblt.profiling import KernelTotal

MOST = 40
"""Kernels that are told of, longest first."""

PROMPT = 60
"""Bytes of a prompt."""


def decode_kernels(decoder: Any, params: Any, *, rows: int, capacity: int, rounds: int) -> dict[str, Any]:
    """Return what a step of all rows launches in an engine's decoding program, and the milliseconds of its rounds.

    Rows start behind prompts of `make_prompts`, each with its own seed. Rounds are timed in the program that serves,
    and each is waited for. Kernels are counted in a program that launches them one by one. `bytes_a_step` and
    `closed_a_byte` are the bytes that a step drew and the patches that a byte closed in these rounds.

    Args:
      decoder, params: of the model.
      rows: of the lane; all draw all the time.
      capacity: of the lane.
      rounds: of each program.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    from experiments.benchmark.figures.programs import SINGLY
    from jaxblt.data.vocab import encode
    from jaxblt.inference.engine import Engine, EngineConfig, Lane, Request, Sampling, programs
    from jaxblt.inference.engine.draws import unpack_draws
    from jaxblt.profiling import kernel_totals, trace
    from pallas_kernels.runtime import alone

    run: Any = SimpleNamespace(recipe=None, decoder=decoder, decoder_params=params)
    engine = Engine(run, EngineConfig(lanes=(Lane(rows, capacity),), max_waiting=rows), as_trained=False)
    (lane,) = engine._lanes
    temperature = float(decoder.needs_entropies)
    for slot, prompt in enumerate(make_prompts(decoder, rows, PROMPT)):
        ids = np.asarray(encode(prompt, bos=True), np.int32)
        request = Request(prompt, capacity - len(ids), Sampling(temperature=temperature, seed=slot))
        prompts, _ = lane.read([None], [ids], engine._sizes[0])
        lane.enter(prompts, [slot], [request], [ids])
    given = lane._apart, lane._layout, lane._narrow, lane._rows, jnp.ones(rows, bool), lane._spare
    lowered: Any = programs._decode.lower(*given)
    options = (None, SINGLY if jax.default_backend() == "gpu" else None)
    with ThreadPoolExecutor(2) as pool:
        fast, single = pool.map(lambda one: lowered.compile(compiler_options=one), options)

    tables: list[Any] = []

    def decode(program: Any) -> float:
        begun = time.perf_counter()
        lane._rows, lane._spare = jax.block_until_ready(
            program(lane._narrow, lane._rows, given[4], lane._spare)
        )
        tables.append(np.asarray(lane._spare))
        return time.perf_counter() - begun

    decode(fast), decode(single)
    with tempfile.TemporaryDirectory() as folder, alone():
        taken = [decode(fast) for _ in range(rounds)]
        with trace(folder):
            traced = [decode(single) for _ in range(rounds)]
        totals = kernel_totals(folder, single.as_text() or "")
    draws = [unpack_draws(table) for table in tables[-rounds:]]
    kept = sum(int(drawn.kept.sum()) for drawn in draws)
    figures = {"rows": rows, "round_ms": 1e3 * median(taken), "traced_round_ms": 1e3 * median(traced)}
    figures["bytes_a_step"] = kept / (rounds * programs.STEPS)
    figures["closed_a_byte"] = sum(int((drawn.closed & drawn.kept).sum()) for drawn in draws) / kept
    return figures | _told(totals, rounds * programs.STEPS)


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
