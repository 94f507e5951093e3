"""PyTorch as a peer: importing it, and what figures say of it."""

from typing import Any


def import_torch() -> Any:
    """Import PyTorch.

    Raises:
      RuntimeError: it is not installed, or sees no GPU.
    """
    try:
        import torch
    except ImportError as error:
        raise RuntimeError("the peer needs PyTorch: install torch on a machine with a GPU") from error
    if not torch.cuda.is_available():
        raise RuntimeError("the peer is timed on a GPU, and torch sees none here")
    return torch


def about(torch: Any) -> dict[str, Any]:
    """Return what figures of a peer say of where they were taken."""
    return {"torch": torch.__version__, "device": torch.cuda.get_device_name()}
