"""Delays of an engine: the first byte, a known prefix, a round's work on the host, a byte behind a long document."""

import time
from functools import partial
from types import SimpleNamespace
from typing import Any

from experiments.benchmark.figures.saved import timed
from experiments.benchmark.models.written_bytes import Written, delays

SHORT = 4096
"""Bytes of the document that a long one is compared with."""


def first_byte(
    decoder: Any, params: Any, *, prompt_bytes: int, prefix_bytes: int, trials: int
) -> dict[str, Any]:
    """Time the first piece behind prompts that an idle engine has not seen, and behind the same ones again.

    Args:
      decoder, params: of the model.
      prompt_bytes: of each prompt.
      prefix_bytes: of the cache of prompts; 0 reads each prompt twice.
      trials: prompts.
    """
    import numpy as np

    from pallas_kernels.runtime import alone

    engine = _make_engine(decoder, params, 1, prompt_bytes + 64, prefix_bytes)
    drawn = np.random.default_rng(0).integers(0, 256, (trials, prompt_bytes), np.uint8)
    unknown, known = [], []
    with alone(), engine:
        for prompt in map(bytes, drawn):
            unknown.append(_wait_for_piece(engine, prompt))
            known.append(_wait_for_piece(engine, prompt))
        read = engine.stats.known_bytes
    figures = {"prompt_bytes": prompt_bytes, "prefix_bytes": prefix_bytes, "known_bytes": read}
    figures |= {"unknown": delays(unknown), "known": delays(known)}
    return figures | {"times_sooner": figures["unknown"]["p50_ms"] / figures["known"]["p50_ms"]}


def rounds(decoder: Any, params: Any, *, rows: int, capacity: int, count: int, trials: int) -> dict[str, Any]:
    """Time rounds of an engine beside its decoding program alone, which is called again and again.

    A round lasts from its beginning to the next one's, in the median. `send_ms` is near `decode_ms` where a call of
    the program returns only when the device is nearly done.

    Args:
      decoder, params: of the model.
      rows: of the lane.
      capacity: of the lane.
      count: rounds of a trial.
      trials: of each timing, of which the fastest counts.
    """
    import numpy as np

    from jaxblt.inference.engine import Request, Sampling
    from jaxblt.inference.engine.programs import STEPS
    from pallas_kernels.runtime import alone

    engine = _make_engine(decoder, params, rows, capacity, 0)
    # Draw the first byte again and again: a row that draws EOS would end
    request = Request(b"", STEPS * count, Sampling(temperature=0, presence_penalty=-100.0))
    with alone():
        device, sent = min(_decode_alone(engine, request, rows, count) for _ in range(trials + 1))
    begun, handed = _watch_rounds(engine)

    def draw() -> float:
        begun.clear()
        for stream in [engine.submit(request) for _ in range(rows)]:
            assert len(stream.read().data) == STEPS * count, "a row has drawn EOS"
        return float(np.median(np.diff(begun)))

    with alone(), engine:
        own = min(draw() for _ in range(trials + 1))
    figures = {"rows": rows, "rounds": count, "round_ms": 1e3 * own, "decode_ms": 1e3 * device}
    figures |= {"send_ms": 1e3 * sent, "hand_out_ms": 1e3 * float(np.median(handed))}
    return figures | {"over": own / device - 1}


def _watch_rounds(engine: Any) -> tuple[list[float], list[float]]:
    """Note from now on when each round begins, and the processor's seconds of handing it out."""
    begun: list[float] = []
    handed: list[float] = []
    send, hand_out = engine._round, engine._await_round

    def note_begin() -> None:
        begun.append(time.perf_counter())
        send()

    def note_work(*given: Any) -> None:
        start = time.thread_time()
        hand_out(*given)
        handed.append(time.thread_time() - start)

    engine._round, engine._await_round = note_begin, note_work
    return begun, handed


def _decode_alone(engine: Any, request: Any, rows: int, count: int) -> tuple[float, float]:
    """Return the seconds of a call of a lane's decoding program, and those after which a call returns.

    The rows go on all the time.
    """
    import jax
    import numpy as np

    (lane,), ids = engine._lanes, np.ones(1, np.int32)
    prompts, _ = lane.read([None], [ids], engine._sizes[0])
    for slot in range(rows):
        lane.enter(prompts, [slot], [request], [ids])
    live = set(range(rows))
    jax.block_until_ready(lane.decode(live))
    begun = time.perf_counter()
    tables = [lane.decode(live) for _ in range(count - 1)]
    sent = time.perf_counter() - begun
    jax.block_until_ready(tables)
    return (time.perf_counter() - begun) / (count - 1), sent / (count - 1)


def long_document(decoder: Any, params: Any, *, length: int, new_bytes: int, trials: int) -> dict[str, Any]:
    """Time bytes behind a long document beside those behind 4 KB.

    Args:
      decoder, params: of the model.
      length: bytes of the long one.
      new_bytes: of a call.
      trials: of each timing, at least 20.
    """
    found: dict[str, Any] = {"length": length, "new_bytes": new_bytes}
    for name, count in (("short", SHORT), ("long", length)):
        written = Written(decoder, params, 1, new_bytes, state=_read(decoder, params, count, new_bytes))
        found[name] = timed(written.time(written.write, trials))
    return found | {"ratio": found["long"]["median"] / found["short"]["median"]}


def _read(decoder: Any, params: Any, count: int, new_bytes: int) -> Any:
    """Return the state behind as many drawn bytes, all but the last of which fill whole blocks."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxblt.inference.prompts import prefill

    ids = jnp.asarray(np.random.default_rng(0).integers(4, 260, (1, count)), jnp.int32)
    read = jax.jit(partial(prefill, decoder, num_bytes=count + new_bytes))
    return read(params, ids, jnp.ones_like(ids))[1]


def _make_engine(decoder: Any, params: Any, rows: int, capacity: int, prefix_bytes: int) -> Any:
    from jaxblt.inference.engine import Engine, EngineConfig, Lane

    run: Any = SimpleNamespace(recipe=None, decoder=decoder, decoder_params=params)
    config = EngineConfig(lanes=(Lane(rows, capacity),), prefix_bytes=prefix_bytes, max_waiting=4 * rows)
    engine = Engine(run, config, as_trained=False)
    engine.warm()
    return engine


def _wait_for_piece(engine: Any, prompt: bytes) -> float:
    from jaxblt.inference.engine import Request

    begun = time.perf_counter()
    stream = engine.submit(Request(prompt, 8))
    next(iter(stream))
    taken = time.perf_counter() - begun
    stream.read()
    return taken
