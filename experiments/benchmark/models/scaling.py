"""Time and memory of a block by length: python -m experiments.benchmark scaling --mixers D A --out FILE."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from experiments.benchmark.models.block_programs import (
    PASSES,
    Block,
    Setting,
    compile_blocks,
    draw_block,
    parameters,
    programs,
)

if TYPE_CHECKING:
    from jaxblt.profiling import Case

LENGTHS = tuple(2**n for n in range(11, 21))
LONG = 16_384
"""Tokens from which exponents are fitted on a GPU: below, constant costs hide them."""


def scaling(
    out: str,
    mixers: tuple[str, ...] = ("D", "G", "2", "H", "T32", "T64", "T128", "T256", "A"),
    lengths: tuple[int, ...] = LENGTHS,
    dim: int = 1024,
    attention_up_to: int = 65_536,
    trials: int = 20,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    method: Literal["profiler", "calls", "processor"] | None = None,
    fit_from: int = LONG,
) -> dict[str, Any]:
    """Time a block of each mixer with its MLP on one row, and plan its memory.

    Programs of one length are compiled side by side, and timed in turns. One that runs out of memory in a call before
    that is not timed: None. Of each mixer it tells the exponent of time in length, and the length from which it is
    faster than attention's block, with the interval of the medians' intervals.

    Args:
      out: file for the figures as JSON, written anew after each length.
      mixers: names of the stack's table; A is attention. T32, T64, T128 and T256 are state engines of so many slots,
        T32_edges and so on the same with a GRU, attention among slots and routes that see them, every 64 tokens.
        U, L and N (GRU, LSTM, neural Turing machine) step token by token: give them few lengths.
      lengths: tokens of the row, rising.
      dim: width; heads have 128.
      attention_up_to: longest row of attention.
      trials: timed calls of each, at least 20.
      dtype: of the computation. MFU is only of bfloat16.
      method: "calls" takes the wall clock, for programs of more kernels than the profiler counts, such as edges in long
        rows; "processor" the processor time, on a CPU that others use too; None for what suits the device.
      fit_from: tokens from which exponents are fitted.

    Raises:
      ValueError: lengths do not rise, a mixer is unknown or named twice, or there is nothing to time, or too seldom.
    """
    from experiments.benchmark.figures.saved import save
    from jaxblt.profiling import MIN_TRIALS

    if list(lengths) != sorted(set(lengths)):
        raise ValueError(f"--lengths must rise, got {lengths}")
    if not mixers or not lengths:
        raise ValueError(f"there is nothing to time: name mixers and lengths, got {mixers} and {lengths}")
    if len(set(mixers)) < len(mixers):
        raise ValueError(f"--mixers must name different mixers, got {mixers}")
    if trials < MIN_TRIALS:
        raise ValueError(
            f"--trials must be at least {MIN_TRIALS}, got {trials}: fewer say little about spread"
        )
    setting = Setting(dim, dtype, trials, method)
    figures: dict[str, Any] = {
        "dim": dim,
        "dtype": dtype,
        "rows": 1,
        "parameters": {name: parameters(name, dim) for name in mixers},
        "blocks": {name: [] for name in mixers},
    }
    drawn = {name: draw_block(name, dim) for name in mixers}
    for length in lengths:
        chosen = [name for name in mixers if name != "A" or length <= attention_up_to]
        blocks = compile_blocks({name: programs(name, drawn[name], length, setting) for name in chosen})
        for name, found in at_length(blocks, drawn, length, setting).items():
            figures["blocks"][name].append({"tokens": length, **found})
        save(recorded_name(), out, figures | summary(figures["blocks"], fit_from))
    return figures | summary(figures["blocks"], fit_from)


def recorded_name() -> str:
    """Return what the record calls this benchmark; figures of a CPU never stand for those of a GPU."""
    import jax

    return "scaling_on_cpu" if jax.default_backend() == "cpu" else "scaling"


def summary(blocks: dict[str, list[dict[str, Any]]], first: int) -> dict[str, Any]:
    """Return exponents from a length on, and where blocks pass attention's."""
    attention = blocks.get("A")
    return {
        "growth": {name: growth(found, first) for name, found in blocks.items()},
        "crossover": {
            name: crossing(found, attention)
            for name, found in blocks.items()
            if name != "A" and attention is not None
        },
    }


def at_length(
    blocks: dict[str, Block], drawn: dict[str, Any], length: int, setting: Setting
) -> dict[str, dict[str, Any]]:
    """Time both passes of each block on a row of this length, and plan its bytes.

    A block that does not fit gives None. MFU counts the matrix products of the forward pass in plain XLA, and three
    times as many with gradients.
    """
    import jax

    from experiments.benchmark.figures.programs import planned_bytes
    from experiments.benchmark.figures.saved import timed
    from jaxblt.profiling import measure_all
    from jaxblt.training.flops import mfu, peak_flops

    shape = (1, length, setting.dim)
    # Draw one pair for all: at a million tokens each array has 2 GB
    x, dy = (jax.random.normal(key, shape, setting.dtype) for key in jax.random.split(jax.random.key(length)))
    peak = peak_flops(jax.devices()[0].device_kind) if setting.dtype == "bfloat16" else None
    found: dict[str, dict[str, Any]] = {name: {"forward_flops": one.flops} for name, one in blocks.items()}
    for label, times in zip(PASSES, (1, 3), strict=True):
        inputs = (x,) if times == 1 else (x, dy)
        cases = {name: replace(one.cases[label], args=(drawn[name], *inputs)) for name, one in blocks.items()}
        held = {name: one for name, one in cases.items() if fits(one)}
        measured = (
            measure_all(list(held.values()), trials=setting.trials, method=setting.method) if held else ()
        )
        for name in blocks:
            found[name][label] = None
        for name, taken in zip(held, measured, strict=True):
            seconds, flops = taken.summary.median, blocks[name].flops
            found[name][label] = timed(taken) | {
                "tokens_per_second": length / seconds,
                "microseconds_per_token": 1e6 * seconds / length,
                "mfu": None if peak is None else mfu(times * flops / length, length / seconds, peak),
            }
    for name, one in blocks.items():
        longest = one.cases[PASSES[1]]
        found[name]["planned_bytes"] = planned_bytes(longest.fn, *longest.args)
    return found


def fits(case: "Case") -> bool:
    """Return whether a call of the program, by itself, finds the memory that it needs."""
    import jax

    from experiments.benchmark.figures.programs import run_if_it_fits

    def call() -> dict[str, Any]:
        jax.block_until_ready(case.fn(*case.args))
        return {}

    return "out_of_memory" not in run_if_it_fits(call)


def growth(found: Sequence[dict[str, Any]], first: int = LONG) -> dict[str, Any]:
    """Return the exponent of each pass's time from a length on."""
    from experiments.benchmark.figures.exponents import exponent

    def of(p: str) -> dict[str, Any] | None:
        timed = [(at["tokens"], at[p]["median"]) for at in found if at[p]]
        return exponent([n for n, _ in timed], [seconds for _, seconds in timed], first=first)

    return {p: of(p) for p in PASSES}


def crossing(found: Sequence[dict[str, Any]], attention: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return for each pass the length from which the block is faster than attention's, and the interval's ends."""
    from experiments.benchmark.figures.exponents import crossover

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
