"""The environment variables of this project, so that a misspelt one is told."""

import sys
from collections.abc import Mapping

from jaxblt.validation import perhaps

PREFIX = "JAXBLT_"
VARIABLES = (
    "JAXBLT_API_KEY",
    "JAXBLT_BENCH_LOCK",
    "JAXBLT_COMMIT",
    "JAXBLT_COORDINATOR",
    "JAXBLT_EXPANSION",
    "JAXBLT_LISTOPS_D20S",
    "JAXBLT_NUM_PROCESSES",
    "JAXBLT_PROCESS_ID",
    "JAXBLT_TEST_DAY",
    "JAXBLT_TEST_GPU",
)
"""The variables that are read."""


def tell_unknown(environment: Mapping[str, str]) -> None:
    """Write to standard error which variables begin as those of this project and are none; a plugin may read them."""
    for name in sorted(environment):
        if name.startswith(PREFIX) and name not in VARIABLES:
            print(
                f"warning: jaxblt reads no environment variable {name}{perhaps(name, VARIABLES)}: "
                f"known are {', '.join(VARIABLES)}",
                file=sys.stderr,
            )
