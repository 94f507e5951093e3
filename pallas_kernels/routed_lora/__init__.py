"""Products with a weight and a low-rank update whose ranks a code scales, for sites that read one x."""

from pallas_kernels.routed_lora.active import active_blocks
from pallas_kernels.routed_lora.api import TABLE, can_join, can_skip, explain, routed_lora
from pallas_kernels.routed_lora.joined import Joined, join, multiply_joined

__all__ = [
    "TABLE",
    "Joined",
    "active_blocks",
    "can_join",
    "can_skip",
    "explain",
    "join",
    "multiply_joined",
    "routed_lora",
]
