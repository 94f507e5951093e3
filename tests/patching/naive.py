"""Patching as a plain walk along the bytes, in Python: what every fast form is compared with."""

import math

import numpy as np

from jaxblt.patching import PatcherConfig


def naive_closed(
    config: PatcherConfig, ids: np.ndarray, entropies: np.ndarray, segment_ids: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Where patches close in one row, slots counted, and whether each byte is the first of its block."""
    closed, begins = np.zeros(len(ids), bool), np.zeros(len(ids), bool)
    offset, document = 0, 0
    for t in range(len(ids)):
        if segment_ids[t] == 0:
            continue
        first = segment_ids[t] != document
        if first or offset == config.block_size:
            offset, length, spent, patches = 0, 0, 0, 1
            begins[t] = True
        document = segment_ids[t]
        length += 1
        spent += math.floor(float(np.float32(entropies[t])) * 2**16)
        closing = _asks(config, int(ids[t]), entropies, t, first, offset, length, spent)
        if config.min_length > length:
            closing = False
        if config.max_length is not None and length >= config.max_length:
            closing = True
        offset += 1
        if offset == config.block_size:
            closed[t] = True
        elif closing:
            closed[t] = patches < config.slots
            patches, length, spent = patches + 1, 0, 0
    return closed, begins


def _asks(config, token, entropies, t, first, offset, length, spent) -> bool:
    h = np.float32(entropies[t])
    rise = h - np.float32(entropies[t - 1]) if t > 0 else None
    match config.mode:
        case "byte":
            return True
        case "static":
            return (offset + 1) % config.patch_size == 0
        case "space":
            character = chr(token - 4) if token >= 4 else " "
            return not (character.isalnum() if ord(character) < 0x80 else True)
        case "greedy":
            return spent > math.floor(float(np.float32(config.threshold)) * 2**16)
    if first:
        return True
    if config.monotonic:
        return bool(rise > np.float32(config.threshold))
    if config.threshold_add is not None:
        both = rise > np.float32(config.threshold_add) and h > np.float32(config.threshold)
        return bool(both and length > 1)
    return bool(h > np.float32(config.threshold))


def naive_starts(closed: np.ndarray, begins: np.ndarray, segment_ids: np.ndarray) -> list[int]:
    """First bytes of patches: at a block's start and behind the last byte of a patch."""
    inside = [t for t in range(len(closed)) if segment_ids[t] > 0]
    return [t for t in inside if begins[t] or closed[t - 1]]
