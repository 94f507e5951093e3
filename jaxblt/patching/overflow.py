"""Say when patch boundaries are refused for want of slots: a capacity fits the data that it was calibrated on."""

import warnings

QUIET = 1e-3
"""Share of refused boundaries up to which nothing is said: calibration leaves one block of a thousand."""


class PatchOverflowWarning(UserWarning):
    """Blocks have fewer slots than the data asks for: patches there are longer than the rule makes them."""


def warn_overflow(refused: float, wanted: float, *, capacity: int, block_size: int) -> None:
    """Warn, with the figures, if more than a share `QUIET` of boundaries was refused.

    Args:
      refused: boundaries that found no slot.
      wanted: boundaries that the rule asked for, the refused ones included.
      capacity: slots in a block.
      block_size: bytes in a block.
    """
    if refused <= QUIET * wanted:
        return
    warnings.warn(
        f"{refused:,.0f} of {wanted:,.0f} patch boundaries ({refused / wanted:.1%}) were refused for want of slots "
        f"(capacity {capacity} in blocks of {block_size} bytes): calibrate for this data with "
        "run.recalibrate(data) or --recalibrate, or raise capacity",
        PatchOverflowWarning,
        stacklevel=3,
    )
