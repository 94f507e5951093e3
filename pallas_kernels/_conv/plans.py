"""Parts that benchmarks of convolutions share."""

from collections.abc import Callable
from typing import Any

GIVEN = ("pre_gate", "post_gate", "segment_ids")


def by_position(op: Callable[..., Any], count: int, **options: Any) -> Callable[..., Any]:
    """Return `op` with all arguments by position, gates and ids last, for cases of a plan."""
    return lambda *args: op(*args[:count], **dict(zip(GIVEN, args[count:], strict=False)), **options)
