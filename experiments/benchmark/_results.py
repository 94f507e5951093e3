"""How a benchmark leaves its figures: as JSON, with what they were measured on."""

import json
from pathlib import Path
from typing import Any

from jaxblt.profiling.provenance import provenance


def save(out: str, figures: dict[str, Any]) -> None:
    """Writes the figures with versions, commit and hardware of this process to `out`, and prints the figures."""
    file = Path(out)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({**figures, **provenance()}, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(figures, indent=2))
