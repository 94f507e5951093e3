"""Decoding with weights in fewer bits: python -m experiments.benchmark quantized_decode --out FILE."""

from functools import partial
from typing import Any

import numpy as np

from experiments.benchmark.figures.saved import save, timed
from experiments.benchmark.models.books_model import split_model

CAPACITY = 4096
"""Bytes of a row's caches."""


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
    decoder, params, products = _drawn_model(pattern, tiny)
    for count in rows:
        logits: dict[str, Any] = {}
        for scheme in schemes:
            figures, logits[scheme] = _time(decoder, params, products, scheme, count, new_bytes, trials)
            base = logits[schemes[0]]
            figures["difference_of_logits"] = float(
                np.linalg.norm(logits[scheme] - base) / np.linalg.norm(base)
            )
            found["schemes"].append(figures)
            save("quantized_decode", out, found)
    return found


def _drawn_model(pattern: str, tiny: bool) -> tuple[Any, dict[str, Any], Any]:
    """Return decoder, parameters and products that may be quantised."""
    import flax.linen as nn
    import jax
    import jax.numpy as jnp

    from jaxblt.inference import Decoder
    from jaxblt.models import BLTConfig, StackConfig
    from jaxblt.patching import PatcherConfig
    from jaxblt.precision.weights import find_products

    small = StackConfig(dim=16, num_layers=1, pattern="W", mlp_dim=16)
    model = BLTConfig(small, small, small, hash=None) if tiny else split_model(pattern, "none")
    patcher = PatcherConfig(mode="static", patch_size=4)
    decoder = Decoder(model, patcher, dtype=jnp.bfloat16)
    ids = jnp.zeros((1, patcher.block_size), jnp.int32)
    built: Any = decoder.build()
    init = partial(built.init, jax.random.key(0))
    products, _ = find_products(decoder.dtype, lambda: jax.eval_shape(init, ids))
    return decoder, nn.meta.unbox(jax.jit(init)(ids))["params"], products


def _time(
    decoder: Any,
    params: dict[str, Any],
    products: Any,
    scheme: Any,
    rows: int,
    new_bytes: int,
    trials: int,
) -> tuple[dict[str, Any], np.ndarray]:
    import jax
    import jax.numpy as jnp

    from jaxblt.inference import decode_step, init_decoder, unroll
    from jaxblt.precision.weights import count_bytes, quantize
    from jaxblt.profiling import measure
    from jaxblt.training.log.meter import peak_memory

    given = {"model": params if scheme == "bf16" else quantize(params, products, scheme)}
    state = init_decoder(decoder, rows, num_bytes=CAPACITY)
    apart, narrow, state = unroll(decoder, given, state, rows=rows)
    ids = jnp.asarray(np.random.default_rng(0).integers(4, 260, (new_bytes, rows)), jnp.int32)

    @jax.jit
    def write(params: Any, ids: Any, state: Any) -> Any:
        def body(state: Any, column: Any) -> Any:
            logits, _, state = decode_step(apart, params, column, state, jnp.ones_like(column))
            return state, logits

        return jax.lax.scan(body, state, ids)[1][-1]

    logits = np.asarray(write(narrow, ids, state), np.float32)
    call = partial(lambda call: jax.block_until_ready(call()), partial(write, narrow, ids, state))
    times = timed(measure(call, trials=trials, method="host"))
    seconds = times["median"] / new_bytes
    figures = {
        "scheme": scheme,
        "rows": rows,
        "bytes_of_weights": count_bytes(narrow),
        "seconds": times,
        "seconds_a_byte": seconds,
        "bytes_per_second": rows / seconds,
        "weights_read_per_second": count_bytes(narrow) / seconds,
        **peak_memory(),
    }
    return figures, logits
