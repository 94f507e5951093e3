"""Which cases of a big matrix run on a day: a few of them, the next few on the next day, until all have run."""

import datetime
import os
import random
from collections.abc import Callable, Hashable, Sequence
from itertools import combinations

VARIABLE = "JAXBLT_TEST_DAY"
"""Names the day whose cases run, as 2026-11-29; today if unset."""


def today() -> str:
    """Return the day in UTC."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def chosen_day() -> str:
    """Return the day of the environment, or today.

    Raises:
      ValueError: the environment's is no day.
    """
    day = os.environ.get(VARIABLE) or today()
    number_of(day)
    return day


def number_of(day: str) -> int:
    """Return the days since the year 1.

    Raises:
      ValueError: it is no day.
    """
    try:
        return datetime.date.fromisoformat(day).toordinal()
    except ValueError:
        raise ValueError(f"{VARIABLE}={day!r} is no day: expected one as {today()}") from None


def in_turns[Case](cases: Sequence[Case], days: int, name: str, day: str) -> list[Case]:
    """Return a day's cases: all come in so many days that follow each other, each once.

    Args:
      cases: the whole matrix; if it has fewer cases than days, some days have none.
      days: where they do not divide the cases, some days have one case more than others.
      name: of the matrix; each has its own order and its own first day.
      day: as 2026-11-29.
    """
    shuffled, chance = list(cases), random.Random(name)
    chance.shuffle(shuffled)
    # Keep small matrices from coming all on one day
    count, number = len(shuffled), number_of(day) + chance.randrange(days)
    return [shuffled[i % count] for i in range(number * count // days, (number + 1) * count // days)]


def thinned[Case](
    cases: Sequence[Case], count: int, values: Callable[[Case], Sequence[Hashable]]
) -> list[Case]:
    """Return `count` cases of a full matrix that have together as many pairs of values as a greedy choice finds.

    Args:
      cases: the full matrix.
      count: how many are taken.
      values: of a case, one of each axis.
    """
    left = [(case, set(combinations(enumerate(values(case)), 2))) for case in cases]
    chosen: list[Case] = []
    seen: set[object] = set()
    while left and len(chosen) < count:
        case, pairs = left.pop(max(range(len(left)), key=lambda i: len(left[i][1] - seen)))
        chosen.append(case)
        seen |= pairs
    return chosen
