"""The cost of a token behind a long filter, on a CPU: python -m experiments.benchmark streamed_filter --out FILE."""

from collections.abc import Callable
from statistics import median
from time import process_time
from typing import Any

import numpy as np

from experiments.benchmark.figures.saved import save

PIECE = 1024
"""Tokens of a long call."""
FEW = 128
"""Tokens of the ring buffer's loop: each costs the same."""


def streamed_filter(
    out: str = "runs/benchmark/streamed_filter.json",
    taps: tuple[int, ...] = (1024, 8192, 32_768),
    rows: tuple[int, ...] = (1, 8),
    channels: int = 64,
    rounds: int = 5,
) -> dict[str, Any]:
    """Measure processor time of a convolution token by token, by a ring buffer and by blocks of doubling sizes.

    A token's time is the mean over a turn (see `hyena.doubling`), in a loop inside one program, fp32. Several
    rows stand at different tokens of their turns. A piece is a call of a Hyena mixer, one row, with prepared taps and
    without. Times are of all threads, medians of rounds in which the cases take turns. FLOPs are the compiler's count.

    Args:
      out: JSON file to write.
      taps: of the filters, more than 512.
      rows: that take a token each.
      channels: of the convolution.
      rounds: of each case.

    Raises:
      ValueError: a filter is streamed without blocks.
    """
    from jaxblt.mixers.hyena.finite_filter import MAX_BLOCKED

    if few := [count for count in taps if count <= MAX_BLOCKED]:
        raise ValueError(f"--taps must be more than {MAX_BLOCKED}, as fewer have no blocks: {few}")
    found: dict[str, Any] = {"channels": channels, "rounds": rounds, "piece": PIECE, "filters": []}
    for count in taps:
        cases = {(form, n): case(count, n, channels) for n in rows for form, case in FORMS.items()}
        pieces = _pieces(count, channels)
        seconds = _medians({**{key: run for key, (run, _) in cases.items()}, **pieces}, rounds)
        found["filters"].append(
            {
                "taps": count,
                "flops_a_token_and_channel": {"ring": 2 * count, "doubling": mean_flops(count - 1)},
                "seconds_a_token": [
                    {"rows": n} | {form: seconds[form, n] / cases[form, n][1] for form in FORMS} for n in rows
                ],
                "seconds_a_piece": {name: seconds[name] for name in pieces},
            }
        )
        save("streamed_filter", out, found)
    return found


Case = tuple[Callable[[], Any], int]
"""A loop over tokens, and how many these are."""


def _ring(taps: int, rows: int, channels: int) -> Case:
    """Return a loop whose outputs are products of all inputs kept, in the order of the ring, with turned taps."""
    import jax
    import jax.numpy as jnp

    put = lambda past, u, at: jax.lax.dynamic_update_slice_in_dim(past, u, at, 1)  # noqa: E731
    cut = lambda twice, at: jax.lax.dynamic_slice_in_dim(twice, at, taps, 1)  # noqa: E731

    @jax.jit
    def loop(twice: Any, past: Any, place: Any, u: Any) -> Any:
        def step(state: Any, u: Any) -> tuple[Any, Any]:
            past, place = state
            past = jax.vmap(put)(past, u, place)
            turned = jax.vmap(cut, in_axes=(None, 0))(twice, taps - 1 - place)
            y = jnp.einsum("bds,bds->bd", past, turned, precision=jax.lax.Precision.HIGHEST)
            return (past, (place + 1) % taps), y

        return jax.lax.scan(step, (past, place), u)

    lags = jnp.flip(_drawn(channels, taps), -1)
    given = (jnp.concatenate([lags, lags], -1), jnp.zeros((rows, channels, taps)), _places(rows, taps))
    u = _drawn(FEW, rows, channels, 1)
    return lambda: jax.block_until_ready(loop(*given, u)), FEW


def _doubling(taps: int, rows: int, channels: int) -> Case:
    import dataclasses

    import jax
    import jax.numpy as jnp

    from jaxblt.mixers.hyena.doubling import Doubling, init_doubling

    @jax.jit
    def loop(core: Any, state: Any, u: Any) -> Any:
        ids = jnp.ones((rows, 1), jnp.int32)
        return jax.lax.scan(lambda state, u: core.next(u, ids, state)[::-1], state, u)

    core, state = (
        Doubling(_drawn(channels, taps), jnp.zeros(channels)),
        init_doubling(rows, channels, taps - 1, jnp.float32),
    )
    state = dataclasses.replace(state, place=_places(rows, state.turn))
    u = _drawn(state.turn, rows, channels, 1)
    return lambda: jax.block_until_ready(loop(core, state, u)), state.turn


FORMS: dict[str, Callable[[int, int, int], Case]] = {"ring": _ring, "doubling": _doubling}


def _pieces(taps: int, channels: int) -> dict[str, Callable[[], Any]]:
    """Return calls of `PIECE` tokens of a Hyena mixer."""
    import flax.linen as nn
    import jax
    import jax.numpy as jnp

    from jaxblt.mixers import HyenaConfig, ImplicitFilter, init_state, prepare

    config = HyenaConfig(dim=channels, filter=ImplicitFilter(taps))
    module, x = config.build(), _drawn(1, PIECE, channels)
    params = {"params": nn.meta.unbox(jax.jit(module.init)(jax.random.key(0), x)["params"])}
    state = init_state(config, 1, capacity=2 * taps)
    prepared = prepare(module.apply, params, x[:, :1], state=state)

    @jax.jit
    def call(variables: Any, x: Any, state: Any) -> Any:
        return module.apply(variables, x, segment_ids=jnp.ones(x.shape[:2], jnp.int32), state=state)

    return {
        "prepared": lambda: jax.block_until_ready(call(prepared, x, state)),
        "unprepared": lambda: jax.block_until_ready(call(params, x, state)),
    }


def mean_flops(size: int) -> float:
    """Count FLOPs of a token and channel in the mean of a turn: parts of `Doubling`, by how often they run.

    Args:
      size: how many steps back the filter reaches.
    """
    import jax
    import jax.numpy as jnp

    from jaxblt.mixers.hyena.doubling import NEAR, Doubling, init_doubling

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


def _drawn(*shape: int) -> Any:
    import jax.numpy as jnp

    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)


def _places(rows: int, period: int) -> Any:
    """Return places: the first row at its start, the others drawn."""
    import jax.numpy as jnp

    places = np.random.default_rng(1).integers(0, period, rows)
    return jnp.asarray(np.where(np.arange(rows) == 0, 0, places), jnp.int32)


def _medians(calls: dict[Any, Callable[[], Any]], rounds: int) -> dict[Any, float]:
    """Return median processor time of each, of rounds in which they take turns, behind one that compiles."""
    times: dict[Any, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            start = process_time()
            call()
            if turn:
                times[name].append(process_time() - start)
    return {name: median(taken) for name, taken in times.items()}
