"""Which cases of a big matrix run in a week: a few of them, the next few in the next week, till all have."""

import datetime
import os
import random
from collections.abc import Sequence

VARIABLE = "JAXBLT_TEST_WEEK"
"""Names the week whose cases run, as 2026-W47; this week's if unset."""


def this_week() -> str:
    """By ISO, in UTC."""
    year, week, _ = datetime.datetime.now(datetime.UTC).isocalendar()
    return f"{year}-W{week:02d}"


def chosen_week() -> str:
    """That of the environment, or this one.

    Raises:
      ValueError: the environment's is none.
    """
    week = os.environ.get(VARIABLE) or this_week()
    number_of(week)
    return week


def number_of(week: str) -> int:
    """Weeks since the year 1, so that one year's last is followed by the next one's first.

    Raises:
      ValueError: it is no ISO week.
    """
    try:
        year, _, number = week.partition("-W")
        return datetime.date.fromisocalendar(int(year), int(number), 1).toordinal() // 7
    except ValueError:
        raise ValueError(f"{VARIABLE}={week!r} is no week: expected one as {this_week()}") from None


def sampled[Case](cases: Sequence[Case], count: int, name: str, week: str) -> list[Case]:
    """`count` of the cases; every one is among those of some of len(cases) / count weeks that follow each other.

    Args:
      cases: the whole matrix.
      count: how many run in a week.
      name: of the matrix; each has its own order.
      week: as 2026-W47.
    """
    shuffled = list(cases)
    random.Random(name).shuffle(shuffled)
    if count >= len(shuffled):
        return shuffled
    begin = number_of(week) * count
    return [shuffled[(begin + i) % len(shuffled)] for i in range(count)]


def in_turns[Case](cases: Sequence[Case], weeks: int, name: str, week: str) -> list[Case]:
    """All cases in so many weeks that follow each other, each once; one case each week if there are fewer than weeks.

    Args:
      cases: the whole matrix.
      weeks: where they do not divide the cases, some weeks have one case more than others.
      name: of the matrix; each has its own order.
      week: as 2026-W47.
    """
    shuffled = list(cases)
    random.Random(name).shuffle(shuffled)
    count, number = len(shuffled), number_of(week)
    weeks = min(weeks, count)
    return [shuffled[i % count] for i in range(number * count // weeks, (number + 1) * count // weeks)]
