"""Time and memory of a block by length: python -m experiments.benchmark scaling --mixers D A --out FILE."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxblt.models import StackConfig
    from jaxblt.profiling import Case

LONG = 16_384
"""Tokens from which the exponent is fitted: below, constant costs hide it."""
PASSES = ("forward", "forward+backward")
STATES = (32, 64, 128, 256)
"""Slots of a head of the state engines T32, T64, T128 and T256."""


def scaling(
    out: str,
    mixers: tuple[str, ...] = ("D", "G", "2", "H", "T32", "T64", "T128", "T256", "A"),
    lengths: tuple[int, ...] = (
        2048,
        4096,
        8192,
        16_384,
        32_768,
        65_536,
        131_072,
        262_144,
        524_288,
        1_048_576,
    ),
    dim: int = 1024,
    attention_up_to: int = 65_536,
    trials: int = 20,
) -> dict[str, Any]:
    """Times a block of each mixer with its MLP on one row, bf16, and plans its memory with and without remat.

    Programs of one length are compiled side by side, and timed in turns. One that runs out of memory in a call before
    that is not timed: None. Of each mixer it tells the exponent of time in length, and the length from which it is
    faster than attention's block, with the interval of the medians' intervals.

    Args:
      out: file for the figures as JSON, written anew after each length.
      mixers: names of the stack's table; A is attention. T32, T64, T128 and T256 are state engines of so many slots.
        U, L and N (GRU, LSTM, neural Turing machine) step token by token: give them few lengths.
      lengths: tokens of the row, rising.
      dim: width; heads have 128.
      attention_up_to: longest row of attention.
      trials: timed calls of each, at least 20.

    Raises:
      ValueError: lengths do not rise, a mixer is unknown, or there is nothing to time.
    """
    from experiments.benchmark._schema import save

    if list(lengths) != sorted(set(lengths)):
        raise ValueError(f"--lengths must rise, got {lengths}")
    if not mixers or not lengths:
        raise ValueError(f"there is nothing to time: name mixers and lengths, got {mixers} and {lengths}")
    figures: dict[str, Any] = {
        "dim": dim,
        "rows": 1,
        "parameters": {name: parameters(name, dim) for name in mixers},
        "blocks": {name: [] for name in mixers},
    }
    for length in lengths:
        chosen = [name for name in mixers if name != "A" or length <= attention_up_to]
        for name, found in at_length(chosen, length, dim, trials).items():
            figures["blocks"][name].append({"tokens": length, **found})
        figures["growth"] = {name: growth(found) for name, found in figures["blocks"].items()}
        figures["crossover"] = {
            name: crossing(found, figures["blocks"]["A"])
            for name, found in figures["blocks"].items()
            if name != "A" and "A" in mixers
        }
        save("scaling", out, figures)
    return figures


def block(name: str, dim: int) -> "StackConfig":
    """One block of a mixer and an MLP.

    Raises:
      ValueError: the mixer is none of the benchmark's.
    """
    from jaxblt.mixers import (
        AttentionConfig,
        GatedDeltaNetConfig,
        GatedLinearAttentionConfig,
        GatedRecurrenceConfig,
        GRUConfig,
        HyenaConfig,
        LSTMConfig,
        Mamba2Config,
        MixerConfig,
        NTMConfig,
        StateEngineConfig,
    )
    from jaxblt.models import StackConfig

    heads = max(dim // 128, 1)
    engine = StateEngineConfig(dim=dim, num_heads=heads)
    known: dict[str, MixerConfig] = {
        "A": AttentionConfig(dim=dim, num_heads=heads, packed=False),
        "D": GatedDeltaNetConfig(dim=dim, num_heads=heads),
        "G": GatedLinearAttentionConfig(dim=dim, num_heads=heads),
        "H": HyenaConfig(dim=dim, packed=False),
        "2": Mamba2Config(dim=dim),
        "R": GatedRecurrenceConfig(dim=dim),
        "P": GatedRecurrenceConfig(dim=dim, cell="minlstm"),
        "U": GRUConfig(dim=dim, num_heads=heads),
        "L": LSTMConfig(dim=dim, num_heads=heads),
        "N": NTMConfig(dim=dim),
        **{f"T{slots}": replace(engine, num_slots=slots) for slots in STATES},
    }
    if name not in known:
        raise ValueError(f"unknown mixer {name!r}, choose among {', '.join(known)}")
    return StackConfig(dim=dim, num_layers=1, pattern=(name,), mixers={name: known[name]}, scan=False)


def parameters(name: str, dim: int) -> int:
    """Numbers that a block learns."""
    import jax
    import jax.numpy as jnp

    from jaxblt.models.stack import Stack
    from jaxblt.training.flops import count_params

    x = jax.ShapeDtypeStruct((1, 16, dim), jnp.float32)
    return count_params(jax.eval_shape(Stack(block(name, dim)).init, jax.random.key(0), x)["params"])[0]


def at_length(mixers: Sequence[str], length: int, dim: int, trials: int) -> dict[str, dict[str, Any]]:
    """Seconds of both passes, None for one that does not fit, and planned bytes of each block on a row of this length.

    MFU counts the matrix products of the forward pass in plain XLA, and three times as many with gradients.
    """
    import jax
    import jax.numpy as jnp

    from experiments.benchmark._forward import draw, planned_bytes
    from experiments.benchmark._schema import timed
    from jaxblt.models.stack import Stack
    from jaxblt.profiling import Case, compiled, forward_backward, measure_all
    from jaxblt.training.flops import as_shapes, countable_device, matmul_flops, mfu, peak_flops
    from jaxblt.training.state import widen

    def case(name: str, remat: str = "none") -> Case:
        config = replace(block(name, dim), remat=remat)
        params = draw(Stack(config), jnp.zeros((1, 16, dim), jnp.float32))

        def program(params: Any, x: Any) -> Any:
            return Stack(config, x.dtype).apply({"params": widen(params)}, x)[0]  # pyright: ignore[reportIndexIssue]

        return Case(name, program, (params, x))

    key = jax.random.key(length)
    x = jax.random.normal(key, (1, length, dim), jnp.bfloat16)
    cases = [case(name) for name in mixers]
    with jax.default_device(countable_device()):
        flops = {one.name: matmul_flops(one.fn, *as_shapes(one.args)) for one in cases}
    backward = [forward_backward(one, key) for one in (*cases, *(case(name, "full") for name in mixers))]
    programs, count = compiled([*cases, *backward]), len(mixers)
    forward, both, again = (programs[i * count : (i + 1) * count] for i in range(3))
    peak = peak_flops(jax.devices()[0].device_kind)
    found: dict[str, dict[str, Any]] = {name: {"forward_flops": flops[name]} for name in mixers}
    for label, programs_of, times in zip(PASSES, (forward, both), (1, 3), strict=True):
        held = {name: one for name, one in zip(mixers, programs_of, strict=True) if fits(one)}
        measured = measure_all(list(held.values()), trials=trials) if held else ()
        for name in mixers:
            found[name][label] = None
        for name, taken in zip(held, measured, strict=True):
            seconds = taken.summary.median
            found[name][label] = timed(taken) | {
                "tokens_per_second": length / seconds,
                "microseconds_per_token": 1e6 * seconds / length,
                "mfu": None if peak is None else mfu(times * flops[name] / length, length / seconds, peak),
            }
    for name, kept, made_again in zip(mixers, both, again, strict=True):
        found[name]["planned_bytes"] = planned_bytes(kept.fn, *kept.args)
        found[name]["planned_bytes_with_remat"] = planned_bytes(made_again.fn, *made_again.args)
    return found


def fits(case: "Case") -> bool:
    """Whether a call of the program, by itself, finds the memory that it needs."""
    import jax

    from experiments.benchmark._sequence import fitting

    def call() -> dict[str, Any]:
        jax.block_until_ready(case.fn(*case.args))
        return {}

    return "out_of_memory" not in fitting(call)


def growth(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The exponent of each pass's time."""
    from experiments.benchmark._exponents import exponent

    def of(p: str) -> dict[str, Any] | None:
        timed = [(at["tokens"], at[p]["median"]) for at in found if at[p]]
        return exponent([n for n, _ in timed], [seconds for _, seconds in timed], first=LONG)

    return {p: of(p) for p in PASSES}


def crossing(found: Sequence[dict[str, Any]], attention: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """For each pass the length from which the block is faster than attention's, and the interval's ends."""
    from experiments.benchmark._exponents import crossover

    def of(p: str) -> dict[str, float | None]:
        pairs = [(own, other) for own, other in zip(found, attention, strict=False) if own[p] and other[p]]
        tokens = [own["tokens"] for own, _ in pairs]

        def crossed(above: str, below: str) -> float | None:
            return crossover(tokens, [other[p][above] / own[p][below] for own, other in pairs])

        return {
            "value": crossed("median", "median"),
            "low": crossed("high", "low"),
            "high": crossed("low", "high"),
        }

    return {p: of(p) for p in PASSES}
