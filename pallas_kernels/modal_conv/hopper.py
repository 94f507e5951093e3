"""The calls that the Hopper kernel takes, known without importing Pallas' GPU dialect (over a second)."""

from typing import Any

from pallas_kernels._dispatch import Device
from pallas_kernels._hopper import CHUNK, ROWS, is_in_whole_boxes, why_not_streams

TILE = CHUNK * ROWS

SHORTEST = 1024
"""Steps of the shortest row that is taken. Alone in a tile, at 1,024 steps (8 rows of 1,024 channels), XLA took 1.38
times as long forward and 0.93 with gradients, at 2,048 steps 2.1 and 1.6 times: forward decides."""

MODES = 16
"""Modes per channel; fewer are filled up with modes of no weight."""


def rows_per_tile(batch: int, length: int) -> int:
    """Return how many rows of one channel fit into a tile, 1, 2 or 4.

    They divide the batch and are whole boxes.
    """
    fitting = (n for n in (4, 2) if batch % n == 0 and n * length <= TILE and is_in_whole_boxes(length))
    return next(fitting, 1)


def why_not(
    device: Device,
    x: Any,
    log_poles: Any,
    residues: Any,
    *,
    segment_ids: Any = None,
    output_final_state: bool = False,
    pre_gate: Any = None,
    post_gate: Any = None,
    **_: Any,
) -> str | None:
    """Return why the kernel cannot run such a call, or None."""
    if refused := why_not_streams(device, x, pre_gate, post_gate):
        return refused
    if segment_ids is not None and output_final_state:
        return "it does not know the state after packed rows"
    if log_poles.shape[1] > MODES:
        return f"it takes at most {MODES} modes, not {log_poles.shape[1]}"
    if x.shape[2] < SHORTEST:
        return f"rows of {x.shape[2]} steps are shorter than {SHORTEST}, too little of a tile of {TILE}"
    return None
