"""A decoded byte by how far a long cache is filled: python -m experiments.benchmark filled_cache --out FILE."""

import dataclasses
from typing import Any, Literal

import numpy as np

from experiments.benchmark.figures.saved import save, timed

AS_IT_RUNS = "as_it_runs"
"""The way of a layer that is told nothing."""

WITHIN = 0.02
"""The relative difference between the outputs of both ways, by the norm, that passes in bf16."""


def filled_cache(
    out: str = "runs/benchmark/filled_cache.json",
    rows: tuple[int, ...] = (1, 64),
    capacity: int = 131_072,
    filled: tuple[float, ...] = (1 / 16, 1 / 4, 1.0),
    new_bytes: int = 16,
    dim: int = 1024,
    num_heads: int = 16,
    whole: Literal["cudnn", "reference"] | None = "cudnn",
    trials: int = 20,
) -> dict[str, Any]:
    """Time an attention layer in bf16 that decodes bytes behind a long cache, as it runs and over the whole cache.

    A call decodes `new_bytes` bytes of each row, one by one. Keys and values are drawn. The floor is the time in which
    those that are filled could be read, by the copy bandwidth of the same run.

    Args:
      out: JSON file to write.
      rows: that decode together.
      capacity: slots of a row.
      filled: parts of the capacity that hold bytes.
      new_bytes: of each row in a call.
      dim: of the layer.
      num_heads: of the layer.
      whole: the implementation that reads whole caches; None leaves it out.
      trials: of each timing, at least 20.

    Raises:
      RuntimeError: the outputs of both ways differ by more than WITHIN.
    """
    from jaxblt.mixers import AttentionConfig
    from pallas_kernels.runtime import measure_ceilings

    bandwidth = measure_ceilings().bytes_per_second
    config = AttentionConfig(dim=dim, num_heads=num_heads)
    ways = {AS_IT_RUNS: config}
    ways |= {} if whole is None else {whole: dataclasses.replace(config, implementation=whole)}
    found: dict[str, Any] = {"capacity": capacity, "dim": dim, "num_heads": num_heads}
    found |= {"new_bytes": new_bytes, "copy_bytes_per_second": bandwidth, "calls": []}
    for count in rows:
        layer = _Layer(ways, count, capacity, new_bytes)
        for part in filled:
            time = min(int(part * capacity), capacity - new_bytes)
            floor = 1e3 * layer.bytes_of(time) / bandwidth
            figures = {"rows": count, "filled": part, "floor_ms_a_byte": floor}
            found["calls"].append(figures | _compare(layer, time, trials, out))
            save("filled_cache", out, found)
    return found


def _compare(layer: "_Layer", time: int, trials: int, out: str) -> dict[str, Any]:
    """Return milliseconds a byte by way, and the difference of outputs."""
    state, figures, first = layer.stand_at(time), {}, None
    for way in layer.calls:
        y = np.asarray(layer.decode(way, state), np.float32)
        first = y if first is None else first
        figures["difference"] = difference = float(np.linalg.norm(y - first) / np.linalg.norm(first))
        if not difference <= WITHIN:
            raise RuntimeError(f"{way} differs from what runs by {difference} of it: see {out}")
        seconds = timed(layer.measure(way, state, trials))
        median = 1e3 * seconds["median"] / layer.new_bytes
        figures[way] = {"ms_a_byte": median, "seconds": seconds}
    return figures


class _Layer:
    """A layer, its arrays, and a cache that calls hand on in place.

    Attributes:
      new_bytes: that a call decodes.
      calls: a compiled call for each way.
    """

    def __init__(self, ways: dict[str, Any], rows: int, capacity: int, new_bytes: int) -> None:
        import jax
        import jax.numpy as jnp

        config = ways[AS_IT_RUNS]
        self.new_bytes, self.ways = new_bytes, {way: c.build(dtype=jnp.bfloat16) for way, c in ways.items()}
        self.x = jax.random.normal(jax.random.key(0), (new_bytes, rows, 1, config.dim), jnp.bfloat16)
        self.params = jax.jit(self.ways[AS_IT_RUNS].init)(jax.random.key(1), self.x[0])
        self.state = jax.jit(lambda: config.init_state(rows, capacity=capacity, dtype=jnp.bfloat16))()
        self.cache = tuple(_drawn(seed, self.state.k) for seed in (2, 3))
        self.state = dataclasses.replace(self.state, k=None, v=None)
        self.calls = {way: self._compiled(way) for way in ways}

    def bytes_of(self, time: int) -> int:
        """Return the bytes of keys and values in so many slots of each row."""
        k = self.cache[0]
        return 2 * k.nbytes // k.shape[1] * time

    def stand_at(self, time: int) -> Any:
        """Return the state, without its keys and values, of rows that stand at `time`."""
        import jax.numpy as jnp

        now = jnp.full_like(self.state.clock.time, time)
        clock = dataclasses.replace(self.state.clock, time=now, position=now, last_segment=jnp.ones_like(now))
        slots = jnp.broadcast_to(jnp.arange(self.state.times.shape[1]), self.state.times.shape)
        times = jnp.where(slots < time, slots, -1).astype(self.state.times.dtype)
        return dataclasses.replace(self.state, clock=clock, times=times)

    def decode(self, way: str, state: Any) -> Any:
        """Return the outputs of new bytes of rows that stand as `state` says."""
        import jax

        y, self.cache = self.calls[way](self.params, self.x, self.cache, state)
        return jax.block_until_ready(y)

    def measure(self, way: str, state: Any, trials: int) -> Any:
        """Time calls on the wall clock."""
        from jaxblt.profiling import measure

        return measure(lambda: self.decode(way, state), trials=trials, method="host")

    def _compiled(self, way: str) -> Any:
        import jax

        def decode(params: Any, x: Any, cache: Any, state: Any) -> Any:
            def step(state: Any, x: Any) -> Any:
                y, state = self.ways[way].apply(params, x, state=state)
                return state, y

            state = dataclasses.replace(state, k=cache[0], v=cache[1])
            state, y = jax.lax.scan(step, state, x)
            return y, (state.k, state.v)

        return jax.jit(decode, donate_argnums=2)


def _drawn(seed: int, like: Any) -> Any:
    """Return a drawn row for all rows of an array."""
    import jax
    import jax.numpy as jnp

    row = jax.random.normal(jax.random.key(seed), like.shape[1:], like.dtype)
    return jax.jit(lambda row: jnp.tile(row[None], (like.shape[0], 1, 1, 1)))(row)
