"""What a token costs behind a long filter, on a CPU: python -m experiments.benchmark streamed_filter --out FILE."""

from collections.abc import Callable
from statistics import median
from time import process_time
from typing import Any

import numpy as np

from experiments.benchmark._schema import save

PIECE = 1024
"""Tokens of a long call."""


def benchmark(
    out: str = "runs/benchmark/streamed_filter.json",
    taps: tuple[int, ...] = (1024, 8192, 32_768),
    channels: int = 64,
    tokens: int = 16_384,
    trials: int = 5,
) -> dict[str, Any]:
    """Processor time of a Hyena mixer's calls with a state, behind implicit filters of some lengths; one row, fp32.

    Times are of all threads, medians of the trials. FLOPs are a token's and channel's in the convolution alone, in the
    mean over a turn (see `jaxblt.mixers.doubling`), as the compiler counts them.

    Args:
      out: JSON file to write.
      taps: of the filters, more than 512.
      channels: of the mixer.
      tokens: of the loop in one program, in which a token's mean is taken: whole turns, of up to half the taps.
      trials: of each timing.

    Raises:
      ValueError: a filter is streamed without blocks, or the loop is not of whole turns.
    """
    from jaxblt.mixers.doubling import init_doubling
    from jaxblt.mixers.finite_filter import MAX_BLOCKED

    for count in taps:
        if count <= MAX_BLOCKED:
            raise ValueError(
                f"taps must be more than {MAX_BLOCKED}, as fewer are streamed without blocks: {count}"
            )
        turn = init_doubling(1, 1, count - 1, np.float32).turn
        if tokens < 1 or tokens % turn:
            raise ValueError(f"tokens must be a multiple of {turn}, the turn of {count} taps, got {tokens}")
    found: dict[str, Any] = {"channels": channels, "tokens": tokens, "trials": trials, "filters": []}
    for count in taps:
        found["filters"].append(_filter(count, channels, tokens, trials))
        save("streamed_filter", out, found)
    return found


def _filter(taps: int, channels: int, tokens: int, trials: int) -> dict[str, Any]:
    import flax.linen as nn
    import jax
    import jax.numpy as jnp

    from jaxblt.mixers import HyenaConfig, ImplicitFilter, init_state, prepare

    config = HyenaConfig(dim=channels, filter=ImplicitFilter(taps))
    module = config.build()
    x = jnp.asarray(np.random.default_rng(0).standard_normal((tokens, 1, 1, channels)), jnp.float32)
    params = {"params": nn.meta.unbox(jax.jit(module.init)(jax.random.key(0), x[0]))["params"]}
    state = init_state(config, 1, capacity=2 * taps)
    variables = prepare(module, params, x[0], state=state)

    @jax.jit
    def call(variables: Any, x: Any, state: Any) -> Any:
        return module.apply(variables, x, segment_ids=jnp.ones(x.shape[:2], jnp.int32), state=state)

    @jax.jit
    def loop(variables: Any, state: Any) -> Any:
        return jax.lax.scan(lambda state, x: call(variables, x, state)[::-1], state, x)

    def seconds(function: Callable[..., Any], *args: Any) -> float:
        return _seconds(lambda: jax.block_until_ready(function(*args)), trials)

    piece = jnp.moveaxis(x[:PIECE, 0], 1, 0)
    return {
        "taps": taps,
        "flops_a_token_and_channel": mean_flops(taps - 1),
        "seconds_a_token": seconds(loop, variables, state) / tokens,
        "seconds_a_token_with_one_product": _with_one_product(taps, channels, trials),
        "seconds_a_piece": seconds(call, variables, piece, state),
        "seconds_a_piece_unprepared": seconds(call, params, piece, state),
    }


def _with_one_product(taps: int, channels: int, trials: int, tokens: int = 64) -> float:
    """Seconds a token of the convolution alone, if each token's output is one product with all inputs kept."""
    import jax
    import jax.numpy as jnp

    from jaxblt.mixers.history import joined, next_output, recent
    from jaxblt.mixers.marks import mark

    draw = np.random.default_rng(1).standard_normal
    filter = jnp.asarray(draw((channels, taps)), jnp.float32)

    @jax.jit
    def loop(filter: Any, past: Any, u: Any) -> Any:
        def step(past: Any, u: Any) -> tuple[Any, Any]:
            y = next_output(past, filter) + filter[None, :, :1] * u
            return joined(past, recent(u, mark(None), taps - 1)), y

        return jax.lax.scan(step, past, u)

    past, u = (jnp.asarray(draw(s), jnp.float32) for s in ((1, channels, taps - 1), (tokens, 1, channels, 1)))
    return _seconds(lambda: jax.block_until_ready(loop(filter, past, u)), trials) / tokens


def mean_flops(size: int) -> float:
    """Of a token and channel in the mean of a turn: compiled parts of `Doubling`, by how often they run.

    Args:
      size: how many steps back the filter reaches.
    """
    import jax
    import jax.numpy as jnp

    from jaxblt.mixers.doubling import NEAR, Doubling, init_doubling

    core, state = Doubling(jnp.ones((1, size + 1)), jnp.ones(1)), init_doubling(1, 1, size, jnp.float32)
    due = jnp.ones(1, bool)

    def flops(part: Callable[..., Any]) -> float:
        return jax.jit(part).lower(core, state).compile().cost_analysis()["flops"]

    total = flops(lambda core, state: core.near(state))
    total += flops(lambda core, state: core.begin_turn(due, state)) / state.turn
    block = NEAR
    while block < state.turn:
        total += flops(lambda core, state, block=block: core.join(block, due, state)) / (2 * block)
        block *= 2
    return total


def _seconds(call: Callable[[], Any], trials: int) -> float:
    """Median processor time of a call, behind one that compiles."""
    call()
    times = []
    for _ in range(trials):
        start = process_time()
        call()
        times.append(process_time() - start)
    return median(times)
