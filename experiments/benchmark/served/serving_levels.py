"""Levels of serving: python -m experiments.benchmark serving_levels --out FILE."""

import time
from dataclasses import replace
from typing import Any

import numpy as np

from experiments.benchmark.figures.saved import save, timed
from experiments.benchmark.models.serving import drawn_model
from experiments.benchmark.models.written_bytes import CAPACITY, Written, delays, quantized

LEVELS = ("fp32 jit", "bf16 ahead of time", "int8 ahead of time")
WITHIN = {LEVELS[0]: 0.0, LEVELS[1]: 0.05, LEVELS[2]: 0.1}
"""The relative difference of logits from those of fp32, by the norm, that passes."""


def serving_levels(
    out: str = "runs/benchmark/serving_levels.json",
    rows: tuple[int, ...] = (1, 64),
    new_bytes: int = 64,
    pattern: str = "HHAH",
    trials: int = 100,
    tiny: bool = False,
) -> dict[str, Any]:
    """Time the `books` model as it is, ahead of time in bf16, and with weights in int8: median and 95th percentile.

    A call decodes `new_bytes` bytes of each row, one by one. The first level is compiled when it is first called. The
    others are loaded as executables that XLA has compiled and stored before. Parameters and bytes are drawn.

    Args:
      out: JSON file to write.
      rows: that decode together.
      new_bytes: of each row in a call.
      pattern: of the latent stack.
      trials: of each timing, at least 20.
      tiny: a model that a CPU compiles, to try the script.

    Raises:
      RuntimeError: logits of a level differ from those of fp32 by more than WITHIN.
    """
    decoder, params = drawn_model(pattern, tiny)
    found: dict[str, Any] = {"new_bytes": new_bytes, "capacity": CAPACITY, "pattern": pattern, "levels": []}
    for count in rows:
        base: np.ndarray | None = None
        for level in LEVELS:
            written = Written(*_at_level(level, decoder, params), count, new_bytes)
            figures, logits = _time(written, trials, stored=level != LEVELS[0])
            base = logits if base is None else base
            difference = float(np.linalg.norm(logits - base) / np.linalg.norm(base))
            own = {"level": level, "rows": count, "difference_of_logits": difference}
            found["levels"].append(own | figures | {"rows_per_second": count / figures["seconds"]["median"]})
            save("serving_levels", out, found)
            if difference > WITHIN[level]:
                raise RuntimeError(f"logits of {level} differ by {difference} of themselves: see {out}")
    return found


def _at_level(level: str, decoder: Any, params: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return a decoder and its parameters at a level."""
    import jax.numpy as jnp

    if level == LEVELS[0]:
        return replace(decoder, dtype=jnp.float32), params
    return decoder, params if level == LEVELS[1] else quantized(decoder, params, "int8")


def _time(written: Written, trials: int, *, stored: bool) -> tuple[dict[str, Any], np.ndarray]:
    """Return the figures of a level, and its logits."""
    from jax.experimental import serialize_executable as stored_form

    from jaxblt.precision.weights import count_bytes
    from jaxblt.training.log.meter import peak_memory

    parts = stored_form.serialize(written.write.lower(*written.arrays).compile()) if stored else ()
    begun = time.perf_counter()
    call = stored_form.deserialize_and_load(*parts) if stored else written.write
    logits = np.asarray(call(*written.arrays), np.float32)
    first = time.perf_counter() - begun
    measured = written.time(call, trials)
    figures = {"first_call_seconds": first, "seconds": timed(measured), **delays(measured.seconds)}
    return figures | {"bytes_of_weights": count_bytes(written.arrays[0]), **peak_memory()}, logits
