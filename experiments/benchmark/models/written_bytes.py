"""The program that benchmarks of serving time: rows that read and predict some bytes, one after another."""

from functools import partial
from typing import Any

import numpy as np

CAPACITY = 4096
"""Bytes of a row's caches."""


class Written:
    """Rows of a model that decode together.

    Attributes:
      write: a jitted function of the arrays; it returns the logits behind the last byte.
      arrays: parameters, ids and state.
    """

    def __init__(
        self, decoder: Any, params: dict[str, Any], rows: int, new_bytes: int, state: Any = None
    ) -> None:
        """Prepare rows, whose bytes are drawn, behind a state or at their beginning."""
        import jax
        import jax.numpy as jnp

        from jaxblt.inference import decode_step, init_decoder, unroll

        state = init_decoder(decoder, rows, num_bytes=CAPACITY) if state is None else state
        apart, narrow, state = unroll(decoder, params, state, rows=rows)
        ids = np.random.default_rng(0).integers(4, 260, (new_bytes, rows))
        self.arrays = (narrow, jnp.asarray(ids, jnp.int32), state)

        @jax.jit
        def write(params: Any, ids: Any, state: Any) -> Any:
            def body(state: Any, column: Any) -> Any:
                logits, _, state = decode_step(apart, params, column, state, jnp.ones_like(column))
                return state, logits

            return jax.lax.scan(body, state, ids)[1][-1]

        self.write: Any = write

    def time(self, call: Any, trials: int) -> Any:
        """Measure a compiled form of `write` on the wall clock."""
        import jax

        from jaxblt.profiling import measure

        waited = partial(lambda: jax.block_until_ready(call(*self.arrays)))
        return measure(waited, trials=trials, method="host")


def quantized(decoder: Any, params: dict[str, Any], scheme: Any) -> dict[str, Any]:
    """Return a model's parameters with its products in fewer bits."""
    import jax
    import jax.numpy as jnp

    from jaxblt.precision.weights import find_products, quantize

    ids = jnp.zeros((1, decoder.patcher.block_size), jnp.int32)
    init = partial(decoder.build().init, jax.random.key(0))
    products, _ = find_products(decoder.dtype, lambda: jax.eval_shape(init, ids))
    return {"model": quantize(params["model"], products, scheme)}


def delays(seconds: Any) -> dict[str, float]:
    """Return percentiles of trials in milliseconds."""
    p50, p95 = np.percentile(np.asarray(seconds), [50, 95]) * 1e3
    return {"p50_ms": float(p50), "p95_ms": float(p95)}
