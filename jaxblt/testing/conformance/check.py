"""Checking a layer: every property that it promises, at lengths from small to large, and the smallest failure."""

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import pairwise

from jaxblt.testing.conformance.bench import Bench, Measured
from jaxblt.testing.conformance.cases import Case
from jaxblt.testing.conformance.properties import PROPERTIES, Property
from jaxblt.testing.conformance.script import write_script
from jaxblt.testing.conformance.subject import Subject

TRIES = 60
"""The most inputs that are tried in looking for a smaller failure."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """The smallest input that was found on which a property does not hold.

    Attributes:
      error: in units of the root mean square of what was expected.
      limit: its tolerance.
      length: tokens of the input.
      cut: where the property cuts it; None if it does not.
      says: what the layer raised, or what it gave instead of numbers; else nothing.
      most: the tolerance of the number that the script prints; None if it prints none.
      script: Python that shows the error, of the bridge's lines and the property's.
    """

    error: float
    limit: float
    length: int
    cut: int | None
    says: str
    most: float | None
    script: str


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What was found of one property.

    Attributes:
      name: of the property.
      promised: the subject promises what it is about; otherwise nothing was called.
      error: the largest one of all cases, in units of the root mean square of what was expected.
      limit: its tolerance.
      finding: where the property does not hold; None if it holds.
    """

    name: str
    promised: bool
    error: float = 0.0
    limit: float = 0.0
    finding: Finding | None = None


def check(subject: Subject, *, only: Sequence[str] | None = None) -> list[Outcome]:
    """Check what a layer promises, property by property.

    Args:
      subject: the layer.
      only: names of properties to check; None for all.

    Raises:
      ValueError: a name in `only` is no property, or the layer lacks what a promise needs.
      ImportError, RuntimeError: the layer cannot be made here.
    """
    return list(check_each(subject, only=only))


def check_each(subject: Subject, *, only: Sequence[str] | None = None) -> Iterator[Outcome]:
    """Yield the outcomes of `check` one by one, as they are found."""
    if unknown := sorted(set(only or ()) - set(PROPERTIES)):
        known = ", ".join(PROPERTIES)
        raise ValueError(f"no property is called {', '.join(unknown)}, choose some of: {known}")
    bench = Bench(subject, subject.build())
    for name in only or PROPERTIES:
        yield _outcome(PROPERTIES[name], bench)


def _outcome(prop: Property, bench: Bench) -> Outcome:
    if not prop.needs.issubset(bench.subject.promises):
        return Outcome(prop.name, promised=False)
    largest = Measured(0.0, 0.0)
    for before, length in pairwise((0, *bench.subject.lengths)):
        for case in bench.cases(prop, length):
            measured = bench.measure(prop, case)
            if not measured.holds:
                found = _finding(prop, bench, *_smallest(prop, bench, before, case, measured))
                return Outcome(prop.name, True, found.error, found.limit, found)
            largest = max(largest, measured, key=lambda each: (each.error, each.limit))
    return Outcome(prop.name, True, largest.error, largest.limit)


def _smallest(
    prop: Property, bench: Bench, before: int, case: Case, measured: Measured
) -> tuple[Case, Measured]:
    """Return the first failure between a length that holds and a case that fails."""
    between = [each for length in range(before + 1, case.length) for each in bench.cases(prop, length)]
    for smaller in between[:TRIES]:
        again = bench.measure(prop, smaller)
        if not again.holds:
            return smaller, again
    return case, measured


def _finding(prop: Property, bench: Bench, case: Case, measured: Measured) -> Finding:
    script = write_script(prop, bench, case, measured)
    most = None if measured.says else measured.limit * measured.unit
    return Finding(measured.error, measured.limit, case.length, case.cut, measured.says, most, script)
