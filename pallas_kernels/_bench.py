"""The benchmark of every op: a correctness gate, then each version against the plain one and the floor."""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PRNGKeyArray

from pallas_kernels._alone import alone
from pallas_kernels._dispatch import Implementation, current_device
from pallas_kernels._measure import (
    Case,
    Ceilings,
    Measurement,
    as_program,
    compare,
    compiled,
    forward_backward,
    measure_all,
    measure_ceilings,
    this_machine,
)


@dataclass(frozen=True)
class Work:
    """The least of a pass: matmul FLOPs, and bytes read once and written once."""

    flops: float
    bytes_moved: float


@dataclass(frozen=True)
class Plan:
    """One shape's benchmark: versions of the op on the same arguments.

    Attributes:
      truth: the textbook in fp32, its outputs in the op's dtypes.
      plain: what one would write without the op; every other version is timed against it.
      versions: the rest.
      work: of "forward" and "forward+backward"; the keys choose the passes that are timed.
      bare: what the op adds something to: the overhead of versions is over the fastest of these.
    """

    truth: Case
    plain: Case
    versions: Sequence[Case]
    work: Mapping[str, Work]
    bare: Sequence[Case] = ()


def packed_ids(batch: int, length: int, documents: int) -> tuple[Int[Array, "B T"], ...]:
    """Return segment ids of documents that begin anywhere, all steps tokens.

    For one document a row there are none.
    """
    if documents == 1:
        return ()
    rng, steps = np.random.default_rng(0), np.arange(length)
    cuts = [np.sort(rng.choice(length, documents - 1, replace=False)) for _ in range(batch)]
    return (jnp.asarray([1 + np.searchsorted(row, steps, side="right") for row in cuts], jnp.int32),)


def in_fp32(op: Callable[..., Any], *args: Any) -> Any:
    """Return `op` of its float arguments in fp32, in the first's dtype: the truth of a plan."""
    wide = [x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in args]
    return op(*wide).astype(args[0].dtype)


def kernels_for(table: Sequence[Implementation], *args: Any, **options: Any) -> list[str]:
    """Name the implementations before "xla" in a table that can run a call on this machine."""
    names = [entry.name for entry in table]
    ahead = table[: names.index("xla")]
    return [entry.name for entry in ahead if entry.why_not(current_device(), *args, **options) is None]


def run_plan(plan: Plan, ceilings: Ceilings, key: PRNGKeyArray) -> dict[str, Any]:
    """Return errors of every version, then seconds of each pass.

    Raises:
      ArithmeticError: a version is further from the truth than twice what the plain one is, and than one epsilon.
    """
    cases = (plan.plain, *plan.versions, *plan.bare)
    truth, *backward = (forward_backward(case, key) for case in (plan.truth, *cases))
    programs = compiled([truth, *backward, *(cases if "forward" in plan.work else ())])
    passes = {"forward+backward": programs[1 : len(cases) + 1], "forward": programs[len(cases) + 1 :]}
    with alone():
        return _checked_and_timed(plan, programs[0], passes, ceilings)


def _checked_and_timed(
    plan: Plan, truth: Case, passes: Mapping[str, Sequence[Case]], ceilings: Ceilings
) -> dict[str, Any]:
    checked = passes["forward+backward"][: len(plan.versions) + 1]
    found: dict[str, Any] = {"errors": _check(truth, checked), "passes": []}
    for name, work in plan.work.items():
        plain, *others = passes[name]
        floor = ceilings.floor(flops=work.flops, bytes_moved=work.bytes_moved)
        for case in others[: len(plan.versions)]:
            result = compare(case, plain)
            sides = {_name(side): _figures(side) for side in (result.first, result.second)}
            ratio = {"value": result.ratio, "low": result.low, "high": result.high}
            given = {"pass": name, "flops": work.flops, "floor": floor}
            found["passes"].append({**given, "seconds": sides, "time_over_plain": ratio})
    if plan.bare:
        bare = [case.name for case in plan.bare]
        found["overhead"] = {name: overhead(passes[name], bare) for name in plan.work}
    return found


def overhead(cases: Sequence[Case], bare: Sequence[str]) -> dict[str, Any]:
    """Return median seconds of all cases of a pass, and each version's overhead as a share.

    The overhead is over the fastest bare version.
    """
    seconds = {_name(found): found.summary.median for found in measure_all(cases)}
    fastest = min(seconds[name] for name in bare)
    shares = {name: taken / fastest - 1 for name, taken in seconds.items() if name not in bare}
    return {"seconds": seconds, "share": shares}


def _name(timed: Case | Measurement) -> str:
    """Return the name of the version, whatever the pass."""
    return timed.name.split()[0]


def _figures(side: Measurement) -> dict[str, Any]:
    """Return device time and, where the profiler saw one, the span with gaps between kernels."""
    return asdict(side.summary) | ({} if side.span is None else {"span": side.span})


def check(plan: Plan, key: PRNGKeyArray) -> dict[str, float]:
    """Return the largest relative error of each version under one random cotangent.

    It is in norm, of any output or gradient.

    Raises:
      ArithmeticError: see `run_plan`.
    """
    truth, *others = (forward_backward(case, key) for case in (plan.truth, plan.plain, *plan.versions))
    return _check(truth, others)


def _check(truth: Case, others: Sequence[Case]) -> dict[str, float]:
    """Check as `check`, on cases with both passes, the plain one first."""
    right = _outputs(truth)
    errors = {_name(case): _error(_outputs(case), right) for case in others}
    epsilon = max(float(jnp.finfo(x.dtype).eps) for x in right)
    plain = errors[_name(others[0])]
    limit = max(2 * plain, epsilon)
    wrong = {name: error for name, error in errors.items() if not error <= limit}
    if wrong:
        raise ArithmeticError(f"errors {wrong} are above {limit} (the plain version's: {plain})")
    return errors


def _outputs(case: Case) -> list[Any]:
    run = as_program(case.fn)
    return [x for x in jax.tree.leaves(run(*case.args)) if jnp.issubdtype(x.dtype, jnp.floating)]


def _error(found: Sequence[Any], truth: Sequence[Any]) -> float:
    @jax.jit
    def norms(a: Any, b: Any) -> Any:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.linalg.norm(a - b), jnp.linalg.norm(b)

    def relative(a: Any, b: Any) -> float:
        # Draw on the device: a stream of a long row is a gigabyte.
        difference, size = norms(a, b)
        return float(difference) / (float(size) or 1.0)

    # Avoid max(), which lets a NaN go by
    return float(np.max([relative(a, b) for a, b in zip(found, truth, strict=True)]))


def benchmark[S](
    op: str, shapes: Sequence[S], plan: Callable[[S], Plan], argv: Sequence[str] | None = None
) -> str:
    """Run a benchmark's command line: `--shapes NAME ...`, `--versions NAME ...`, `--out FILE`.

    Returns JSON, written after each shape.

    Args:
      op: its name.
      shapes: named shapes; the first is the default.
      plan: of one shape.
      argv: instead of the process's arguments.
    """
    named = {shape.name: shape for shape in shapes}  # pyright: ignore[reportAttributeAccessIssue]
    parser = argparse.ArgumentParser(prog=f"python -m pallas_kernels.{op}.bench")
    parser.add_argument("--shapes", nargs="+", choices=list(named), default=list(named)[:1])
    parser.add_argument(
        "--versions", nargs="+", help="these alone, beside the plain one: compiling takes most of the time"
    )
    parser.add_argument("--out", type=Path, help="write the JSON here as well")
    given = parser.parse_args(argv)
    report = {"op": op, "machine": asdict(this_machine()), "ceilings": asdict(ceilings := measure_ceilings())}
    found: dict[str, Any] = {}
    for name in given.shapes:
        found[name] = run_plan(only(plan(named[name]), given.versions), ceilings, jax.random.key(0))
        if given.out:
            given.out.parent.mkdir(parents=True, exist_ok=True)
            given.out.write_text(_text(report, found), encoding="utf-8")
    return _text(report, found)


def only(plan: Plan, names: Sequence[str] | None) -> Plan:
    """Return the plan with only the versions of these names; None keeps all.

    Raises:
      ValueError: it has no version of such a name.
    """
    if names is None:
        return plan
    known = {case.name: case for case in plan.versions}
    if missing := [name for name in names if name not in known]:
        raise ValueError(f"--versions {' '.join(missing)}: this call has {', '.join(known) or 'none'} here")
    return replace(plan, versions=[known[name] for name in names])


def _text(report: dict[str, Any], found: dict[str, Any]) -> str:
    return json.dumps(report | {"shapes": found}, indent=1) + "\n"
