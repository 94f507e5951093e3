"""How a benchmark leaves its figures: as JSON, with what they were measured on."""

import json
from pathlib import Path
from typing import Any

from jaxblt.profiling.provenance import provenance


def save(out: str, figures: dict[str, Any]) -> None:
    """Writes the figures with versions, commit and hardware of this process to `out`, and prints the figures.

    Raises:
      ValueError: a figure has the name of one of those.
    """
    origin = provenance()
    if taken := sorted(figures.keys() & origin.keys()):
        raise ValueError(f"figures named {taken} would be lost: {sorted(origin)} say where they come from")
    file = Path(out)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({**figures, **origin}, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(figures, indent=2))
