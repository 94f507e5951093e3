"""Low precision: products in FP8 with scales by tensor or by step, and the scale of fp16's loss."""

from jaxblt.precision.attention import AttentionPast, attend_in_fp8
from jaxblt.precision.config import Fp8Config, Scaling
from jaxblt.precision.formats import E4M3, E5M2, Format, quantise, scale_for
from jaxblt.precision.loss_scale import LossScaleConfig, first_loss_scale, next_loss_scale
from jaxblt.precision.products import Past, fp8_by_ratio, fp8_product
from jaxblt.precision.sites import find_sites, first_amax, in_fp8, next_amax

__all__ = [
    "E4M3",
    "E5M2",
    "AttentionPast",
    "Format",
    "Fp8Config",
    "LossScaleConfig",
    "Past",
    "Scaling",
    "attend_in_fp8",
    "find_sites",
    "first_amax",
    "first_loss_scale",
    "fp8_by_ratio",
    "fp8_product",
    "in_fp8",
    "next_amax",
    "next_loss_scale",
    "quantise",
    "scale_for",
]
