"""Products with a weight and a low-rank update whose ranks a code scales, for sites that read one x."""

from pallas_kernels.routed_lora.active import active_blocks
from pallas_kernels.routed_lora.api import TABLE, can_skip, explain, routed_lora

__all__ = ["TABLE", "active_blocks", "can_skip", "explain", "routed_lora"]
