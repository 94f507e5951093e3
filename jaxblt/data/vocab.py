"""The byte vocabulary of 260 ids: four special ids, then 256 bytes.

Decoding an encoded document returns the same bytes, also for N, IUPAC codes and lower case.
"""

import numpy as np

BOE = 0
"""Id that stands for a masked byte; documents never contain it."""
BOS = 1
"""Id before a document's first byte."""
EOS = 2
"""Id after a document's last byte."""
PAD = 3
"""Id of positions that hold no byte."""
OFFSET = 4
"""Number of special ids: byte b has id b + OFFSET."""
VOCAB_SIZE = 256 + OFFSET
"""Number of ids: bytes and special ids."""


def check_single_bytes(name: str, characters: str) -> None:
    """Raise ValueError for characters that UTF-8 writes as several bytes.

    Other characters share these bytes, so a byte does not identify one character.
    """
    if not characters.isascii():
        raise ValueError(
            f"{name} = {characters!r} must be characters of one byte, such as 'ACGT': leave others out"
        )


def encode(data: bytes, *, bos: bool = False, eos: bool = False) -> np.ndarray:
    """Return bytes as int32 ids (byte + 4), with BOS before if `bos` and EOS after if `eos`.

    Raises:
      TypeError: text instead of bytes.
    """
    if isinstance(data, str):
        raise TypeError(f"encode takes bytes, got text {data[:40]!r}: write text.encode()")
    ids = np.frombuffer(data, np.uint8).astype(np.int32) + OFFSET
    head = np.array([BOS] * bos, np.int32)
    tail = np.array([EOS] * eos, np.int32)
    return np.concatenate([head, ids, tail])


def check_whole(name: str, values: np.ndarray) -> None:
    """Raise ValueError unless an array holds whole numbers or is empty."""
    if values.size and not np.issubdtype(values.dtype, np.integer):
        raise ValueError(f"{name} must be whole numbers, got dtype {values.dtype}")


def decode(ids: np.ndarray) -> bytes:
    """Return the bytes among `ids`; special ids are dropped.

    Raises:
      ValueError: an id is no whole number, or lies outside 0..259.
    """
    ids = np.asarray(ids)
    check_whole("ids", ids)
    if ids.size and (ids.min() < 0 or ids.max() >= VOCAB_SIZE):
        raise ValueError(f"ids must lie in 0..{VOCAB_SIZE - 1}, got {int(ids.min())}..{int(ids.max())}")
    return (ids[ids >= OFFSET] - OFFSET).astype(np.uint8).tobytes()
