"""Decoding with weights in fewer bits: python -m experiments.benchmark quantized_decode --out FILE."""

from typing import Any

import numpy as np

from experiments.benchmark.figures.saved import save, timed
from experiments.benchmark.models.serving import drawn_model
from experiments.benchmark.models.written_bytes import CAPACITY, Written, quantized


def quantized_decode(
    out: str = "runs/benchmark/quantized_decode.json",
    rows: tuple[int, ...] = (1, 64),
    schemes: tuple[str, ...] = ("bf16", "int8", "int4", "fp8", "w8a8"),
    new_bytes: int = 64,
    pattern: str = "HHAH",
    trials: int = 20,
    tiny: bool = False,
) -> dict[str, Any]:
    """Time a decoded byte of the `books` model in bf16, by scheme of its weights and by rows.

    Parameters are drawn, and so are the bytes that are read; patches are static, four bytes each. Bytes of weights
    over the bandwidth of the device are a floor of the time. Logits are compared with those in bf16.

    Args:
      out: JSON file to write.
      rows: that decode together.
      schemes: "bf16", or one of `jaxblt.precision.weights.Scheme`.
      new_bytes: of each row, in one call of the program.
      pattern: of the latent stack.
      trials: of each timing, at least 20.
      tiny: a model that a CPU compiles, to try the script.
    """
    found: dict[str, Any] = {"new_bytes": new_bytes, "capacity": CAPACITY, "pattern": pattern, "schemes": []}
    decoder, params = drawn_model(pattern, tiny)
    for count in rows:
        logits: dict[str, Any] = {}
        for scheme in schemes:
            given = params if scheme == "bf16" else quantized(decoder, params, scheme)
            written = Written(decoder, given, count, new_bytes)
            figures, logits[scheme] = _time(written, count, new_bytes, trials)
            figures["scheme"] = scheme
            base = logits[schemes[0]]
            figures["difference_of_logits"] = float(
                np.linalg.norm(logits[scheme] - base) / np.linalg.norm(base)
            )
            found["schemes"].append(figures)
            save("quantized_decode", out, found)
    return found


def _time(written: Written, rows: int, new_bytes: int, trials: int) -> tuple[dict[str, Any], np.ndarray]:
    """Return the figures of a scheme, and its logits."""
    from jaxblt.precision.weights import count_bytes
    from jaxblt.training.log.meter import peak_memory

    logits = np.asarray(written.write(*written.arrays), np.float32)
    times = timed(written.time(written.write, trials))
    seconds, weights = times["median"] / new_bytes, count_bytes(written.arrays[0])
    figures = {
        "rows": rows,
        "bytes_of_weights": weights,
        "seconds": times,
        "seconds_a_byte": seconds,
        "bytes_per_second": rows / seconds,
        "weights_read_per_second": weights / seconds,
        **peak_memory(),
    }
    return figures, logits
