"""Device time by kernel, of a train step or another compiled program, from a trace and the text of what ran."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jaxblt.profiling.scopes import LOOPS, PROGRAM
from pallas_kernels.runtime import device_instructions, read_trace

Kind = Literal[
    "matrix products", "attention", "other kernels", "collectives", "copies", "reductions", "elementwise"
]
Pass = Literal["forward", "again", "backward", "update"]

KINDS: dict[Kind, str] = {
    "attention": r"fmha|attention",
    "matrix products": r"cublas|gemm|^dot|\bdot\b",
    "collectives": r"all-reduce|all-gather|reduce-scatter|collective|all-to-all",
    "copies": r"copy|transpose|slice|memcpy|memset|pad|scatter|gather",
    "other kernels": r"custom-call",
    "reductions": r"reduce|sort",
    "elementwise": r"",
}
"""Kinds of kernels, each with what its name holds; the first that is found counts. XLA names a fusion after what it
ends with: "reductions" are norms, losses and sums, and whatever was fused with them."""

ENTRY = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (?:\([^)]*\)|\S+) ([a-z][\w\-]*)\((.*)$", re.MULTILINE)
TARGET = re.compile(r'custom_call_target="([^"]*)"')
PATH = re.compile(r'op_name="([^"]*)"')
WRAPPED = re.compile(r"\b(?:jit|jvp|transpose|vmap|rematted_computation|checkpoint)\b\(?|[()]")
MOST_STEPS = 4
"""Names of a path that are kept, from its end."""


@dataclass(frozen=True)
class KernelTotal:
    """Kernels that are alike but for the layer, and their time.

    Attributes:
      kind: one of `KINDS`.
      during: the forward pass, what remat computes "again", the backward pass, or the "update" of the state.
      name: the instruction, or what a custom call calls, without numbers.
      path: the last names of what it was made of, layers without numbers.
      count: launches.
      seconds: of all of them.
    """

    kind: Kind
    during: Pass
    name: str
    path: str
    count: int
    seconds: float


def kernel_totals(folder: str | Path, program: str) -> list[KernelTotal]:
    """Return device time of the newest trace by kernel, longest first; layers count together.

    Loops are left out, and what they hold is counted. What belongs to no instruction of the program, such as the
    host's copies, has an empty path. On a GPU compile with
    `compiler_options={"xla_gpu_enable_command_buffer": ""}`, or kernels cannot be told apart.

    Args:
      folder: as of `op_totals`.
      program: the text of what ran, `compiled.as_text()`.

    Raises:
      FileNotFoundError: there is no trace.
      ValueError: the trace has nothing of the program.
    """
    known, loops = dict(_instructions(program)), set(LOOPS.findall(program))
    own, ran = (PROGRAM.findall(program) or [""])[0], set[str]()
    totals: dict[tuple[Kind, Pass, str, str], tuple[int, float]] = {}
    for module, instruction, nanoseconds in device_instructions(read_trace(folder)):
        ran.add(module)
        if module not in ("", own) or instruction in loops:
            continue
        key = known.get(instruction) if module else None
        key = key or (kind_of(instruction), "update", _bare(instruction), "")
        count, seconds = totals.get(key, (0, 0.0))
        totals[key] = count + 1, seconds + nanoseconds * 1e-9
    if own not in ran - {""}:
        raise ValueError(
            f"the trace has nothing of the program {own!r}, only of {sorted(ran)}: hand over the text of one that ran"
        )
    found = [KernelTotal(*key, count, seconds) for key, (count, seconds) in totals.items()]
    return sorted(found, key=lambda row: -row.seconds)


def kind_of(name: str) -> Kind:
    """Return the kind of a kernel whose instruction, target or fusion is called so."""
    return next(kind for kind, rule in KINDS.items() if re.search(rule, name))


def _instructions(program: str) -> Iterator[tuple[str, tuple[Kind, Pass, str, str]]]:
    """Yield each instruction with what its time is added up by."""
    for name, opcode, rest in ENTRY.findall(program):
        target, path = TARGET.search(rest), PATH.search(rest)
        called = target[1] if target else _bare(name)
        kind = kind_of(f"{opcode} {called}")
        where = path[1] if path else ""
        yield name, (kind, _pass_of(where), called, _short(where))


def _pass_of(path: str) -> Pass:
    if "rematted_computation" in path:
        return "again"
    return "backward" if "transpose(" in path else "forward" if "jvp(" in path else "update"


def _short(path: str) -> str:
    """Return the last names of a path without numbers of layers, methods and what JAX wraps programs in."""
    names = [name for name in WRAPPED.sub("", path).split("/") if name and "->" not in name]
    bare = [re.sub(r"(_\d+)?(\..*)?$", "", name) for name in names]
    kept = [name for name, before in zip(bare, ["", *bare], strict=False) if name != before]
    return "/".join(kept[-MOST_STEPS:])


def _bare(name: str) -> str:
    """Return a name without the numbers that tell instructions apart."""
    return re.sub(r"[._]\d+", "", name)
