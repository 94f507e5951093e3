"""Questions of a test to a compiled program's collectives."""

from itertools import chain
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxblt.profiling.collectives import Collective, exchanges


def collectives(compiled: Any) -> list[Collective]:
    """Return all arrays that the exchanges of a program leave on a device.

    The program is `jit(f).lower(...).compile()`.
    """
    return list(chain.from_iterable(exchanges(compiled.as_text() or "")))


def spanning(
    found: list[Collective], length: int, *, kinds: tuple[str, ...] = ("all-gather",)
) -> list[Collective]:
    """Return those of `kinds` whose result has a whole sequence: a multiple of `length`.

    Give the sequence a length (say 8 x 37) that no other dimension is a multiple of.
    """
    return [c for c in found if c.kind in kinds and any(d and d % length == 0 for d in c.shape)]


def crossed_axes(collective: Collective, mesh: Mesh) -> set[str]:
    """Return the axes of the mesh along which devices of one group of the exchange differ.

    A program that names no groups means all devices.
    """
    places = np.stack(np.unravel_index(np.arange(mesh.size), mesh.devices.shape), -1)
    groups = [list(group) for group in collective.groups if group] or [list(range(mesh.size))]
    differ = np.any([np.ptp(places[group], axis=0) > 0 for group in groups], 0)
    return {axis for axis, differs in zip(mesh.axis_names, differ, strict=True) if differs}
