"""Measurements that several calls share: what their file holds already is read back, and not measured again."""

import json
from pathlib import Path
from typing import Any


def read_back(out: str, said: dict[str, Any]) -> dict[str, Any]:
    """Return the figures that an earlier call left in `out`; none without a file.

    Args:
      out: JSON file.
      said: what both calls must have in common.

    Raises:
      ValueError: the file says something else, or nothing, of that.
    """
    if not Path(out).is_file():
        return {}
    found = json.loads(Path(out).read_text(encoding="utf-8"))
    for name, value in json.loads(json.dumps(said)).items():
        if found.get(name) != value:
            raise ValueError(
                f"{out} has {name} = {found.get(name)}, and this call has {value}: a call goes on with what one of the "
                "same settings measured, choose another --out"
            )
    return found
