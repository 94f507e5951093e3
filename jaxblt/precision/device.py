"""Which devices multiply in FP8."""

from pallas_kernels.runtime import Device

LEAST = (8, 9)
"""The CUDA capability from which GPUs multiply in FP8. CPUs compute the same values in bfloat16."""


def check_fp8(device: Device) -> None:
    """Check that a GPU multiplies in FP8.

    Raises:
      ValueError: it does not, and XLA would multiply in bfloat16 after rounding.
    """
    if device.platform == "gpu" and device.capability is not None and device.capability < LEAST:
        own = ".".join(map(str, device.capability))
        raise ValueError(
            f"precision 'fp8' needs CUDA capability {LEAST[0]}.{LEAST[1]}, and {device.kind} has {own}: use "
            "train.precision='dtype'"
        )
