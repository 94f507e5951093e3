"""A round of the engine as one CUDA graph, its kernels in order or side by side, and one whose loops the host steps."""

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import median
from types import SimpleNamespace
from typing import Any

IN_ORDER = {"xla_gpu_command_buffer_scheduling_mode": "LHS"}
"""The option by which a graph's kernels run one behind the other, XLA's default."""

QUEUED = 16
"""Rounds that are sent one behind the other."""


def decode_graphs(decoder: Any, params: Any, *, rows: int, rounds: int) -> dict[str, Any]:
    """Return the milliseconds of a round by each program: waited for, queued, and until a call returns.

    All go on from the same rows, which draw from their beginnings at seeds of their own. First come rounds for a block
    and a half, behind whose end the latent stack skips unused slots. `unlike` counts the entries of their tables, ids
    and probabilities, that differ from those of the program whose loops the host steps; none should.

    Args:
      decoder, params: of the model.
      rows: of the lane; all draw all the time.
      rounds: that are waited for; of queued ones there are half as many trials.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxblt.inference.engine import Engine, EngineConfig, Lane, Request, Sampling, programs
    from jaxblt.inference.engine.draws import unpack_draws
    from jaxblt.inference.in_place import IN_ONE_GRAPH
    from pallas_kernels.runtime import alone

    block = max(programs.STEPS, decoder.build().grid)
    capacity, compared = 3 * block, 3 * block // (2 * programs.STEPS)
    run: Any = SimpleNamespace(recipe=None, decoder=decoder, decoder_params=params)
    engine = Engine(run, EngineConfig(lanes=(Lane(rows, capacity),), max_waiting=rows), as_trained=False)
    (lane,), live = engine._lanes, jnp.ones(rows, bool)
    # Without entropies draw the first byte again and again: a row that draws EOS would end
    drawn = partial(Sampling, presence_penalty=0.0 if decoder.needs_entropies else -100.0)
    for slot in range(rows):
        request = Request(b"", capacity - 1, drawn(seed=slot))
        lane.enter(lane.begin(), [slot], [request], [np.ones(1, np.int32)])
    lowered: Any = programs._decode.lower(
        lane._apart, lane._layout, lane._narrow, lane._rows, live, lane._spare
    )
    apart = {name: value.replace("WHILE,", "") for name, value in IN_ONE_GRAPH.items()} | IN_ORDER
    options = {"one_graph": IN_ORDER, "side_by_side": {}}
    # Compile one before the others: these take the algorithms that were chosen for its products
    ways: dict[str, Any] = {"stepped": lowered.compile(compiler_options=apart)}
    with ThreadPoolExecutor(len(options)) as pool:
        compiled = pool.map(lambda one: lowered.compile(compiler_options=one), options.values())
        ways |= dict(zip(options, compiled, strict=True))
    places = {way: jax.tree.map(jnp.copy, (lane._rows, lane._spare)) for way in ways}

    def decode(way: str) -> Any:
        _, table = places[way] = ways[way](lane._narrow, places[way][0], live, places[way][1])
        return programs._copied(table)

    def queue(way: str) -> tuple[float, float]:
        begun = time.perf_counter()
        tables = [decode(way) for _ in range(QUEUED)]
        sent = time.perf_counter() - begun
        jax.block_until_ready(tables)
        return (time.perf_counter() - begun) / QUEUED, sent / QUEUED

    def wait(way: str) -> float:
        begun = time.perf_counter()
        jax.block_until_ready(decode(way))
        return time.perf_counter() - begun

    tables = {way: jax.device_get([decode(way) for _ in range(compared)]) for way in ways}
    stacked = {way: np.stack(found) for way, found in tables.items()}
    with alone():
        waited = {way: [] for way in ways}
        for _ in range(rounds):
            for way in ways:
                waited[way].append(wait(way))
        queued = {way: [] for way in ways}
        for _ in range(max(1, rounds // 2)):
            for way in ways:
                queued[way].append(queue(way))
    told = [unpack_draws(table) for table in tables["stepped"]]
    kept = sum(int(one.kept.sum()) for one in told)
    figures: dict[str, Any] = {"rows": rows, "bytes_compared": kept}
    figures["closed_a_byte"] = sum(int((one.closed & one.kept).sum()) for one in told) / kept
    for way in ways:
        all_, sent = zip(*queued[way], strict=True)
        times = {"round": waited[way], "queued_round": all_, "send": sent}
        figures[way] = {f"{name}_ms": 1e3 * median(some) for name, some in times.items()}
        figures[way]["unlike"] = int(np.sum(stacked[way] != stacked["stepped"]))
    return figures
