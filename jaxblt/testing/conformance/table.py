"""The outcomes of a check as a table for a terminal."""

from collections.abc import Sequence

from jaxblt.testing.conformance.check import Outcome
from jaxblt.text_table import format_table

HEADS = ("property", "result", "error", "tolerance")


def format_outcomes(outcomes: Sequence[Outcome]) -> str:
    """Write one line a property; errors are in units of the root mean square of what was expected."""
    return format_table(HEADS, [_row(outcome) for outcome in outcomes])


def _row(outcome: Outcome) -> tuple[str, str, str, str]:
    if not outcome.promised:
        return outcome.name, "not promised", "", ""
    if outcome.finding is None:
        said = "equal" if outcome.error == 0 else "holds"
        return outcome.name, said, f"{outcome.error:.1e}", f"{outcome.limit:.1e}"
    found = outcome.finding
    at = f"FAILS at length {found.length}" + ("" if found.cut is None else f", cut {found.cut}")
    return outcome.name, at, found.says or f"{found.error:.1e}", "" if found.says else f"{found.limit:.1e}"
