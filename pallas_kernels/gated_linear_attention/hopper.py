"""The calls that the Hopper kernels take, known without importing Pallas' GPU dialect (over a second)."""

from typing import Any

from pallas_kernels._dispatch import Device
from pallas_kernels._hopper import MOST_BLOCKS, why_not_streams

WIDTHS = (64, 128)
"""Key channels of a head, of one program."""

WIDEST = 512
"""The most key channels of a head; above 128 they are cut into pieces of 128."""

MOST_FILLED = 4
"""Times the channels asked for that heads filled up with zeros may have, of values under gates per value channel, of
keys under gates per key channel: such ones were timed, and are faster than `xla`."""

PIECE = 64
"""Steps of a chunk, and channels of a tile: 128 bytes of bf16."""


def filled_keys(keys: int) -> int:
    """Return the narrowest heads of keys that hold as many channels."""
    return next((width for width in WIDTHS if keys <= width), -(-keys // WIDTHS[-1]) * WIDTHS[-1])


def filled_values(values: int) -> int:
    """Return the narrowest heads of values that hold as many channels."""
    return -(-values // PIECE) * PIECE


def program_values(keys: int, values: int, *, by_key: bool) -> int:
    """Return the value channels of a program, for heads as wide as they are filled up to.

    Two warpgroups share what they make of key channels: of gates by key channel only if each has 64 of them.
    """
    shared = keys == WIDTHS[-1] if by_key else keys <= WIDTHS[-1]
    return 2 * PIECE if shared and values % (2 * PIECE) == 0 else PIECE


def why_not(device: Device, q: Any, k: Any, v: Any, *, log_key_gate: Any = None, **_: Any) -> str | None:
    """Return why the kernels cannot run such a call, or None."""
    return why_not_heads(device, q, k, v, by_key=log_key_gate is not None) or why_not_steps(v.shape[1])


def why_not_heads(device: Device, q: Any, k: Any, v: Any, *, by_key: bool) -> str | None:
    """Return why the kernels cannot run such a call with rows of any length, or None."""
    if refused := why_not_streams(device, q, k, v):
        return refused
    if k.shape[3] > (WIDTHS[-1] if by_key else WIDEST):
        return (
            f"its keys are at most {WIDEST} wide, {WIDTHS[-1]} under gates by key channel, not {k.shape[3]}"
        )
    keys, values = filled_keys(k.shape[3]), filled_values(v.shape[3])
    parts = values // program_values(keys, values, by_key=by_key)
    # Give a program of wide keys' gradients one tile of their channels
    programs = v.shape[2] * parts * (keys // PIECE if keys > WIDTHS[-1] else 1)
    if programs > MOST_BLOCKS:
        return f"a grid has at most {MOST_BLOCKS} programs of heads, {v.shape[2]} heads are {programs}"
    return None


def why_not_steps(length: int) -> str | None:
    """Return why the kernels cannot run rows of as many steps, or None.

    Gradients have a program for each chunk.
    """
    if (chunks := -(-length // PIECE)) > MOST_BLOCKS:
        longest = MOST_BLOCKS * PIECE
        return (
            f"a grid has at most {MOST_BLOCKS} chunks, rows of {longest} steps; {length} steps are {chunks}"
        )
    return None


def rather_not(
    device: Device, q: Any, k: Any, v: Any, *, log_key_gate: Any = None, log_value_gate: Any = None, **_: Any
) -> str | None:
    """Return why a call is left to others, or None.

    These are rows of a few steps, as in decoding, and widths that were not timed.
    """
    del device, q
    (_, length, _, values), keys = v.shape, k.shape[3]
    if length < PIECE:
        return f"rows of {length} steps would be filled up to {PIECE}"
    widest, most = (WIDTHS[-1], 1) if log_value_gate is None else (WIDEST, MOST_FILLED)
    most_keys = 1 if log_key_gate is None else MOST_FILLED
    if keys > widest:
        return f"keys of more than {widest} channels were timed under gates per value channel only"
    filled = (filled_keys(keys), filled_values(values))
    if filled[0] > most_keys * keys or filled[1] > most * values:
        return (
            f"heads of {keys} and {values} channels, filled up to {filled[0]} and {filled[1]}, were not timed"
        )
    return None
