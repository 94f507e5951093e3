"""Timing that can be trusted: device time, repeated trials, alternating comparisons, floors.

    result = measure(fn, *args)                # one function: median seconds with its 95 % interval
    versus = compare(Case("ours", f, args), Case("peer", g, args))   # alternating rounds, ratio, interval
    all_of_them = measure_all([Case("a", f, args), Case("b", g, args), ...])   # alternating rounds
    limits = measure_ceilings()                # a big matmul and a big copy on this device, now
    share = limits.floor(flops=..., bytes_moved=...) / result.summary.median

Five ways to get one trial's seconds (`Method`):

- "profiler" (default on a GPU): the union of the intervals in which the device ran something for that call,
  read from the profiler's trace: without dispatch (about 55 us a jitted call) and without gaps between
  kernels, which `Measurement.span` includes: a loop of many small kernels may spend most of its time there
  (an upper bound: profiling widens the gaps).
  Before each call a large buffer is rewritten, so that inputs come from memory, not from the cache.
- "slope" (default elsewhere): the function is repeated n and 2n times in one compiled loop;
  (time(2n) - time(n)) / n is a trial, so that every constant cost cancels. Where the median of the trials is not
  positive, n was too small for this machine's noise and they are taken again with more. The inputs pass a barrier
  together with the turn's number and the outputs are carried, so that nothing is hoisted or dropped. Inputs may
  stay in the cache; on a GPU a turn of the loop itself adds some 20 us.
- "calls": as "slope", but the turns are calls from the host, one after the other and waited for once: for programs that
  run over several devices or are compiled already. Exchanges and the gaps between kernels count, dispatch does not
  where the devices are slower than the host. A call longer than 0.3 s is a trial by itself.
- "host": wall clock around the call and its completion, for functions that are not JAX programs.
- "processor": processor time of all threads of this process instead, on a CPU that others use too.

Benchmarks that share a device take turns at it where `JAXBLT_BENCH_LOCK` names a file (`pallas_kernels._alone`).
"""

import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from pallas_kernels._alone import alone
from pallas_kernels._statistics import (
    Summary,
    median_interval,
    ratio_interval,
    summarize,
)
from pallas_kernels._trace import profile_calls

__all__ = [
    "MIN_TRIALS",
    "Case",
    "Ceilings",
    "Comparison",
    "Machine",
    "Measurement",
    "Method",
    "Summary",
    "as_program",
    "compare",
    "compiled",
    "default_method",
    "forward_backward",
    "measure",
    "measure_all",
    "measure_ceilings",
    "median_interval",
    "ratio_interval",
    "summarize",
    "this_machine",
]

Method = Literal["profiler", "slope", "calls", "host", "processor"]
"""The way seconds are taken: the profiler's device time, the wall clock of chained, repeated or single calls, or the
processor time of single calls.
"""
MIN_TRIALS = 20
_SLOPE_SECONDS = (0.01, 0.05, 0.25)
_LONG_SECONDS = 0.3
"""The seconds from which on a call is timed by itself: its constant costs are below the noise."""


@dataclass(frozen=True)
class Case:
    """A function to time with its arguments (pytrees of arrays) and the name it is reported by."""

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Machine:
    """The place and the code of a measurement: `commit` ends in "-dirty" if tracked files differ."""

    device: str
    device_count: int
    jax: str
    commit: str | None


@dataclass(frozen=True)
class Measurement:
    """One function's trials (seconds, in order), what they say, and how and where they were taken.

    span: with the profiler, median seconds from the first start to the last end on the device, gaps included.
    """

    name: str
    method: Method
    summary: Summary
    seconds: tuple[float, ...]
    machine: Machine
    span: float | None = None

    def to_json(self) -> str:
        """Return all fields as one JSON object."""
        return json.dumps(asdict(self), indent=1)


@dataclass(frozen=True)
class Comparison:
    """Two functions in alternating rounds; ratio = median(first) / median(second) with its 95 % interval."""

    first: Measurement
    second: Measurement
    ratio: float
    low: float
    high: float

    def to_json(self) -> str:
        """Return all fields as one JSON object."""
        return json.dumps(asdict(self), indent=1)


def this_machine() -> Machine:
    """Return the `Machine` of this process."""
    devices = jax.devices()
    return Machine(devices[0].device_kind, len(devices), jax.__version__, _git_commit())


def _git_commit() -> str | None:
    """Return what JAXBLT_COMMIT names, else the checkout's commit.

    It is None where this file is not one of a repository's.
    """
    if named := os.environ.get("JAXBLT_COMMIT"):
        return named
    git = ["git", "-C", str(Path(__file__).parent)]
    describe = [*git, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        subprocess.run([*git, "ls-files", "--error-unmatch", "_dispatch.py"], capture_output=True, check=True)
        return subprocess.run(describe, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def measure(
    fn: Callable[..., Any],
    *args: Any,
    name: str | None = None,
    trials: int = MIN_TRIALS,
    warmup: int = 5,
    method: Method | None = None,
) -> Measurement:
    """Time `fn(*args)` in `trials` calls, after `warmup` calls that are not counted.

    `fn` is jitted (unless method is "calls", "host" or "processor") and its outputs are materialised. The module's text
    has the methods.

    Raises:
      ValueError: fewer than 20 trials; or a slope asked of a function without array arguments.
      RuntimeError: no slope could be told from noise.
    """
    case = Case(name or getattr(fn, "__name__", type(fn).__name__), fn, args)
    return measure_all([case], trials=trials, warmup=warmup, method=method)[0]


def measure_all(
    cases: Sequence[Case], *, trials: int = MIN_TRIALS, warmup: int = 5, method: Method | None = None
) -> list[Measurement]:
    """Time cases in alternating rounds (A B C, C B A, ...): the machine's drift hits all alike.

    Raises:
      ValueError: fewer than 20 trials; an unknown method; or a slope asked of a function without array arguments.
      RuntimeError: no slope could be told from noise.
    """
    method = method or default_method()
    if method not in get_args(Method):
        raise ValueError(f"method must be one of {', '.join(get_args(Method))}, got {method!r}")
    with alone():
        samples = _alternate(cases, trials, warmup, method)
    return [_measurement(case, method, own) for case, own in zip(cases, samples, strict=True)]


def compare(
    first: Case, second: Case, *, rounds: int = MIN_TRIALS, warmup: int = 5, method: Method | None = None
) -> Comparison:
    """Time two cases in alternating rounds, as `measure_all`, and compare them.

    Raises:
      ValueError: fewer than 20 rounds; or a slope asked of a function without array arguments.
      RuntimeError: no slope could be told from noise.
    """
    one, other = measure_all([first, second], trials=rounds, warmup=warmup, method=method)
    return Comparison(one, other, *ratio_interval(np.array(one.seconds), np.array(other.seconds)))


def default_method() -> Method:
    """Return "profiler" on a GPU, "slope" elsewhere."""
    return "profiler" if jax.default_backend() == "gpu" else "slope"


@dataclass(frozen=True)
class _Samples:
    """Each trial's seconds, and its span where the profiler saw one."""

    seconds: Float[np.ndarray, " n"]
    spans: Float[np.ndarray, " n"] | None = None


def _measurement(case: Case, method: Method, samples: _Samples) -> Measurement:
    seconds, span = samples.seconds, None if samples.spans is None else float(np.median(samples.spans))
    return Measurement(case.name, method, summarize(seconds), tuple(seconds.tolist()), this_machine(), span)


def _alternate(cases: Sequence[Case], rounds: int, warmup: int, method: Method) -> list[_Samples]:
    """Take every case's trials in order, one a round, every second round backwards."""
    if rounds < MIN_TRIALS:
        raise ValueError(f"{rounds} trials say too little about spread: take at least {MIN_TRIALS}")
    forwards = list(range(len(cases)))
    order = [i for turn in range(rounds) for i in (forwards if turn % 2 == 0 else forwards[::-1])]
    turns = [[turn for turn, j in enumerate(order) if j == i] for i in forwards]
    if method in ("slope", "calls"):
        repeat = _repeated if method == "slope" else _called
        seconds = _slopes(cases, [repeat(case) for case in cases], order, warmup)
        return [_Samples(seconds[own]) for own in turns]
    calls = [_warm_call(case, warmup, jitted=method == "profiler") for case in cases]
    if method in ("host", "processor"):
        clock = time.perf_counter if method == "host" else time.process_time
        seconds = np.array([_wall(calls[i], clock=clock) for i in order])
        return [_Samples(seconds[own]) for own in turns]
    times = profile_calls([calls[i] for i in order])
    busy, span = np.array([t.busy for t in times]), np.array([t.span for t in times])
    return [_Samples(busy[own], span[own]) for own in turns]


def _warm_call(case: Case, warmup: int, *, jitted: bool) -> Callable[[], None]:
    fn = as_program(case.fn) if jitted else case.fn

    def call() -> None:
        jax.block_until_ready(fn(*case.args))

    for _ in range(warmup):
        call()
    return call


def _wall(call: Callable[..., None], *args: Any, clock: Callable[[], float] | None = None) -> float:
    clock = clock or time.perf_counter
    start = clock()
    call(*args)
    return clock() - start


def _slopes(
    cases: Sequence[Case], loops: Sequence[Callable[[int], None]], order: Sequence[int], warmup: int
) -> Float[np.ndarray, " n"]:
    """Take the cases' trials in this order.

    They get longer where a quarter of a case's drown in other work of the machine. Medians of trials drawn again, as
    intervals are made of, are positive then in more than 97.5 % of draws.
    """
    lost: list[str] = []
    for least in _SLOPE_SECONDS:
        timers = [_slope_timer(run, warmup, least) for run in loops]
        seconds = np.array([timers[i]() for i in order])
        quartiles = [
            np.quantile(seconds[np.equal(order, i)], 0.25, method="lower") for i in range(len(cases))
        ]
        lost = [case.name for case, quartile in zip(cases, quartiles, strict=True) if not quartile > 0]
        if not lost:
            return seconds
    raise RuntimeError(
        f"{lost}: 2n turns took no longer than n, although n take {_SLOPE_SECONDS[-1]} s: the machine is too busy to "
        "time them; stop other work, or use method='host'"
    )


def _slope_timer(run: Callable[[int], None], warmup: int, least: float) -> Callable[[], float]:
    """Return a function that takes one trial: (time of 2n turns - time of n turns) / n.

    n turns take `least` s. Where one turn takes _LONG_SECONDS, a trial is that turn.
    """
    run(1)
    turns, taken = 1, _wall(run, 1)
    if taken >= _LONG_SECONDS:
        return lambda: _wall(run, 1)
    while taken < least:
        turns *= 2
        taken = _wall(run, turns)
    for _ in range(warmup):
        run(turns)
    return lambda: (_wall(run, 2 * turns) - _wall(run, turns)) / turns


def _called(case: Case) -> Callable[[int], None]:
    """Return `run(n)`, which calls the case n times from the host and waits for the last."""
    # Wait after each call on CPUs: virtual devices share a few threads, and exchanges of two calls can wait for each
    # other forever.
    one_by_one = jax.default_backend() == "cpu"

    def run(count: int) -> None:
        for turn in range(count):
            result = case.fn(*case.args)
            if one_by_one or turn == count - 1:
                jax.block_until_ready(result)

    return run


def _repeated(case: Case) -> Callable[[int], None]:
    """Return `run(n)`, which calls the case n times in a row in one compiled loop."""
    if not jax.tree.leaves(case.args):
        raise ValueError(
            f"{case.name}: the slope method needs an array argument, or the compiler runs the function "
            "once for all turns; pass arrays as arguments instead of closing over them, or use method='host'"
        )

    @jax.jit
    def loop(count: Array, args: tuple[Any, ...]) -> Any:
        def turn(index: Array, _: Any) -> Any:
            this_turns, _ = jax.lax.optimization_barrier((args, index))
            return case.fn(*this_turns)

        outputs = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(case.fn, *args))
        return jax.lax.fori_loop(0, count, turn, outputs)

    args = jax.tree.map(jnp.asarray, case.args)
    return lambda count: jax.block_until_ready(loop(jnp.asarray(count, jnp.int32), args))


def as_program(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return fn under `jax.jit`, or itself if it is compiled already."""
    return fn if isinstance(fn, jax.stages.Compiled) else jax.jit(fn)


def compiled(cases: Sequence[Case]) -> list[Case]:
    """Compile the cases side by side; nothing where trials are slopes.

    Compiling takes most of a benchmark's time.
    """
    if default_method() != "profiler":
        return list(cases)
    with ThreadPoolExecutor() as pool:
        # Compile each program while the next is lowered: lowering holds Python's lock, compiling does not.
        waiting = [pool.submit(jax.jit(case.fn).lower(*case.args).compile) for case in cases]
        programs = [program.result() for program in waiting]
    return [replace(case, fn=program) for case, program in zip(cases, programs, strict=True)]


def forward_backward(case: Case, key: PRNGKeyArray) -> Case:
    """Return the case's value and gradients, all kept.

    They are outputs, and their vjp with a random normal cotangent. A cotangent of ones (`grad` of a sum) lets the
    compiler drop work, so it is random, and an argument. It is there when the outputs are, as in a model, where a loss
    lies between: no loop does both passes at once. Gradients are taken for every floating array among the arguments.
    """
    leaves, tree = jax.tree.flatten(case.args)
    inputs = [leaf for leaf in leaves if _is_floating(leaf)]
    others = [leaf for leaf in leaves if not _is_floating(leaf)]

    def outputs_of(inputs: list[Array], others: list[Array]) -> tuple[list[Array], list[Array]]:
        floats, rest = iter(inputs), iter(others)
        args = jax.tree.unflatten(tree, [next(floats if _is_floating(leaf) else rest) for leaf in leaves])
        out = jax.tree.leaves(case.fn(*args))
        return [o for o in out if _is_floating(o)], [o for o in out if not _is_floating(o)]

    def run(inputs: list[Array], others: list[Array], cotangents: list[Array]) -> Any:
        out, vjp, rest = jax.vjp(lambda x: outputs_of(x, others), inputs, has_aux=True)
        out, cotangents = jax.lax.optimization_barrier((out, cotangents))
        return out, rest, vjp(cotangents)

    shapes, _ = jax.eval_shape(outputs_of, inputs, others)
    keys = jax.random.split(key, len(shapes))
    cotangents = [jax.random.normal(k, s.shape, s.dtype) for k, s in zip(keys, shapes, strict=True)]
    return Case(f"{case.name} forward+backward", run, (inputs, others, cotangents))


def _is_floating(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


@dataclass(frozen=True)
class Ceilings:
    """The device's measured peaks: a dense matmul (FLOP/s, in `dtype`), a copy (bytes read + written per s)."""

    flops_per_second: float
    bytes_per_second: float
    dtype: str
    machine: Machine

    def floor(self, *, flops: float, bytes_moved: float) -> float:
        """Return the least seconds of such a program: max(flops / peak, bytes / bandwidth)."""
        return max(flops / self.flops_per_second, bytes_moved / self.bytes_per_second)


def measure_ceilings(
    dtype: Any = None,
    *,
    matmul_size: int | None = None,
    copy_bytes: int | None = None,
    method: Method | None = None,
) -> Ceilings:
    """Measure both ceilings: the best of two matmul layouts and of two ways to copy.

    Defaults: bf16, 8192 x 8192 and 1 GiB on an accelerator; fp32, 512 x 512 and 64 MiB on CPU.
    """
    on_cpu = jax.default_backend() == "cpu"
    dtype = jnp.dtype(dtype or (jnp.float32 if on_cpu else jnp.bfloat16))
    size = matmul_size or (512 if on_cpu else 8192)
    count = (copy_bytes or (2**26 if on_cpu else 2**30)) // dtype.itemsize
    pair = tuple(jax.random.normal(key, (size, size), dtype) for key in jax.random.split(jax.random.key(0)))
    flat = jax.random.normal(jax.random.key(1), (count,), dtype)
    matmul = _fastest([Case("NN", lambda a, b: a @ b, pair), Case("NT", lambda a, b: a @ b.T, pair)], method)
    copy = _fastest([Case("copy", jnp.copy, (flat,)), Case("negate", jnp.negative, (flat,))], method)
    return Ceilings(2.0 * size**3 / matmul, 2.0 * flat.nbytes / copy, dtype.name, this_machine())


def _fastest(cases: Sequence[Case], method: Method | None) -> float:
    found = measure_all(cases if method else compiled(cases), warmup=3, method=method)
    return min(each.summary.median for each in found)
