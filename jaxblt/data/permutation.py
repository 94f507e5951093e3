"""Random order and random bits as pure functions of integers, the same on every platform."""

from functools import lru_cache

_WORD = (1 << 64) - 1
_ROUNDS = 8


def hash64(*words: int) -> int:
    """Hash integers to a well mixed 64-bit integer.

    It is the splitmix64 finaliser (Steele, Lea, Flood 2014, fig. 14).
    """
    state = 0
    for word in words:
        state = _mix((state + 0x9E3779B97F4A7C15 + (word & _WORD)) & _WORD)
    return state


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _WORD
    return x ^ (x >> 31)


def permute(i: int, size: int, *key: int) -> int:
    """Return where a random permutation of 0..size-1, picked by `key`, sends i.

    A Feistel network over the smallest even number of bits that holds `size`. It is walked along its cycle until it
    lands inside, on average in fewer than 4 turns (Black and Rogaway 2002, "Ciphers with arbitrary finite domains").

    Raises:
      IndexError: i lies outside 0..size-1.
    """
    if not 0 <= i < size:
        raise IndexError(f"index {i} lies outside 0..{size - 1}")
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = _round_keys(size, *key)
    i = _feistel(i, half, keys)
    while i >= size:
        i = _feistel(i, half, keys)
    return i


@lru_cache(maxsize=256)
def _round_keys(size: int, *key: int) -> tuple[int, ...]:
    """Make the keys of each round.

    Keep them: a batch sends all its rows through one permutation, and making the keys costs more than using them.
    """
    return tuple(hash64(*key, size, turn) for turn in range(_ROUNDS))


def _feistel(x: int, half: int, keys: tuple[int, ...]) -> int:
    mask = (1 << half) - 1
    left, right = x >> half, x & mask
    for key in keys:
        left, right = right, left ^ (_mix(key ^ right) & mask)
    return left << half | right
