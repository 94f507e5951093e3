"""What kernels called through jax-triton need, known without importing Triton, which many machines lack."""

from importlib.util import find_spec

from pallas_kernels._dispatch import Device


def why_not_on(device: Device) -> str | None:
    """Return why no such kernel can run on a device, or None."""
    if device.platform != "gpu" or device.capability is None or device.capability < (8, 0):
        return f"it is compiled for NVIDIA GPUs of compute capability 8.0 or newer, this is {device.kind}"
    if missing := [name for name in ("triton", "jax_triton") if find_spec(name) is None]:
        return f"{' and '.join(missing)} not found (pip install 'jaxblt[triton]')"
    return None
