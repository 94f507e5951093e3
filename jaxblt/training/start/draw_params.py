"""Parameters drawn by small programs, which arrays that are made alike share.

One program for all arrays of a model grows with its depth, and XLA merges equal draws into kernels that take the longer
to compile.
"""

from collections import defaultdict
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core


def draw_traced(traced: core.ClosedJaxpr, places: Sequence[Any]) -> list[Any]:
    """Run a traced `init` as jit would, compiling less where arrays are made alike from keys.

    Keys come first. Then arrays of one kind share a program that makes one of them, and what has no like is made by one
    more. So layers that are not scanned take as many programs as one of them. They compile side by side.

    Args:
      traced: takes nothing. What its results do not depend on is not computed.
      places: the shardings of its results.
    """
    jaxpr = traced.jaxpr
    makers = {var: equation for equation in jaxpr.eqns for var in equation.outvars}
    known = dict(zip(jaxpr.constvars, traced.consts, strict=True))
    keys = [var for var in makers if _is_key(var)]
    folded = _cut(jaxpr, makers, keys, known)
    # Outside of jit an operation on keys is compiled once, and runs for each of them.
    known |= dict(zip(keys, _run(folded, *(known[var] for var in folded.invars)), strict=True))
    pieces = [_cut(jaxpr, makers, [var], known) for var in jaxpr.outvars]
    alike = defaultdict(list)
    for number, piece in enumerate(pieces):
        alike[_kind(piece), places[number]].append(number)
    alone = [numbers[0] for numbers in alike.values() if len(numbers) == 1]
    whole = _cut(jaxpr, makers, [jaxpr.outvars[i] for i in alone], known)
    kinds = [numbers for numbers in alike.values() if len(numbers) > 1]
    parts = [(whole, [places[i] for i in alone]), *((pieces[n[0]], [places[n[0]]]) for n in kinds)]
    # Lower in this thread, whose mesh others do not see
    lowered = [
        jax.jit(partial(_run, part), out_shardings=out).lower(*(known[var] for var in part.invars))
        for part, out in parts
    ]
    with ThreadPoolExecutor() as pool:
        made, *others = pool.map(lambda program: program.compile(), lowered)
    drawn = dict(zip(alone, made(*(known[var] for var in whole.invars)), strict=True))
    for numbers, make in zip(kinds, others, strict=True):
        drawn |= {i: make(*(known[var] for var in pieces[i].invars))[0] for i in numbers}
    return [drawn[i] for i in range(len(pieces))]


def draw_at_once(traced: core.ClosedJaxpr, places: Sequence[Any]) -> list[Any]:
    """Run a traced `init` as one program, which compiles sooner where arrays are few."""
    return jax.jit(core.jaxpr_as_fun(traced), out_shardings=list(places))()


def only(traced: core.ClosedJaxpr, numbers: Sequence[int]) -> core.ClosedJaxpr:
    """Return a traced `init` with these of its results alone."""
    jaxpr = traced.jaxpr
    return core.ClosedJaxpr(jaxpr.replace(outvars=[jaxpr.outvars[i] for i in numbers]), traced.consts)


def _cut(
    jaxpr: core.Jaxpr,
    makers: dict[core.Var, core.JaxprEqn],
    wanted: Sequence[Any],
    known: Collection[core.Var],
) -> core.Jaxpr:
    """Return the part of a program that makes what is wanted, from what is known of it."""
    inputs, needed, left = {}, set(), list(wanted)
    while left:
        if isinstance(var := left.pop(), core.Literal):
            continue
        if var in known:
            inputs[var] = None
        elif id(makers[var]) not in needed:
            needed.add(id(makers[var]))
            left += makers[var].invars
    equations = [equation for equation in jaxpr.eqns if id(equation) in needed]
    return jaxpr.replace(
        constvars=[], invars=list(inputs), outvars=list(wanted), eqns=equations, effects=core.no_effects
    )


def _kind(jaxpr: core.Jaxpr) -> Any:
    """Return a text that is equal for programs that differ in the names of their variables alone."""
    names = {var: number for number, var in enumerate(jaxpr.invars)}

    def name(atom: Any) -> Any:
        if isinstance(atom, core.Literal):
            return str(atom.aval), np.asarray(atom.val).tobytes()
        return names[atom]

    told: list[Any] = [tuple(str(var.aval) for var in jaxpr.invars)]
    for equation in jaxpr.eqns:
        params = tuple(sorted(equation.params.items(), key=lambda item: item[0]))
        told.append((equation.primitive, tuple(map(name, equation.invars)), params))
        names |= {var: len(names) + i for i, var in enumerate(equation.outvars)}
    told.append(tuple(map(name, jaxpr.outvars)))
    try:
        hash(tuple(told))
    except TypeError:  # it may equal no other then
        return object()
    return tuple(told)


def _run(jaxpr: core.Jaxpr, *given: Any) -> list[Any]:
    return core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, []))(*given)


def _is_key(var: core.Var) -> bool:
    aval: Any = var.aval
    return jnp.issubdtype(aval.dtype, jax.dtypes.prng_key)
