"""Checks what a layer of one's own promises: jaxblt conformance SUBJECT.py."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

if TYPE_CHECKING:
    from jaxblt.testing.conformance import Outcome, Subject


def conformance(file: Annotated[str, tyro.conf.Positional], only: tuple[str, ...] = ()) -> int:
    """Check every property that a layer promises, and print a script for each that does not hold.

    The exit status is 1 if one does not hold.

    Args:
      file: a Python file that defines `subject`, a jaxblt.testing.conformance.Subject, or `subjects`, several.
      only: names of properties to check; all by default.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it fails, defines neither, or a property is unknown.
      ImportError: a package that a subject needs is not installed.
      RuntimeError: a subject needs a GPU that is not here.
    """
    from jaxblt.testing.conformance import check, format_outcomes

    failed = 0
    for subject in load_subjects(file):
        outcomes = check(subject, only=only or None)
        print(f"{subject.name}\n\n{format_outcomes(outcomes)}\n")
        failed += _print_scripts(outcomes)
    print(f"{failed} properties do not hold" if failed else "every promised property holds")
    return min(failed, 1)


def _print_scripts(outcomes: "Sequence[Outcome]") -> int:
    """Print the scripts of what does not hold, and return how many there are."""
    findings = [(outcome.name, outcome.finding) for outcome in outcomes if outcome.finding]
    for name, finding in findings:
        print(f"# {name}\n{finding.script}")
    return len(findings)


def load_subjects(file: str) -> "tuple[Subject, ...]":
    """Return the subjects that a Python file defines.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it fails, or defines neither `subject` nor `subjects`.
    """
    from jaxblt.cli.find_recipe import load_file
    from jaxblt.testing.conformance import Subject

    if not Path(file).is_file():
        raise FileNotFoundError(
            f"no file {file!r} to take a subject from: name a Python file that defines one"
        )
    module = load_file(file)
    named = getattr(module, "subjects", (getattr(module, "subject", None),))
    found = tuple(each for each in named if isinstance(each, Subject))
    if not found:
        raise ValueError(
            f"{file} defines no subject: write subject = Subject(...) of jaxblt.testing.conformance, or subjects"
        )
    return found
