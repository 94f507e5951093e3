"""Islands for channel-major streams, [B, D, T]: local rows, or local stretches of them under a `seq` axis."""

import math
from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Int

from jaxblt.parallel.halo import splits_sequence
from jaxblt.parallel.islands import over_batch
from jaxblt.parallel.sequence import over_sequence, seq_axis


def over_streams(
    fn: Callable[[Any, Any, Any], Array],
    streams: Any,
    segment_ids: Int[Array, "B T"] | None,
    shared: Any = (),
) -> Array:
    """`fn(streams, segment_ids, shared)` -> [B, D, T], each device on its own rows and stretch of the sequence.

    Without a `seq` axis rows are whole; `fn` tells by `splits_sequence()` and then asks its neighbours for the rest.
    """
    if seq_axis() is None:
        return over_batch(lambda rows, shared: fn(rows[0], rows[1], shared), (streams, segment_ids), shared)
    row = None if segment_ids is None else segment_ids[:, None]

    def island(sequenced: Any, _: Any, shared: Any) -> Array:
        streams, row = sequenced
        return fn(streams, None if row is None else row[:, 0], shared)

    return over_sequence(island, (streams, row), (), shared, time_axis=2)


def local_alignment(alignment: int, length: int) -> int:
    """The grid on which documents start in the array that an island sees: a stretch may begin between its lines."""
    return math.gcd(alignment, length) if splits_sequence() else alignment
