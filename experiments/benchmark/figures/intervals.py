"""The confidence in a share of answers."""

import math


def wilson(right: int, asked: int, z: float = 1.96) -> tuple[float, float]:
    """Return ends of the 95 % interval of a share, which `right` of `asked` were seen of.

    Source: Wilson, JASA 22 (1927); unlike the normal one it stays inside 0..1 and is no point at either end.
    """
    share, square = right / asked, z * z / asked
    middle, half = share + square / 2, z * math.sqrt((share * (1 - share) + square / 4) / asked)
    return (middle - half) / (1 + square), (middle + half) / (1 + square)
