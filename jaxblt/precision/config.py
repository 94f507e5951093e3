"""How products with weights run in FP8: which, and where their scales come from."""

from dataclasses import dataclass
from typing import Literal

from jaxblt.validation import check_bounds, check_fields, check_read

Scaling = Literal["current", "delayed"]
"""Where an operand's scale comes from: its own largest entry, or those of the steps before."""


@dataclass(frozen=True, kw_only=True)
class Fp8Config:
    """FP8 products: E4M3 for what goes forward, E5M2 for gradients, fp32 masters.

    A `Linear` in bfloat16 runs in FP8 if both of its sides divide by 16. Heads, routers and gates sum in fp32, and stay
    as they are; so do embeddings, norms and filters.

    Attributes:
      scaling: "current" takes the largest entry of the operand itself. "delayed" takes those of the last steps, so that
        no product waits for a look at its operands; a larger entry saturates once. On one H200 both are as fast.
      history: steps that "delayed" looks back.
      margin: powers of two that are left free above the largest entry.
      keep: patterns of paths of products that stay in bfloat16, such as "stack/*/mixer/*".
      attention: run causal attention over whole rows in FP8 too, on one Hopper GPU. It needs "delayed" scales, heads of
        128 channels and rows of one document without holes; layers with a window stay in bfloat16.
    """

    scaling: Scaling = "current"
    history: int = 16
    margin: int = 0
    keep: tuple[str, ...] = ()
    attention: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "history", least=1, most=1024)
        check_bounds(self, "margin", least=0, most=8)
        if self.attention and self.scaling != "delayed":
            raise ValueError(
                f"attention=True needs scaling='delayed', got {self.scaling!r}: gradients of scores are rounded before "
                "their largest entry is known"
            )
        check_read(self, "history", needed="scaling='delayed'", is_read=self.scaling == "delayed")
