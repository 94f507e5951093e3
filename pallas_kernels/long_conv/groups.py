"""Channels in groups, so that spectra, which are twice as large as their inputs, stay within a limit."""

SPECTRUM_BYTES = 2**31
"""Above this size of the inputs' spectrum, channels are convolved group after group."""


def fewest_groups(channels: int, size: int, limit: int) -> int:
    """The fewest groups of equally many channels that keep each group's share of `size` within the limit."""
    fits = (n for n in range(1, channels + 1) if channels % n == 0 and size <= n * limit)
    return next(fits, channels)
