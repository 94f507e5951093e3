"""Names of the layers that are timed with the sequence split."""

from typing import Literal

Kind = Literal[
    "modal",
    "explicit",
    "implicit",
    "gated_delta_net",
    "gated_linear_attention",
    "mamba2",
    "state_engine",
    "every_tenth_block",
    "sparse_attention",
]
"""A filter of Hyena, or another mixer."""
Passes = Literal["forward", "both"]
"""Over a layer: without gradients, or with them."""
