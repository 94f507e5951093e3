"""Names of the layers and operations that are timed with the sequence split."""

from typing import Literal

Kind = Literal[
    "modal", "explicit", "implicit", "gated_delta_net", "gated_linear_attention", "mamba2", "state_engine"
]
"""A filter of Hyena, or another mixer."""
Op = Literal["head", "key", "delta"]
"""`gated_linear_attention` with gates per head or per key channel, or `gated_delta_rule`."""
