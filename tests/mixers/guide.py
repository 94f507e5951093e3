"""The mixer of the guide, made of the page itself."""

import functools
import re
from pathlib import Path
from typing import Any

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "write-a-mixer.md"


def blocks() -> list[str]:
    """The page's pieces of Python: the mixer, its check, and a stack of it."""
    return re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)


@functools.cache
def written() -> dict[str, Any]:
    """The names that the mixer's block defines."""
    names: dict[str, Any] = {"__name__": "guide"}
    exec(compile(blocks()[0], str(GUIDE), "exec"), names)
    return names
