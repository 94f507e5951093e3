"""Patches as text, for the eye."""

import numpy as np

from jaxblt.data.vocab import BOE, BOS, EOS, OFFSET, PAD, decode
from jaxblt.patching.patches import Patches

SPECIAL = {BOE: "⟨BOE⟩", BOS: "⟨BOS⟩", EOS: "⟨EOS⟩", PAD: "⟨PAD⟩"}


def split_patches(ids: np.ndarray, patches: Patches, *, row: int = 0) -> list[np.ndarray]:
    """Return the ids of each patch of one row, in order; padding is left out.

    Args:
      ids: [bytes], the row that was patched.
      patches: of the batch.
      row: which of its rows.

    Raises:
      ValueError: the row has another number of bytes.
    """
    ids = np.asarray(ids)
    if ids.shape != (patches.num_bytes,):
        raise ValueError(
            f"ids must be the {patches.num_bytes} bytes of one patched row, got shape {ids.shape}"
        )
    return [ids[start : start + length] for start, length in patch_spans(patches, row)]


def patch_spans(patches: Patches, row: int) -> list[tuple[int, int]]:
    """Return first byte (in the row) and length of each patch of one row, in order."""
    lengths, starts = np.asarray(patches.lengths[row]), np.asarray(patches.starts[row])
    starts = starts + np.arange(len(starts))[:, None] * patches.block_size
    return list(zip(starts[lengths > 0].tolist(), lengths[lengths > 0].tolist(), strict=True))


def render_patches(ids: np.ndarray, patches: Patches, *, row: int = 0, separator: str = "│") -> str:
    """Return one row's text with a separator between patches.

    Bytes that are no UTF-8 within their patch show as \\xNN, special ids by name, line ends as ↵ and the break.
    """
    return separator.join(_show(patch) for patch in split_patches(ids, patches, row=row))


def label_byte(token: int) -> str:
    """Return a short label of one id: an ASCII character, ␣, ↵, ⇥, hexadecimal, or its name."""
    if token < OFFSET:
        return SPECIAL[token]
    byte = token - OFFSET
    named = {ord(" "): "␣", ord("\n"): "↵", ord("\t"): "⇥"}
    return named.get(byte, chr(byte) if 0x20 < byte < 0x7F else f"{byte:02x}")


def _show(patch: np.ndarray) -> str:
    """Return the text of one patch: runs of bytes between special ids are decoded together."""
    cuts = np.flatnonzero((patch[1:] < OFFSET) | (patch[:-1] < OFFSET)) + 1
    return "".join(
        SPECIAL[int(run[0])] if run[0] < OFFSET else decode(run).decode("utf-8", "backslashreplace")
        for run in np.split(patch, cuts)
    ).replace("\n", "↵\n")
