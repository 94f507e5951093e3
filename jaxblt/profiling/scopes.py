"""Device time by part of a model, from a trace and the text of the program that ran."""

import re
from collections.abc import Mapping
from pathlib import Path

from pallas_kernels.runtime import device_instructions, read_trace

OTHER = "other"
"""The name of what lies in no scope."""
PROGRAM = re.compile(r"^HloModule ([\w.\-]+)", re.MULTILINE)
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = .*?metadata=\{op_name=\"([^\"]*)\"", re.MULTILINE)
LOOPS = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = .*? (?:while|conditional)\(", re.MULTILINE)


def scope_totals(folder: str | Path, program: str, scopes: Mapping[str, str]) -> dict[str, float]:
    """Return device seconds of the newest trace by part of a program, and those of "other".

    XLA names an instruction after what it was made of, such as "jit(f)/BLT._decoded/up/query/dot_general"; a fusion
    after its last operation. What loops hold is counted, and the loops are not. Other programs in the trace are left
    out: they number their instructions in the same way. On a GPU compile with
    `compiler_options={"xla_gpu_enable_command_buffer": ""}`: what a command buffer launches is "other".

    Args:
      folder: as of `op_totals`.
      program: the text of what ran, `compiled.as_text()`.
      scopes: names, each with a regular expression that is looked for in an instruction's path. The first that is
        found takes it.

    Raises:
      FileNotFoundError: there is no trace.
      ValueError: a scope is named "other", or the trace has nothing of the program.
    """
    if OTHER in scopes:
        raise ValueError(f"no scope may be called {OTHER!r}, which is what lies in none: rename it")
    paths, loops = dict(INSTRUCTION.findall(program)), set(LOOPS.findall(program))
    own, ran = (PROGRAM.findall(program) or [""])[0], set[str]()
    totals = dict.fromkeys([*scopes, OTHER], 0.0)
    for name, instruction, nanoseconds in device_instructions(read_trace(folder)):
        ran.add(name)
        if name in ("", own) and instruction not in loops:
            path = paths.get(instruction, "") if name else ""
            part = next((scope for scope, rule in scopes.items() if re.search(rule, path)), OTHER)
            totals[part] += nanoseconds
    if own not in ran - {""}:
        raise ValueError(
            f"the trace has nothing of the program {own!r}, only of {sorted(ran)}: hand over the text of one that ran"
        )
    return {name: total * 1e-9 for name, total in totals.items()}
